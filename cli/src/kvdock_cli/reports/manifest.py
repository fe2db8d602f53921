"""The output of `kvdock show NAME`: a whole manifest and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvdock import PoolKind
from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone, tone_of
from kvdock_cli.reports._tables import (
    Cell,
    columns,
    paragraph,
    plain,
    table,
    words,
)
from kvdock_cli.reports.list import by_kind, plugin_data

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock.plugin import LoadedPlugin

SCHEMA = "kvdock.show/1"
_APART = ("name", "api", "summary", "kinds", "settings")


def as_text(plugin: LoadedPlugin, style: Style = PLAIN) -> str:
    """Render everything that a backend declares."""
    manifest, candidate = plugin.manifest, plugin.candidate
    about = [
        ("distribution", f"{candidate.distribution} {candidate.version}"),
        ("entry point", candidate.value),
        ("path", plugin.path),
        ("api", str(manifest.api)),
        ("hooks", " ".join(sorted(plugin.implemented))),
    ]
    overall = [
        (words(field.name), _valued(field.name, getattr(manifest, field.name)))
        for field in attrs.fields(type(manifest))
        if field.name not in _APART
    ]
    name = style.paint(manifest.name, Tone.STRONG)
    parts = [
        paragraph(f"{name}: {manifest.summary}", style, hanging=2),
        columns(about, style, indent=2),
        [style.paint("declares", Tone.STRONG), *columns(overall, style, indent=2)],
        *_kinds(plugin, style),
        [style.paint("settings", Tone.STRONG), *_settings(plugin, style)],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _kinds(plugin: LoadedPlugin, style: Style) -> list[list[str]]:
    """Return a block for each group of kinds that share a declaration."""
    groups: list[tuple[dict[str, str], list[str]]] = []
    for kind, support in by_kind(plugin.manifest):
        said = {
            words(field.name): _spelt(field.name, getattr(support, field.name))
            for field in attrs.fields(type(support))
        }
        for known, kinds in groups:
            if known == said:
                kinds.append(kind)
                break
        else:
            groups.append((said, [kind]))
    blocks = []
    for said, kinds in groups:
        first, *rest = paragraph(f"kinds {' '.join(kinds)}", style, hanging=6)
        rows = [(name, Cell(value, tone_of(value))) for name, value in said.items()]
        title = style.paint("kinds", Tone.STRONG) + first.removeprefix("kinds")
        blocks.append([title, *rest, *columns(rows, style, indent=2)])
    missing = [kind.value for kind in PoolKind if kind not in plugin.manifest.kinds]
    if missing:
        blocks.append(paragraph(f"takes no {' '.join(missing)}", style, hanging=2))
    return blocks


def _valued(name: str, value: object) -> Cell:
    text = _spelt(name, value)
    return Cell(text, tone_of(text))


def _spelt(name: str, value: object) -> str:
    if name.startswith("max_") and value == 0:
        return "no limit of its own"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:g} s"
    found = plain(value)
    if isinstance(found, list):
        return " ".join(map(str, found)) or "none"
    return str(found)


def settings_data(cls: type | None) -> list[dict[str, object]]:
    """Describe the settings of a class, in its order."""
    if cls is None:
        return []
    return [_setting(field) for field in attrs.fields(cls)]


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


def _settings(plugin: LoadedPlugin, style: Style) -> list[str]:
    rows = []
    for one in settings_data(plugin.manifest.settings):
        kind = "size" if one["unit"] == "bytes" else str(one["type"])
        rows.append((str(one["name"]), kind, _default(one), str(one["help"])))
    headings = ("NAME", "TYPE", "DEFAULT", "WHAT")
    fold = ["DEFAULT", "WHAT"]
    return table(headings, rows, style, fold=fold, indent=2) or ["  none"]


def _default(setting: Mapping[str, object]) -> str:
    default = setting["default"]
    if setting["required"]:
        return "required"
    if setting["unit"] == "bytes" and isinstance(default, int):
        return format_bytes(default)
    if isinstance(default, list):
        return " ".join(map(str, default)) or "-"
    return "-" if default in (None, "") else str(default)


def as_data(plugin: LoadedPlugin) -> dict[str, object]:
    """Describe the backend as data."""
    return {
        "schema": SCHEMA,
        "ok": True,
        "backend": plugin_data(plugin)
        | {"settings": settings_data(plugin.manifest.settings)},
    }
