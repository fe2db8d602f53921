"""See the settings in force, and write, change and judge a file of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from kvdock.config import explain, load_configuration, read_file
from kvdock.errors import PluginError, SettingsError
from kvdock.plugin import OBSERVERS_GROUP, Observer, list_entry_points, require
from kvdock_cli import settings_file
from kvdock_cli.commands.doctor import absent_tiers, switched_on
from kvdock_cli.commands.list import load
from kvdock_cli.commands.run import engines, flags_of
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import config as report
from kvdock_cli.reports._report import Report
from kvdock_cli.settings_file import Wrong

if TYPE_CHECKING:
    from kvdock.config import Setting
    from kvdock.plugin import PluginProblem

Known = tuple[dict[str, type], tuple["PluginProblem", ...]]

_MATTER = ("core.integrity", "core.observers", "core.deadlines.")
"""Settings of the core that a new file begins with."""


@attrs.frozen
class _NoSettings:
    """The settings of a backend that has none."""


def show(
    *,
    config: Path | None = None,
    origin: bool = False,
    changed: bool = False,
    json: bool = False,
) -> int:
    """Show every setting that holds here: the core's, backends', observers'.

    Reads what an engine would read, except for what the engine itself passes.
    From weak to strong: defaults, variables of others, files of others, the file,
    the environment, the engine.

    Args:
        config: A TOML or JSON file; without it, the one that KVDOCK_CONFIG names.
        origin: Also say where each value comes from.
        changed: Only those that are not at their defaults.
        json: Print one line of JSON.
    """
    configuration = load_configuration(file=config)
    schemas, problems = _known({"backends": configuration.backends})
    # What is broken has no schema to hold its settings against.
    configuration = configuration.without(
        f"{one.group.removeprefix('kvdock.')}.{one.name}" for one in problems
    )
    found = [
        one
        for one in explain(configuration, schemas)
        if not (changed and one.origin in ("default", settings_file.MISSING))
    ]
    return emit(report.report(found, problems, origin=origin), as_json=json)


def init(
    backend: tuple[str, ...] = (),
    /,
    *,
    config: Path | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Write a settings file that explains what matters for some backends.

    Every setting is there as a comment with its default, so that the file changes
    nothing until a line of it does.

    Args:
        backend: The backends that are to be used.
        config: The file to write; without it, the one that KVDOCK_CONFIG names, or
            kvdock.toml here.
        force: Overwrite a file that is there.
        json: Print one line of JSON.
    """
    file = _toml(_file_of(config, "kvdock.toml"))
    if file.exists() and not force:
        raise UsageProblem(f"{file} is there", fix="--force overwrites it.")
    schemas, problems = _known({})
    parts = [one.split(".") for one in schemas]
    require(backend, [name for group, name in parts if group == "backends"], problems)
    wanted = (*_MATTER, *(f"backends.{name}." for name in backend))
    rows = [row for row in _defaults(schemas) if row.path.startswith(wanted)]
    settings_file.write(file, settings_file.commented(rows), replace=force)
    missing = [row.path for row in rows if row.origin == settings_file.MISSING]
    return emit(report.written(file, backend, missing), as_json=json)


def change(
    key: str, value: str, /, *, config: Path | None = None, json: bool = False
) -> int:
    """Change one setting of a TOML file; comments and order stay.

    The file is judged first and then replaced at once: a change that would make it
    wrong is not written.

    Args:
        key: The setting, with dots, such as core.deadlines.get.
        value: Its value, as in TOML, or a word.
        config: The file; without it, the one that KVDOCK_CONFIG names.
        json: Print one line of JSON.
    """
    file, path = _toml(_file_of(config)), key.split(".")
    before = read_file(file)
    # A named instance has settings as soon as its plugin is named.
    schemas, _ = known = _known(settings_file.with_value(before, path, value))
    defaults = {row.path: row for row in _defaults(schemas)}
    typed = settings_file.read_value(value, defaults.get(key))
    old = _wrong(before, file, known)
    for wrong in _wrong(settings_file.with_value(before, path, typed), file, known):
        if not wrong.missing and wrong not in old:
            raise SettingsError(wrong.what, fix=wrong.fix)
    fresh = settings_file.changed(file.read_text(), path, typed)
    settings_file.write(file, fresh, replace=True)
    # The value may be a secret.
    data = {"path": file, "key": key}
    done = Report("kvdock.config-set/1", data, [f"{file}: {key} is set"])
    return emit(done, as_json=json)


