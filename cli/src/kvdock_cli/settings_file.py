"""A file of settings: written with its defaults, judged by key, changed in place."""

from __future__ import annotations

import os
import shutil
import tempfile
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from kvdock.config import (
    Setting,
    check_known,
    check_values,
    explain,
    load_configuration,
    own_settings,
)
from kvdock.errors import KvdockError, SettingsError
from kvdock.units import format_bytes, format_seconds, parse_bytes

Tree = Mapping[str, Any]

MISSING = "MISSING"
"""The origin of a required setting that is given nowhere."""

_HEAD = """\
# Settings of kvdock. Engines read this file where KVDOCK_CONFIG names it.
#
# A line such as `#name = value` shows a default: remove its mark to change it.
# `kvdock config set KEY VALUE` changes a setting too, `kvdock config validate` says
# what is wrong, and `kvdock config show` lists the settings that are not here.
"""


@attrs.frozen
class Wrong:
    """One problem of a file; its key has dots, and is "" for the file as a whole."""

    key: str
    what: str
    fix: str = ""
    missing: bool = False


def leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """Yield each setting of a tree, and each group that is empty."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield [*path, key], value


def with_value(tree: Tree, path: Sequence[str], value: object) -> dict[str, Any]:
    """Return a tree with one setting changed."""
    word, *rest = path
    below = tree.get(word, {})
    if rest and not isinstance(below, Mapping):
        raise SettingsError(f"{word!r} is one setting, and not a group of them")
    return {**tree, word: with_value(below, rest, value) if rest else value}


def wrong_in(tree: Tree, origin: str, schemas: Mapping[str, type]) -> list[Wrong]:
    """Find every problem of the settings in a file.

    Variables may give what the file lacks. `schemas` are settings classes by where they
    belong, such as `backends.NAME`.
    """
    found: list[Wrong] = []
    groups: dict[str, dict[str, Any]] = {}
    for path, value in leaves(tree):
        where = ".".join(path[: 1 if path[0] == "core" else 2])
        groups[where] = with_value(groups.get(where, {}), path, value)
        if path[0] == "tenants":  # its settings are one
            continue
        try:
            _check(with_value({}, path, value), where, origin, schemas)
        except SettingsError as error:
            if error.what not in [one.what for one in found]:
                found.append(Wrong(".".join(path), error.what, error.fix))
    for where, given in groups.items():
        if any(f"{one.key}.".startswith(f"{where}.") for one in found):
            continue
        own = f"KVDOCK_{where.replace('.', '__').upper()}__"
        environ = {
            name: text
            for name, text in os.environ.items()
            if name.startswith(own) or not name.startswith("KVDOCK_")
        }
        mine = {one: cls for one, cls in schemas.items() if one == where}
        try:
            configuration = load_configuration(given, environ=environ, origin=origin)
            for row in explain(configuration, mine, environ=environ):
                if row.origin == MISSING:
                    fix = "Give it here, in the environment or to the engine."
                    found.append(Wrong(row.path, "it is missing", fix, missing=True))
        except SettingsError as error:
            found.append(Wrong(where, error.what, error.fix))
    return found


def _check(given: Tree, where: str, origin: str, schemas: Mapping[str, type]) -> None:
    """Raise if the one setting of a tree is unknown, or does not take its value."""
    configuration = load_configuration(given, environ={}, origin=origin)
    section, _, name = where.partition(".")
    if where not in schemas:
        explain(configuration, schemas, environ={})
        return
    mine = getattr(configuration, section)[name]
    mine = own_settings(mine) if section == "backends" else mine
    origins = {".".join(path): origin for path, _ in leaves(mine)}
    check_known(schemas[where], mine, where=where, origins=origins)
    check_values(schemas[where], mine, where=where, origins=origins)


def read_value(text: str, row: Setting | None) -> Any:  # noqa: ANN401 - any of TOML's
    """Read a value as TOML has it, or a word; all is text where the default is."""
    if not (row and isinstance(row.typed, str)):
        with suppress(tomllib.TOMLDecodeError):
            found = tomllib.loads(f"it = {text}")
            # Text of several lines, and what JSON does not know, is a word.
            if [*found] == ["it"] and isinstance(
                found["it"], float | int | list | dict
            ):
                return found["it"]
    return text


def changed(text: str, path: Sequence[str], value: object) -> str:
    """Change one setting in the text of a TOML file; the rest stays as it is."""
    import tomlkit  # noqa: PLC0415 - 40 ms that other commands save

    wanted = with_value(tomllib.loads(text), path, value)
    document = tomlkit.parse(text)
    table: Any = document
    for at, word in enumerate(path[:-1]):
        if word not in table:
            table[word] = tomlkit.table(is_super_table=at < len(path) - 2)
        table = table[word]
    table[path[-1]] = value
    fresh = tomlkit.dumps(document)
    if tomllib.loads(fresh) != wanted:
        raise KvdockError(
            f"{'.'.join(path)} cannot be changed without changing other settings",
            fix="Edit the file.",
        )
    return fresh


def commented(rows: Iterable[Setting]) -> str:
    """Write a file in TOML that explains settings and leaves all at their defaults."""
    import tomlkit  # noqa: PLC0415 - as above

    groups: dict[str, list[str]] = {}
    for row in rows:
        where, _, name = row.path.rpartition(".")
        value: Any = "" if row.typed is None else row.typed
        if row.unit == "bytes" and parse_bytes(format_bytes(value)) == value:
            value = format_bytes(value)
        elif row.unit == "seconds":
            value = format_seconds(value)
        lines = groups.setdefault(where, [f"[{where}]"])
        lines += [f"# {line}" for line in textwrap.wrap(row.help, 86)]
        mark = "  # required" if row.origin == MISSING else ""
        lines.append(f"#{name} = {tomlkit.item(value).as_string()}{mark}")
    return "\n".join([_HEAD, *("\n".join([*one, ""]) for one in groups.values())])


def write(file: Path, text: str, *, replace: bool) -> None:
    """Write a file at once: a reader sees the old text or the new one."""
    target = file.resolve()
    try:
        if not (replace and target.exists()):
            with target.open("x") as out:
                out.write(text)
            return
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kvdock-") as work:
            fresh = Path(work, target.name)
            fresh.write_text(text)
            shutil.copymode(target, fresh)
            with suppress(OSError):  # only root may give files away
                os.chown(fresh, target.stat().st_uid, target.stat().st_gid)
            with fresh.open("rb") as written:
                os.fsync(written.fileno())
            fresh.replace(target)
    except OSError as error:
        raise KvdockError(
            f"{file} cannot be written: {error.strerror or error}"
        ) from error
