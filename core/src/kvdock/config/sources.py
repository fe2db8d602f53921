"""Read settings from seven sources, in one order of precedence.

From weak to strong: the default in the schema, a variable of others that the
schema names, a file of others that such a variable names, the default of an
engine's adapter, kvdock's own file, the environment, and what the engine passes. A
file and the engine's mapping look alike:

    [core.deadlines]
    get = "2 s"
    [backends.NAME]
    root = "/var/lib/kv"
    [observers.metrics]

In the environment the same setting is `KVDOCK_CORE__DEADLINES__GET="2 s"`:
two underscores where the file has a dot. `tiers = ["NAME", "NAME"]` stands before the
sections, and in the environment it is `KVDOCK_TIERS`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import attrs

from kvdock.config.core import CoreSettings
from kvdock.config.schema import (
    CORE_WORDS,
    HIDDEN,
    check_known,
    check_values,
    fields_of,
    group_of,
    is_secret,
    origin_suffix,
    own_settings,
    read_value,
    structure,
    with_fallbacks,
)
from kvdock.config.tiers import Tier, read_tiers
from kvdock.errors import SettingsError, did_you_mean
from kvdock.units import format_bytes, format_seconds, parse_bytes

log = logging.getLogger(__name__)

FILE_VARIABLE = "KVDOCK_CONFIG"
"""Names the file to read; no other place is searched."""

PREFIX = "KVDOCK_"
SECTIONS = ("core", "backends", "observers", "tenants")
TIERS = "tiers"
"""The one setting that stands in no section."""
OWN_VARIABLES = (
    FILE_VARIABLE,
    "KVDOCK_PLUGINS",
    "KVDOCK_DENY",
    "KVDOCK_PURE",
    "KVDOCK_IMPORT_S",
)
"""Variables that begin like settings and are none."""

DEFAULT = "default"
MISSING = "MISSING"
ENGINE = "engine"
ENGINE_DEFAULT = "engine's default"

_GROUPS = MappingProxyType(
    {"backends": "kvdock.backends", "observers": "kvdock.observers"}
)
"""Entry-point groups whose names may stand in a section."""

_SERVICE = re.compile(
    r"KVDOCK_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK = re.compile(r"KVDOCK_(\w+_)?PORT")

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+(?=@)")

Tree = Mapping[str, object]


@attrs.frozen
class Source:
    """One place that settings come from, as nested mappings."""

    origin: str
    values: Tree = attrs.field(repr=False)


@attrs.frozen
class Setting:
    """One row of `kvdock config show`.

    Args:
        value: What holds; text that is fit to be shown.
        typed: What holds, as its schema reads it; None where it is missing.
        unit: "bytes", "seconds", or "" for other values.
    """

    path: str
    value: str
    origin: str
    help: str
    typed: object = None
    unit: str = ""


@attrs.frozen
class Configuration:
    """Settings of the core, of backends and of observers.

    Args:
        backends: Backend name to what is given for it.
        observers: Observer name to what is given for it.
        origins: Dotted name of what is given to where it comes from.
        tiers: The backends that keep each page, near first; empty where there are
            no tiers.
    """

    core: CoreSettings
    backends: Mapping[str, Mapping[str, object]] = attrs.field(repr=False)
    observers: Mapping[str, Mapping[str, object]] = attrs.field(repr=False)
    origins: Mapping[str, str] = attrs.field(repr=False)
    tiers: tuple[Tier, ...]

    def without(self, names: Iterable[str]) -> Configuration:
        """Leave out backends and observers, each named as in `backends.NAME`."""
        out = set(names)
        kept = {
            section: {
                name: given
                for name, given in getattr(self, section).items()
                if f"{section}.{name}" not in out
            }
            for section in ("backends", "observers")
        }
        return attrs.evolve(
            self, backends=kept["backends"], observers=kept["observers"]
        )


def load_configuration(
    engine: Tree | None = None,
    *,
    defaults: Tree | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    lenient: bool = False,
    origin: str = ENGINE,
) -> Configuration:
    """Read every source and put the stronger over the weaker.

    Args:
        engine: What the engine passes; like a file's content.
        defaults: What an engine's adapter needs where no source says
            otherwise; like a file's content.
        file: A TOML or JSON file; None for the one that KVDOCK_CONFIG names.
        environ: Where variables are read.
        lenient: Log variables that are no settings, instead of raising.
        origin: What messages call the source of `engine`.

    Raises:
        SettingsError: On a file that cannot be read, or a setting that is
            unknown or of the wrong kind; it says where that came from.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(FILE_VARIABLE)
    path = file or (Path(named) if named else None)
    by = "" if file else FILE_VARIABLE
    sources = [
        Source(ENGINE_DEFAULT, defaults or {}),
        *([Source(f"file {path}", read_file(path, by))] if path else []),
        *environment(environ, lenient=lenient),
        Source(origin, engine or {}),
    ]
    values: dict[str, object] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    for source in sources:
        _check_sections(source)
        merge_tree(values, source.values, source.origin, origins)
    core = structure(
        CoreSettings,
        # They reach whatever the settings of the core reach.
        {**cast("Tree", values["core"]), "tenants": values["tenants"]},
        where="core",
        origins={
            **_under("core", origins),
            **{at: one for at, one in origins.items() if at.startswith("tenants.")},
        },
        environ=environ,
    )
    return Configuration(
        core,
        cast("dict[str, Mapping[str, object]]", values["backends"]),
        cast("dict[str, Mapping[str, object]]", values["observers"]),
        origins,
        read_tiers(values.get(TIERS, ()), origins.get(TIERS, "")),
    )