def validate(*, config: Path | None = None, json: bool = False) -> int:
    """Say every problem of a settings file, key by key; exit 1 if there is one.

    Required settings may come from the environment. What only an engine knows, such
    as whether its deadlines fit, `kvdock doctor` says.

    Args:
        config: A TOML or JSON file; without it, the one that KVDOCK_CONFIG names.
        json: Print one line of JSON.
    """
    file = _file_of(config)
    try:
        tree = read_file(file)
        wrong = _wrong(tree, file, _known(tree))
    except (PluginError, SettingsError) as error:
        if not file.exists():
            raise
        wrong = [Wrong("", error.what, error.fix)]
    return emit(report.wrong(file, wrong), as_json=json)


def _file_of(config: Path | None, default: str = "") -> Path:
    """Return the file that is named, here or by KVDOCK_CONFIG."""
    named = str(config or "") or os.environ.get("KVDOCK_CONFIG", default)
    if not named:
        raise UsageProblem("no file is named", fix="Give --config, or KVDOCK_CONFIG.")
    return Path(named)


def _toml(file: Path) -> Path:
    """Return a file, if its name says that it is one of those that are written."""
    if file.suffix != ".toml":
        raise UsageProblem(f"{file} is not TOML", fix="Files that end in .toml are.")
    return file


def _wrong(tree: Mapping[str, object], file: Path, known: Known) -> list[Wrong]:
    """Return the problems of a file: its settings, plugins and observers."""
    schemas, problems = known
    broken = {
        f"{one.group.removeprefix('kvdock.')}.{one.name}": one for one in problems
    }
    unfit = [
        Wrong(where, broken[where].cause, broken[where].fix)
        for where in dict.fromkeys(
            ".".join(path[:2]) for path, _ in settings_file.leaves(tree)
        )
        if where in broken
    ]
    found = settings_file.wrong_in(tree, f"file {file}", schemas)
    if all(one.missing for one in found):
        configuration = load_configuration(tree, environ={})
        names = [one.partition(".")[2] for one in schemas if one.startswith("backends")]
        absent = {
            "core.observers": switched_on(configuration),
            "tiers": absent_tiers(configuration, names, problems),
        }
        unfit += [
            Wrong(where, one.cause, one.fix)
            for where, several in absent.items()
            for one in several
        ]
    return unfit + [
        one for one in found if ".".join(one.key.split(".")[:2]) not in broken
    ]


def _known(given: Mapping[str, object]) -> Known:
    """Return the settings classes of what can be used, and why the rest cannot."""
    backends = given.get("backends")
    found = load(backends if isinstance(backends, Mapping) else {})
    observers, problems = Observer.load(list_entry_points(OBSERVERS_GROUP))
    schemas = {
        f"backends.{plugin.manifest.name}": plugin.manifest.settings or _NoSettings
        for plugin in found.plugins
    }
    schemas |= {f"observers.{name}": one.settings for name, one in observers.items()}
    return schemas, (*found.problems, *problems)


def _defaults(schemas: Mapping[str, type]) -> Sequence[Setting]:
    """Return every setting with its default."""
    return explain(load_configuration(environ={}), schemas, environ={})


COMMANDS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "show": show,
        "init": init,
        "set": change,
        "validate": validate,
        **{name: flags_of(name) for name in engines()},
    }
)
