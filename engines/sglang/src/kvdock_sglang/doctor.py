"""The section `kvdock doctor sglang`: would this engine start, and would it ever hit?

    kvdock doctor sglang --set plugin=file --set root=/data/kv
    kvdock doctor sglang --set config='{"plugin": "file", ...}'
    kvdock doctor sglang --set command='sglang serve ...'

All forms end with the command line to use. Groups of settings are spelled with
dots: `--set core.deadlines.get=2s`. What depends on the model is looked at with
`--set description=llama-3.1-8b`, and with `--set draft=eagle3` for the draft that goes
with it, by the functions that the storage class calls.
"""

from __future__ import annotations

import os
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvdock import Dock, Finding, Layout, Shard
from kvdock.config import Drafts, with_configured
from kvdock.errors import KvdockError, NoRoute, SettingsError
from kvdock.models import Deployment, assemble, load_model
from kvdock.self_test import try_engine
from kvdock_sglang import engine_api
from kvdock_sglang.attachments import Attachments, alone
from kvdock_sglang.host_pools import LAYOUTS
from kvdock_sglang.launch_flags import (
    EXTRA,
    LAYOUT,
    LOADER_KEYS,
    PAGE,
    PREFETCH,
    WAIT,
    Flags,
    command_line,
    configuration,
    engine_problems,
    from_words,
)
from kvdock_sglang.namespace import Ranks
from kvdock_sglang.settings import collect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvdock_sglang.settings import Configuration

ABOUT_MODEL = ("description", "draft")
"""Settings that say which model is looked at, and which draft."""

NO_FLAGS: Mapping[str, str] = MappingProxyType({})


def examine(
    settings: Mapping[str, object], *, ending: bool = True
) -> tuple[Finding, ...]:
    """Look at SGLang, at its plugin mechanism and at a configuration.

    Args:
        settings: `command`, `config`, or the settings that a configuration
            would have; nothing to look at the installation alone.
        ending: Whether to end with how to start SGLang.
    """
    findings = tuple(_installation(asked=bool(settings)))
    if findings[0].skipped:
        return findings
    settings = settings or with_configured({})
    return (*findings, *_configuration(settings, ending=ending))


def _installation(*, asked: bool) -> Iterator[Finding]:
    tested = " or ".join(engine_api.TESTED)
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        yield Finding(
            ok=not asked,
            skipped=not asked,
            what="SGLang is not installed in this environment",
            hint=f"Install kvdock-sglang beside SGLang {tested}.",
        )
        return
    if engine_api.release(version) in engine_api.TESTED:
        yield Finding(ok=True, what=f"SGLang {version}")
    else:
        yield from _untested(version)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    yield Finding(
        ok=not names or "kvdock" in names,
        what=f"SGLANG_PLUGINS is {allowed!r}" if names else "SGLang loads all plugins",
        hint="" if not names or "kvdock" in names else "Add kvdock to SGLANG_PLUGINS.",
    )


def _untested(version: str) -> Iterator[Finding]:
    """Say what is known of an SGLang that this package was not tested with.

    It is not imported: that takes longer than all else here, and may need a device.
    """
    tested = " or ".join(engine_api.TESTED)
    yield Finding(
        ok=True,
        warning=True,
        what=f"SGLang {version} is not one of the tested versions ({tested})",
        hint="Its pages are kept apart from those of other versions. The engine names "
        "what it lacks when it starts.",
    )


def _configuration(
    settings: Mapping[str, object], *, ending: bool
) -> Iterator[Finding]:
    if not settings:
        yield Finding(
            ok=True,
            skipped=True,
            what="no configuration is given, so none is checked",
            hint="Add --set plugin=NAME, --set config=JSON or --set command='...'.",
        )
        return
    settings = dict(settings)
    described, draft = (str(settings.pop(name, "")) for name in ABOUT_MODEL)
    model = (described, draft)
    try:
        if model[1] and not model[0]:
            raise SettingsError(
                f"--set draft={model[1]} is the draft of no model",
                fix="Give --set description=MODEL as well.",
            )
        if "command" in settings:
            yield from _command(str(_alone(settings, "command")), model)
        elif "config" in settings:
            given = configuration(str(_alone(settings, "config")))
            yield from _ending((*_door(given), *_examined(given, model)), given)
        else:
            given = {**LOADER_KEYS, **from_words(settings)}
            findings = _examined(given, model)
            yield from _ending(findings, given) if ending else findings
    except KvdockError as error:
        yield Finding(ok=False, what=error.what, hint=error.fix)