def read_file(path: Path, named_by: str = "") -> Tree:
    """Read a TOML or JSON file.

    Raises:
        SettingsError: If it is not there, or not what its name says.
    """
    if not path.exists():
        source = f", which {named_by} names," if named_by else ""
        raise SettingsError(
            f"the file {path}{source} is missing",
            fix=f"Create it, or correct {named_by}." if named_by else "Create it.",
        )
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix)
    if reader is None:
        raise SettingsError(
            f"{path} is neither TOML nor JSON", fix="Name it .toml or .json."
        )
    try:
        found = reader(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        if isinstance(error, UnicodeDecodeError):
            why = "it is not UTF-8"
        raise SettingsError(f"{path} cannot be read: {why}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{path} holds no settings but a {type(found).__name__}")
    return found


def environment(environ: Mapping[str, str], *, lenient: bool = False) -> list[Source]:
    """Return each variable that is a setting as a source of its own.

    If `lenient`, a variable that is no setting is logged instead.
    """
    found = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in OWN_VARIABLES:
            continue
        if _names_a_service(name, environ[name]):
            continue
        path = name.removeprefix(PREFIX).lower().split("__")
        if path != [TIERS] and (
            path[0] not in SECTIONS or len(path) == 1 or not all(path)
        ):
            known = [*OWN_VARIABLES, *(f"{PREFIX}{one.upper()}__" for one in SECTIONS)]
            known.append(f"{PREFIX}{TIERS.upper()}")
            error = SettingsError(
                f"environment variable {name} is not a setting",
                fix=_with_section(name)
                or did_you_mean(name, known)
                or 'Settings look like KVDOCK_CORE__DEADLINES__GET="2 s".',
            )
            if not lenient:
                raise error
            log.warning("%s", error)
            continue
        tree: object = environ[name]
        for word in reversed(path):
            tree = {word: tree}
        found.append(Source(f"environment {name}", cast("Tree", tree)))
    return found


def _with_section(name: str) -> str:
    """Say how a variable is spelled whose section was left out, or ""."""
    rest = name.removeprefix(PREFIX)
    between = "__" if "__" in rest else "_"
    word, _, more = rest.lower().partition(between)
    if not more:
        return ""
    # Only the names are read: nothing is imported for a message.
    by_section: dict[str, Iterable[str]] = {
        section: [point.name for point in metadata.entry_points(group=group)]
        for section, group in _GROUPS.items()
    }
    by_section["core"] = list(fields_of(CoreSettings))
    for closest in (
        lambda one: one == word,
        lambda one: bool(did_you_mean(word, [one])),
    ):
        for section, names in by_section.items():
            for found in filter(closest, names):
                words = [section, found, *more.split("__")]
                return f"Did you mean {PREFIX}{'__'.join(words).upper()}?"
    return ""


def _names_a_service(name: str, value: str) -> bool:
    """Return whether Kubernetes has set a variable, for a service called kvdock.

    Its pods get such variables unless `enableServiceLinks` is off.
    """
    if "__" in name:
        return False
    link = _LINK.fullmatch(name) and "://" in value
    return bool(link or _SERVICE.fullmatch(name))


def explain(
    configuration: Configuration,
    schemas: Mapping[str, type],
    *,
    environ: Mapping[str, str] | None = None,
) -> tuple[Setting, ...]:
    """Return every setting with its value and origin, secrets hidden.

    `schemas` are settings classes by where they belong, `backends.NAME` or
    `observers.NAME`. The core's own is always there.

    Raises:
        SettingsError: If something is given that no schema knows, or with a
            value that its schema does not take.
    """
    environ = os.environ if environ is None else environ
    core = attrs.asdict(configuration.core)
    rows = [
        Setting(TIERS, f"{one.backend}: {one}", configuration.origins[TIERS], "A tier.")
        for one in configuration.tiers
    ]
    rows += _rows(CoreSettings, "core", core, _under("core", configuration.origins))
    for where in sorted(schemas):
        section, _, name = where.partition(".")
        given = getattr(configuration, section).get(name, {})
        origins = _under(where, configuration.origins)
        if section == "backends":
            rows += [
                Setting(
                    f"{where}.{word}",
                    _words(given[word]),
                    origins[word],
                    text,
                    given[word],
                )
                for word, text in CORE_WORDS.items()
                if word in given
            ]
            given = own_settings(given)
        check_known(schemas[where], given, where=where, origins=origins)
        full, more = with_fallbacks(schemas[where], given, environ)
        origins = {**origins, **more}
        check_values(schemas[where], full, where=where, origins=origins)
        mine = list(_rows(schemas[where], where, full, origins))
        if full and all(row.origin != MISSING for row in mine):
            # Settings may be right one by one and not fit together.
            structure(
                schemas[where], given, where=where, origins=origins, environ=environ
            )
        rows += mine
    for section in ("backends", "observers"):
        for name in getattr(configuration, section):
            if f"{section}.{name}" not in schemas:
                known = [one.partition(".")[2] for one in schemas if section in one]
                raise SettingsError(
                    f"settings are given for {name!r}, which is not among the "
                    f"{section}"
                    f"{origin_suffix(configuration.origins, f'{section}.{name}')}",
                    fix=did_you_mean(name, known),
                )
    return tuple(rows)


def _check_sections(source: Source) -> None:
    for section, given in source.values.items():
        if section == TIERS:
            if isinstance(given, Mapping):
                raise SettingsError(
                    f"{source.origin}: tiers is a list of backends, not a section",
                    fix='Write tiers = ["NAME", "NAME"], the nearest first.',
                )
            continue
        if section not in SECTIONS:
            known = (*SECTIONS, TIERS)
            raise SettingsError(
                f"{source.origin}: unknown section {section!r}",
                fix=did_you_mean(section, known) or f"Sections: {', '.join(known)}.",
            )
        entries = [given] if section == "core" else [given, *_values(given)]
        if not all(isinstance(entry, Mapping) for entry in entries):
            raise SettingsError(
                f"{source.origin}: section {section!r} is not made of settings"
            )


def _values(given: object) -> list[object]:
    return list(given.values()) if isinstance(given, Mapping) else []


def merge_tree(
    values: dict[str, object],
    stronger: Tree,
    origin: str,
    origins: dict[str, str],
    path: str = "",
) -> None:
    """Put a tree over another, leaf by leaf, and note where leaves are from."""
    for key, value in stronger.items():
        if not isinstance(key, str):
            raise SettingsError(f"{origin}: settings have names, not {key!r}")
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            below = values.get(key, {})
            if not isinstance(below, Mapping):
                # It would be dropped without a word.
                raise SettingsError(
                    f"{name} is a group of settings in {origin}, and one value in "
                    f"{origins[name]}",
                    fix="Remove the one that is wrong.",
                )
            mine: dict[str, object] = dict(below)
            values[key] = mine
            merge_tree(mine, value, origin, origins, name)
        else:
            values[key] = value
            origins[name] = origin


def _under(where: str, origins: Mapping[str, str]) -> dict[str, str]:
    """Return where the settings of one place come from, by their own names."""
    return {
        name.removeprefix(f"{where}."): origin
        for name, origin in origins.items()
        if name.startswith(f"{where}.")
    }


def _rows(
    cls: type, where: str, given: Mapping[str, object], origins: Mapping[str, str]
) -> Iterator[Setting]:
    for name, field in fields_of(cls).items():
        path = f"{where}.{name}"
        if group := group_of(field):
            below = cast("Tree", given.get(name, {}))
            yield from _rows(group, path, below, _under(name, origins))
            continue
        value = given.get(name, field.default)
        if isinstance(value, attrs.Factory):  # type: ignore[arg-type]  # attrs' stub calls the class a function
            value = cast("Any", value).factory()
        text = field.metadata.get("help", "")
        unit = field.metadata.get("unit", "")
        if value is attrs.NOTHING:
            yield Setting(path, "", MISSING, text, unit=unit)
            continue
        typed = read_value(field, value) if name in given else value
        origin = origins.get(name, DEFAULT)
        # "5 KiB" is easier to read than what it is read as.
        said = display_value(value if unit and isinstance(value, str) else typed, field)
        bare = said if is_secret(field) else _without_credentials(typed)
        yield Setting(path, said, origin, text, bare, unit)


def _words(value: object) -> str:
    several = isinstance(value, tuple | list)
    return ", ".join(map(str, cast("Any", value))) if several else str(value)


def _without_credentials(value: object) -> object:
    """Return a typed value as JSON has it, without the passwords in addresses."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _without_credentials(one) for key, one in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_without_credentials(one) for one in value]
    return _CREDENTIALS.sub(HIDDEN, str(value))


def display_value(value: object, field: attrs.Attribute[object]) -> str:
    """Return a value as text, without what must not be seen."""
    if is_secret(field):
        return HIDDEN if value else ""
    if isinstance(value, bool):
        return str(value).lower()
    text = _words(value)
    unit = field.metadata.get("unit")
    if unit == "seconds" and isinstance(value, int | float):
        text = format_seconds(value)
    elif unit and isinstance(value, int):
        # One that is not round has all of its digits.
        brief = format_bytes(value)
        text = brief if parse_bytes(brief) == value else f"{value} B"
    # A password in an address is one, whichever setting holds it.
    return _CREDENTIALS.sub(HIDDEN, text)
