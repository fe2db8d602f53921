"""What `kvdock run -- python -m sglang.launch_server ...` adds to the command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from kvdock import Finding
from kvdock.errors import KvdockError
from kvdock.launch import Launch
from kvdock_sglang import doctor
from kvdock_sglang.launch_flags import (
    BACKEND,
    ENABLE,
    EXTRA,
    LOADER_KEYS,
    PAGE,
    PREFETCH,
    WAIT,
    Flags,
    configuration,
    from_words,
)


def launch(command: Sequence[str], settings: Mapping[str, object]) -> Launch:
    """Complete a command of SGLang's.

    Called by `kvdock run` and `kvdock config sglang`, in a process without SGLang.

    Args:
        command: Its words; flags that it has stay as they are.
        settings: What its storage class is to get, in words.
    """
    present = Flags.of(shlex.join(command)).given
    findings = doctor.examine(settings, ending=False)
    try:
        rest = {key: settings[key] for key in settings if key not in doctor.ABOUT_MODEL}
        text = str(rest.get("config", ""))
        extra = json.dumps(
            LOADER_KEYS | (configuration(text) if text else from_words(rest))
        )
    except KvdockError:  # among the findings
        extra = "{}"
    needed = {ENABLE: "", BACKEND: "dynamic", EXTRA: extra, PREFETCH: WAIT, PAGE: "64"}
    lacking = {flag: value for flag, value in needed.items() if flag not in present}
    flags = [word for pair in lacking.items() for word in pair if word]
    # What the command says otherwise is for the user to settle.
    whole = Flags.of(shlex.join([*command, *flags]))
    wrong = [Finding(ok=False, what=what, hint=hint) for what, hint in whole.problems()]
    if EXTRA in present:
        hint = "Start it without `kvdock run`, or leave the flag out."
        wrong.append(
            Finding(ok=False, what=f"the command has a {EXTRA} already", hint=hint)
        )
    return Launch(flags=flags, variables={}, findings=(*findings, *wrong))