def _alone(settings: Mapping[str, object], name: str) -> object:
    others = [f"--set {other}" for other in settings if other != name]
    if others:
        raise SettingsError(
            f"--set {name} is a whole configuration, so {', '.join(others)} would "
            "count for nothing",
            fix=f"Put everything into {name}, or give all of it as single settings.",
        )
    return settings[name]


def _ending(
    found: Iterable[Finding], given: Mapping[str, object], flags: Flags | None = None
) -> Iterator[Finding]:
    """Yield findings, and how to start SGLang where none is a problem."""
    fine = True
    for one in found:
        fine &= one.ok
        yield one
    if fine:
        command = flags.completed() if flags else command_line(given)
        yield Finding(ok=True, what=f"start SGLang like this:\n{command}")


def _command(command: str, model: tuple[str, str]) -> Iterator[Finding]:
    flags = Flags.of(command)
    for what, hint in flags.problems():
        yield Finding(ok=False, what=what, hint=hint)
    if flags.given.get(PREFETCH) != WAIT:
        yield Finding(
            ok=True,
            warning=True,
            what="SGLang will not wait for slow pages, and the first prompts "
            "after a start may find none",
            hint=f"Add {PREFETCH} {WAIT}.",
        )
    if flags.given.get(PAGE, "1") == "1":
        yield Finding(
            ok=True,
            warning=True,
            what="pages have one token where SGLang chooses for itself, and storage "
            "gets an object for each",
            hint=f"Add {PAGE} 64, unless the model or its attention backend asks for "
            "another size.",
        )
    if EXTRA in flags.given:
        given = configuration(flags.given[EXTRA])
        found = (*_door(given), *_examined(given, model, flags.given))
        yield from _ending(found, given, flags)


def _door(given: Mapping[str, object]) -> Iterator[Finding]:
    for key, wanted in LOADER_KEYS.items():
        said = given.get(key)
        if key == "backend_name" and said:
            continue
        if said != wanted:
            yield Finding(
                ok=False,
                what=f"{key} is {said!r}" if said else f"{key} is missing",
                hint=f'SGLang needs "{key}": "{wanted}".',
            )


def _examined(
    extra: Mapping[str, object],
    model: tuple[str, str],
    flags: Mapping[str, str] = NO_FLAGS,
) -> Iterator[Finding]:
    """Look at a configuration, and at the backends that it chooses.

    `model` is the description of a model and the name of its draft, or "" each.
    """
    for what, hint in engine_problems(extra):
        yield Finding(ok=False, what=what, hint=hint)
    given = collect(extra)
    dock = Dock.for_engine(given.used, given)
    yield from try_engine(dock, given)
    if model[0]:
        yield from _of_model(dock, given, model, flags)
    else:
        yield Finding(
            ok=True,
            what="routes depend on the model, and are looked at when SGLang starts; "
            "--set description=MODEL looks at them here",
        )


def _of_model(
    dock: Dock, given: Configuration, model: tuple[str, str], flags: Mapping[str, str]
) -> Iterator[Finding]:
    """Look at what depends on the model."""
    name, draft = model
    tp = _number(flags, "--tp-size") or _number(flags, "--tp") or 1
    hosts = _number(flags, "--nnodes") or 1
    ranks = Ranks(shard=Shard(tp_size=tp), on_host=max(1, tp // hosts))
    deployment = Deployment(
        tp_size=tp,
        page_tokens=_number(flags, PAGE),
        layout=LAYOUTS.get(flags.get(LAYOUT, ""), Layout.LAYER_FIRST),
    )
    about = load_model(name)
    pools = assemble(about, deployment, draft=draft).pools
    attachments = Attachments(dock, given, ranks)
    routed = [*attachments.routes([one for one in pools if not one.draft]).accepted]
    left_out = []
    for one in pools:
        if one.draft:
            # The engine registers it later, and by itself.
            try:
                routed += attachments.routes([alone(one)]).accepted
            except NoRoute as error:
                if given.own.drafts is Drafts.STRICT:
                    raise
                left_out.append(f"pool {one.name} is not stored: {error.what}")
    where = ", ".join(one.words for one in routed)
    yield Finding(ok=True, what=f"pages of {name}: {where}")
    for what in left_out:
        hint = "Restored prompts are drafted worse. Name a plugin that takes it."
        yield Finding(ok=True, warning=True, what=what, hint=hint)
    if about.drafts and not draft:
        known = " or ".join(about.drafts)
        what = f"pages of a draft are looked at with --set draft={known}"
        yield Finding(ok=True, what=what)


def _number(flags: Mapping[str, str], name: str) -> int:
    said = flags.get(name, "")
    return int(said) if said.isdecimal() else 0
