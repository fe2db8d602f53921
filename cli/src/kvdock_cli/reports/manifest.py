"""The output of `kvdock list NAME`: a whole manifest and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvdock import PoolKind
from kvdock_cli.reports._report import Block, Column, Pairs, Report, Table, Text, spelt
from kvdock_cli.reports._style import Tone, tone_of
from kvdock_cli.reports._tables import Cell, plain, words
from kvdock_cli.reports.list import by_kind, plugin_data

if TYPE_CHECKING:
    from kvdock.plugin import LoadedPlugin

_APART = ("name", "api", "summary", "kinds", "settings")


def report(plugin: LoadedPlugin) -> Report:
    """Report everything that a backend declares."""
    manifest, candidate = plugin.manifest, plugin.candidate
    declared = attrs.fields(manifest.settings) if manifest.settings else ()
    settings = [_setting(field) for field in declared]
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
    return spelt(name, value) + (" s" if isinstance(value, float) else "")


def _setting(field: Any) -> dict[str, object]:  # noqa: ANN401 - an attribute of any type
    default = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type] # typed as a function
        # One that needs the instance depends on the other settings.
        default = None if default.takes_self else default.factory()
    required = default is attrs.NOTHING
    return {
        "name": field.name,
        # Of a class the name alone, without its module.
        "type": field.type.__name__
        if isinstance(field.type, type)
        else str(field.type),
        "required": required,
        "default": None if required else plain(default),
        "unit": field.metadata.get("unit", ""),
        "help": field.metadata.get("help", ""),
    }


_SETTINGS = (
    Column("NAME", "name"),
    Column(
        "TYPE",
        lambda setting: "size" if setting["unit"] == "bytes" else setting["type"],
    ),
    Column(
        "DEFAULT",
        lambda setting: (
            "required"
            if setting["required"]
            else spelt(setting["unit"], setting["default"])
        ),
        fold=True,
    ),
    Column("WHAT", "help", fold=True),
)
