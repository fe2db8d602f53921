"""The output of `kvdock list NAME`: a whole manifest and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvdock import PoolKind
from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Pairs, Report, Table, Text
from kvdock_cli.reports._style import Tone, tone_of
from kvdock_cli.reports._tables import Cell, plain, words
from kvdock_cli.reports.list import by_kind, plugin_data

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock.plugin import LoadedPlugin

_APART = ("name", "api", "summary", "kinds", "settings")


def report(plugin: LoadedPlugin) -> Report:
    """Report everything that a backend declares."""
    manifest, candidate = plugin.manifest, plugin.candidate
    settings = settings_data(manifest.settings)
    about = [
        ("distribution", f"{candidate.distribution} {candidate.version}"),
        ("entry point", candidate.value),
        ("path", plugin.path),
        ("api", str(manifest.api)),
        ("hooks", " ".join(sorted(plugin.implemented))),
    ]
    blocks: list[Block] = [
        Text(f": {manifest.summary}", Cell(manifest.name, Tone.STRONG)),
        "",
        Pairs(about, indent=2),
        "",
        Cell("declares", Tone.STRONG),
        Pairs(_fields(manifest), indent=2),
        *_kinds(plugin),
        "",
        Cell("settings", Tone.STRONG),
        Table(_SETTINGS, settings, indent=2) if settings else "  none",
    ]
    data = {"backend": plugin_data(plugin) | {"settings": settings}}
    return Report("kvdock.show/1", data, blocks)


def _fields(record: Any) -> list[tuple[str, Cell]]:  # noqa: ANN401 - a record of the manifest
    """Return the fields of a record and their values in words."""
    names = (field.name for field in attrs.fields(type(record)))
    spelt = {name: _spelt(name, getattr(record, name)) for name in names}
    return [
        (words(name), Cell(text, tone_of(text)))
        for name, text in spelt.items()
        if name not in _APART
    ]


def _kinds(plugin: LoadedPlugin) -> list[Block]:
    """Return a block for each group of kinds that share a declaration."""
    groups: dict[tuple[tuple[str, Cell], ...], list[str]] = {}
    for kind, support in by_kind(plugin.manifest):
        groups.setdefault(tuple(_fields(support)), []).append(kind)
    blocks: list[Block] = []
    for rows, kinds in groups.items():
        title = Text(f" {' '.join(kinds)}", Cell("kinds", Tone.STRONG), hanging=6)
        blocks += ["", title, Pairs(rows, indent=2)]
    missing = [kind.value for kind in PoolKind if kind not in plugin.manifest.kinds]
    return [*blocks, *(["", Text(f"takes no {' '.join(missing)}")] if missing else ())]


def _spelt(name: str, value: object) -> str:
    if name.startswith("max_") and value == 0:
        return "no limit of its own"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:g} s"
    data = plain(value)
    return (" ".join(map(str, data)) or "none") if isinstance(data, list) else str(data)


def settings_data(cls: type | None) -> list[dict[str, object]]:
    """Describe the settings of a class, in its order."""
    return [] if cls is None else [_setting(field) for field in attrs.fields(cls)]


def _setting(field: Any) -> dict[str, object]:  # noqa: ANN401 - an attribute of any type
    default = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type] # typed as a function
        # One that needs the instance depends on the other settings.
        default = None if default.takes_self else default.factory()
    required = default is attrs.NOTHING
    return {
        "name": field.name,
        "type": field.type if isinstance(field.type, str) else _name(field.type),
        "required": required,
        "default": None if required else plain(default),
        "unit": field.metadata.get("unit", ""),
        "help": field.metadata.get("help", ""),
    }


def _name(of: object) -> str:
    return of.__name__ if isinstance(of, type) else str(of)


def _default(setting: Mapping[str, object]) -> str:
    default = setting["default"]
    if setting["required"]:
        return "required"
    if setting["unit"] == "bytes" and isinstance(default, int):
        return format_bytes(default)
    if isinstance(default, list):
        return " ".join(map(str, default)) or "-"
    return "-" if default in (None, "") else str(default)


_SETTINGS = (
    Column("NAME", lambda setting: setting["name"]),
    Column(
        "TYPE",
        lambda setting: "size" if setting["unit"] == "bytes" else setting["type"],
    ),
    Column("DEFAULT", _default, fold=True),
    Column("WHAT", lambda setting: setting["help"], fold=True),
)
