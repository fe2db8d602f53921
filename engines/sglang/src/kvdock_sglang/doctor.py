"""The section `kvdock doctor sglang`: would this engine store its pages?

    kvdock doctor sglang --set plugin=file --set root=/data/kv
    kvdock doctor sglang --set config='{"plugin": "file", ...}'
    kvdock doctor sglang --set command='sglang serve ...'

The first form ends with the command line to use, the others examine one.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

import attrs

from kvdock.dock import Dock
from kvdock.errors import KvdockError, SettingsError
from kvdock.hookspecs import Finding
from kvdock_sglang import hooks
from kvdock_sglang.launch import (
    DOOR,
    EXTRA,
    PREFETCH,
    WAIT,
    Flags,
    command_line,
    configuration,
)
from kvdock_sglang.settings import AdapterSettings, Given, collect, split

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
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        yield Finding(
            ok=False,
            what="SGLang is not installed in this environment",
            hint=f"Install kvdock-sglang beside SGLang {' or '.join(hooks.TESTED)}.",
        )
        return
    lost = hooks.missing(version)
    tested = " and ".join(hooks.TESTED)
    yield Finding(
        ok=not lost,
        what=f"SGLang {version}"
        + ("" if not lost else f"; the hooks are written for {tested}"),
        hint="" if not lost else f"Without them: {'; '.join(lost)}.",
    )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    yield Finding(
        ok=not names or "kvdock" in names,
        what=f"SGLANG_PLUGINS is {allowed!r}" if names else "SGLang loads all plugins",
        hint="" if not names or "kvdock" in names else "Add kvdock to SGLANG_PLUGINS.",
    )


def _configuration(settings: Mapping[str, object]) -> Iterator[Finding]:
    if not settings:
        yield Finding(
            ok=True,
            what="no configuration is given, so none is examined",
            hint="Add --set plugin=NAME, --set config=JSON or --set command='...'.",
        )
        return
    try:
        if "command" in settings:
            flags = Flags.of(str(settings["command"]))
            for what, hint in flags.problems():
                yield Finding(ok=False, what=what, hint=hint)
            if flags.given.get(PREFETCH) != WAIT:
                yield Finding(
                    ok=True,
                    what="SGLang will not wait for slow pages, and the first prompts "
                    f"after a start may find none: {PREFETCH} {WAIT} mends that",
                )
            if EXTRA not in flags.given:
                return
            given = configuration(flags.given[EXTRA])
        elif "config" in settings:
            given = configuration(str(settings["config"]))
        else:
            given = {**DOOR, **settings}
        yield from _door(given)
        yield from _plugin(collect(given), split(given)[1])
    except KvdockError as error:
        yield Finding(ok=False, what=error.what, hint=error.fix)


def _door(given: Mapping[str, object]) -> Iterator[Finding]:
    for key, wanted in DOOR.items():
        said = given.get(key)
        if key == "backend_name" and said:
            continue
        if said != wanted:
            yield Finding(
                ok=False,
                what=f"{key} is {said!r}" if said else f"{key} is missing",
                hint=f'SGLang needs "{key}": "{wanted}".',
            )


def _plugin(given: Given, rest: Mapping[str, object]) -> Iterator[Finding]:
    own = given.own
    dock = Dock.load(require=[own.plugin, *own.routes.values()])
    backend = dock.backends[own.plugin]
    try:
        for name in dock.backends:
            if name in given.backends:
                dock.backends[name].settings(given.backends[name])
    except SettingsError as error:
        yield Finding(ok=False, what=error.what, hint=error.fix)
        return
    yield Finding(ok=True, what=f"plugin {own.plugin}: {backend.manifest.summary}")
    plain = AdapterSettings(plugin=own.plugin)
    changed = {
        name: value
        for name, value in attrs.asdict(own).items()
        if value != getattr(plain, name)
    }
    line = command_line(own.plugin, {**changed, **rest})
    yield Finding(ok=True, what=f"start SGLang like this:\n{line}")
