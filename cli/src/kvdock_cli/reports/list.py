"""The output of `kvdock list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock import PoolKind
from kvdock_cli.reports._style import PLAIN, Style, Tone, tone_of
from kvdock_cli.reports._tables import Cell, paragraph, plain, table, words

if TYPE_CHECKING:
    from kvdock import KindSupport, Manifest, PluginProblem
    from kvdock.plugin import Candidate, LoadedPlugin
    from kvdock_cli.reports._tables import Row

SCHEMA = "kvdock.list/1"


@attrs.frozen(kw_only=True)
class Listing:
    """Installed backends: the good, the broken, and those not allowed.

    Observers are what is installed, not loaded: `kvdock doctor` does that.
    """

    plugins: Sequence[LoadedPlugin]
    observers: Sequence[Candidate] = ()
    problems: Sequence[PluginProblem] = ()
    hidden: Sequence[str] = ()


def as_text(listing: Listing, style: Style = PLAIN) -> str:
    """Render the listing as tables."""
    lines = [_nothing(listing)]
    if listing.plugins:
        lines = [*_overall(listing, style), "", *_kinds(listing, style)]
    if listing.observers:
        rows = [(one.name, one.version, one.distribution) for one in listing.observers]
        headings = ("OBSERVER", "VERSION", "DISTRIBUTION")
        lines += ["", *table(headings, rows, style, drop=["DISTRIBUTION"])]
    lines += unusable(listing.problems, style)
    if listing.hidden:
        hidden = (
            f"Left out by KVDOCK_PLUGINS or KVDOCK_DENY: {', '.join(listing.hidden)}"
        )
        lines += ["", *paragraph(hidden, style, hanging=2)]
    return "\n".join(lines)


def unusable(problems: Sequence[PluginProblem], style: Style = PLAIN) -> list[str]:
    """Return a block that names the plugins that cannot be used, if any."""
    if not problems:
        return []
    rows = [
        (
            Cell(one.name, Tone.BAD),
            f"{one.distribution} {one.version}",
            one.stage,
            one.cause,
        )
        for one in problems
    ]
    headings = ("BROKEN", "DISTRIBUTION", "STAGE", "CAUSE")
    return [
        "",
        "Not usable, see `kvdock doctor`:",
        *table(headings, rows, style, fold=["CAUSE"], indent=2),
    ]


def _nothing(listing: Listing) -> str:
    if listing.problems or listing.hidden:
        return "No backend can be used."
    return "No backend is installed. Try: pip install kvdock-file"


def _overall(listing: Listing, style: Style) -> list[str]:
    rows: list[Row] = [
        (
            Cell(plugin.manifest.name, Tone.STRONG),
            plugin.candidate.version,
            plugin.candidate.distribution,
            _grade(plugin.manifest.zero_copy.value),
            plugin.manifest.durability.value,
            plugin.manifest.sharing.value,
            _grade(plugin.manifest.peers.value),
            _what(plugin),
        )
        for plugin in listing.plugins
    ]
    return table(
        (
            "BACKEND", "VERSION", "DISTRIBUTION", "ZERO COPY", "DURABLE", "SHARED",
            "PEERS", "WHAT",
        ),
        rows,
        style,
        fold=["WHAT"],
        drop=["DISTRIBUTION", "VERSION"],
    )  # fmt: skip


def _what(plugin: LoadedPlugin) -> str:
    own = f"{plugin.instance_of} under another name: " if plugin.instance_of else ""
    return own + plugin.manifest.summary


def _grade(word: str) -> Cell:
    return Cell(word, tone_of(word))


def _kinds(listing: Listing, style: Style) -> list[str]:
    rows: list[Row] = []
    # What an instance takes is what its plugin takes.
    for plugin in (one for one in listing.plugins if not one.instance_of):
        name = plugin.manifest.name
        grades: dict[tuple[str, ...], list[str]] = {}
        for kind, one in by_kind(plugin.manifest):
            key = (one.split_heads.value, one.draft.value, one.multi_buffer.value)
            grades.setdefault(key, []).append(kind)
        for grade, kinds in grades.items():
            shown = [_grade(word) for word in grade]
            rows.append((Cell(name, Tone.STRONG), *shown, " ".join(kinds)))
            name = ""
        missing = [kind.value for kind in PoolKind if kind not in plugin.manifest.kinds]
        if missing:
            none = [_grade("-")] * 3
            lacks = f"none of {' '.join(missing)}"
            rows.append((Cell(name, Tone.STRONG), *none, lacks))
    headings = ("BACKEND", "SPLIT HEADS", "DRAFT", "MULTI BUFFER", "KINDS")
    return table(headings, rows, style, fold=["KINDS"])


def as_markdown(listing: Listing) -> str:
    """Render the table of the README: a column for each backend."""
    manifests = [plugin.manifest for plugin in listing.plugins]
    rows = [
        ["", *(f"`{one.name}`" for one in manifests)],
        ["---"] * (1 + len(manifests)),
        ["what", *(one.summary for one in manifests)],
        ["kinds", *(" ".join(kind for kind, _ in by_kind(one)) for one in manifests)],
        ["zero copy", *(one.zero_copy for one in manifests)],
        ["durable", *(one.durability for one in manifests)],
        ["shared", *(one.sharing for one in manifests)],
        ["peers", *(one.peers for one in manifests)],
    ]
    rows += [
        [words(grade), *(_grades(one, grade) for one in manifests)]
        for grade in ("draft", "split_heads", "multi_buffer")
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _grades(manifest: Manifest, name: str) -> str:
    """Spell a grade: one word if all kinds have it, else the kinds of each."""
    kinds: dict[str, list[str]] = {}
    for kind, support in by_kind(manifest):
        kinds.setdefault(getattr(support, name), []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{grade} ({' '.join(of)})" for grade, of in kinds.items())


def by_kind(manifest: Manifest) -> list[tuple[str, KindSupport]]:
    """Return the kinds of a manifest in the order in which they are defined."""
    return [
        (kind.value, manifest.kinds[kind])
        for kind in PoolKind
        if kind in manifest.kinds
    ]


def as_data(listing: Listing) -> dict[str, object]:
    """Describe the listing as data."""
    return {
        "schema": SCHEMA,
        "ok": not listing.problems,
        "backends": [plugin_data(plugin) for plugin in listing.plugins],
        "observers": [
            {
                "name": one.name,
                "version": one.version,
                "distribution": one.distribution,
                "entry_point": one.value,
            }
            for one in listing.observers
        ],
        "problems": plain(listing.problems),
        "hidden": list(listing.hidden),
    }


def plugin_data(plugin: LoadedPlugin) -> dict[str, object]:
    """Describe one plugin, its manifest without the settings."""
    manifest: dict[str, object] = plain(plugin.manifest)
    return {
        "version": plugin.candidate.version,
        "distribution": plugin.candidate.distribution,
        "entry_point": plugin.candidate.value,
        "path": plugin.path,
        "instance_of": plugin.instance_of,
        "hooks": sorted(plugin.implemented),
    } | {key: value for key, value in manifest.items() if key != "settings"}
