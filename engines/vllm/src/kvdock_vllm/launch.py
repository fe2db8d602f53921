"""What `kvdock run -- vllm serve MODEL` adds to the command."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from kvdock import Finding
from kvdock.errors import KvdockError
from kvdock.launch import Launch
from kvdock_vllm import doctor

CONFIGURATION = "--kv-transfer-config"
SHUTDOWN = "--shutdown-timeout"
SEED = "PYTHONHASHSEED"


def launch(command: Sequence[str], settings: Mapping[str, object]) -> Launch:
    """Complete a command of vLLM's.

    Called by `kvdock run` and `kvdock config vllm`, in a process without vLLM.

    Args:
        command: Its words; only the flags matter.
        settings: What its connector is to get, in words. Without `host_memory` it is
            half of what /dev/shm has free, and at most 16 GiB.
    """
    present = {word.partition("=")[0].replace("_", "-") for word in command}
    if "config" not in settings:
        settings = {"host_memory": doctor.default_host_memory(), **settings}
    findings = doctor.examine(settings, ending=False)
    if any(word.startswith(CONFIGURATION) for word in present):
        what = f"the command has a {CONFIGURATION} already"
        hint = "Start it without `kvdock run`, or leave the flag out."
        findings = (*findings, Finding(ok=False, what=what, hint=hint))
    try:
        whole = doctor.connector(doctor.extra_configuration(settings))
    except KvdockError:  # among the findings
        whole = {}
    flags = [CONFIGURATION, json.dumps(whole)]
    flags += [] if SHUTDOWN in present else [SHUTDOWN, "30"]
    # Hashes of blocks that other processes have as well, whatever makes them.
    variables = {} if os.environ.get(SEED) else {SEED: "0"}
    return Launch(flags=flags, variables=variables, findings=findings)
