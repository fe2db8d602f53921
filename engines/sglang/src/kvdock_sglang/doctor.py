"""The section `kvdock doctor sglang`: would this engine store its pages?

    kvdock doctor sglang --set plugin=file --set root=/data/kv
    kvdock doctor sglang --set config='{"plugin": "file", ...}'
    kvdock doctor sglang --set command='sglang serve ...'

All forms end with the command line to use. Groups of settings are spelled with
dots: `--set core.deadlines.get=2s`.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

import attrs

from kvdock import AttachConfig, Dock, Finding
from kvdock.errors import KvdockError, SettingsError
from kvdock_sglang import engine_api, engine_patches
from kvdock_sglang.launch_flags import (
    EXTRA,
    LOADER_KEYS,
    PREFETCH,
    WAIT,
    Flags,
    command_line,
    configuration,
    engine_problems,
    from_words,
)
from kvdock_sglang.settings import collect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def examine(settings: Mapping[str, object]) -> tuple[Finding, ...]:
    """Look at SGLang, at its plugin mechanism and at a configuration.

    Args:
        settings: `command`, `config`, or the settings that a configuration
            would have; nothing to look at the installation alone.
    """
    return (*_installation(), *_configuration(settings))


def _installation() -> Iterator[Finding]:
    tested = " or ".join(engine_api.TESTED)
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        yield Finding(
            ok=False,
            what="SGLang is not installed in this environment",
            hint=f"Install kvdock-sglang beside SGLang {tested}.",
        )
        return
    if version in engine_api.TESTED:
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
    """Look at what this package uses of an SGLang that it was not tested with."""
    tested = " or ".join(engine_api.TESTED)
    lacking = engine_api.missing(engine_api.STORAGE)
    left = engine_patches.skipped_patches()
    yield Finding(
        ok=not lacking,
        what=f"SGLang {version} is not one of the tested versions ({tested})"
        + (f" and lacks {', '.join(lacking)}" if lacking else ""),
        hint=f"Use SGLang {tested}."
        if lacking
        else "Its pages are kept apart from those of other versions.",
    )
    for one in left:
        yield Finding(
            ok=False,
            what=f"lost in this SGLang: {one.closed.lost}",
            hint=f"It lacks {', '.join(one.missing)}.",
        )


def _configuration(settings: Mapping[str, object]) -> Iterator[Finding]:
    if not settings:
        yield Finding(
            ok=True,
            what="no configuration is given, so none is checked",
            hint="Add --set plugin=NAME, --set config=JSON or --set command='...'.",
        )
        return
    try:
        if "command" in settings:
            yield from _command(str(_alone(settings, "command")))
        elif "config" in settings:
            given = configuration(str(_alone(settings, "config")))
            wrong = tuple(_door(given))
            yield from wrong
            yield from _examined(given)
            if not wrong:
                yield _start(command_line(given))
        else:
            given = {**LOADER_KEYS, **from_words(settings)}
            yield from _examined(given)
            yield _start(command_line(given))
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


def _start(command: str) -> Finding:
    return Finding(ok=True, what=f"start SGLang like this:\n{command}")


def _command(command: str) -> Iterator[Finding]:
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
    if EXTRA in flags.given:
        given = configuration(flags.given[EXTRA])
        wrong = tuple(_door(given))
        yield from wrong
        yield from _examined(given)
        if not wrong:
            yield _start(flags.completed())


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


def _examined(extra: Mapping[str, object]) -> Iterator[Finding]:
    """Look at a configuration, and at the backends that it chooses."""
    for what, hint in engine_problems(extra):
        yield Finding(ok=False, what=what, hint=hint)
    given = collect(extra)
    used = dict.fromkeys([given.own.plugin, *given.own.routes.values()])
    dock = Dock.load(require=list(used))
    dock.observe(given.core.observers, given.observers)
    for name in used:
        backend = dock.backends[name]
        config = AttachConfig(settings=backend.settings(given.backends.get(name)))
        yield Finding(ok=True, what=f"plugin {name}: {backend.manifest.summary}")
        for one in backend.probe(config):
            yield attrs.evolve(one, what=f"{name}: {one.what}")
