"""The output of `kvdock list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import PoolKind
from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone, tone_of
from kvdock_cli.reports._tables import Cell, plain, words

if TYPE_CHECKING:
    from kvdock import KindSupport, Manifest, PluginProblem
    from kvdock.plugin import Candidate, LoadedPlugin

_GRADES = ("split_heads", "draft", "multi_buffer")


@attrs.frozen(kw_only=True)
class Listing:
    """Installed backends: the good, the broken, and those not allowed.

    Observers are what is installed, not loaded: `kvdock doctor` does that.
    """

    plugins: Sequence[LoadedPlugin]
    observers: Sequence[Candidate] = ()
    problems: Sequence[PluginProblem] = ()
    hidden: Sequence[str] = ()

    def require(self, names: Sequence[str]) -> dict[str, LoadedPlugin]:
        """Return all plugins by name; raise PluginError if one is not there."""
        from kvdock.plugin import require  # noqa: PLC0415 - it imports the loader

        plugins = {plugin.manifest.name: plugin for plugin in self.plugins}
        require(names, plugins, self.problems)
        return plugins


_BACKENDS = (
    Column("BACKEND", lambda plugin: plugin.manifest.name, tone=Tone.STRONG),
    Column("VERSION", lambda plugin: plugin.candidate.version, drop=2),
    Column("DISTRIBUTION", lambda plugin: plugin.candidate.distribution, drop=1),
    Column("ZERO COPY", lambda plugin: plugin.manifest.zero_copy),
    Column("DURABLE", lambda plugin: plugin.manifest.durability),
    Column("SHARED", lambda plugin: plugin.manifest.sharing),
    Column("PEERS", lambda plugin: plugin.manifest.peers),
    Column(
        "WHAT",
        lambda plugin: (
            plugin.manifest.summary
            if not plugin.instance_of
            else f"{plugin.instance_of} under another name: {plugin.manifest.summary}"
        ),
        fold=True,
    ),
)
_OBSERVERS = (
    Column("OBSERVER", "name"),
    Column("VERSION", "version"),
    Column("DISTRIBUTION", "distribution", drop=1),
)
_KINDS = (
    Column("BACKEND"),
    *(Column(words(grade).upper()) for grade in _GRADES),
    Column("KINDS", fold=True),
)
_PROBLEMS = (
    Column("BROKEN", "name", tone=Tone.BAD),
    Column("DISTRIBUTION", lambda problem: f"{problem.distribution} {problem.version}"),
    Column("STAGE", "stage"),
    Column("CAUSE", "cause", fold=True),
)


def report(listing: Listing) -> Report:
    """Report what is installed, as tables."""
    blocks: list[Block] = ["No backend is installed. Try: pip install kvdock-file"]
    if listing.plugins:
        blocks = [Table(_BACKENDS, listing.plugins), "", Table(_KINDS, _kinds(listing))]
    elif listing.problems or listing.hidden:
        blocks = ["No backend can be used."]
    if listing.observers:
        blocks += ["", Table(_OBSERVERS, listing.observers)]
    observers = [
        {
            "name": one.name,
            "version": one.version,
            "distribution": one.distribution,
            "entry_point": one.value,
        }
        for one in listing.observers
    ]
    data = {
        "backends": [plugin_data(plugin) for plugin in listing.plugins],
        "observers": observers,
        "problems": listing.problems,
        "hidden": listing.hidden,
    }
    blocks += [*unusable(listing.problems), *left_out(listing.hidden)]
    return Report("kvdock.list/1", data, blocks, ok=not listing.problems)


def unusable(problems: Sequence[PluginProblem]) -> list[Block]:
    """Return blocks that name the plugins that cannot be used, if any."""
    head = ["", "Not usable, see `kvdock doctor`:"]
    return [*head, Table(_PROBLEMS, problems, indent=2)] if problems else []


def left_out(hidden: Sequence[str]) -> list[Block]:
    """Return blocks that name the plugins that are not allowed, if any."""
    text = f"Left out by KVDOCK_PLUGINS or KVDOCK_DENY: {', '.join(hidden)}"
    return ["", text] if hidden else []


def _kinds(listing: Listing) -> list[tuple[str | Cell, ...]]:
    rows: list[tuple[str | Cell, ...]] = []
    # What an instance takes is what its plugin takes.
    for plugin in (one for one in listing.plugins if not one.instance_of):
        name: str | Cell = Cell(plugin.manifest.name, Tone.STRONG)
        groups: dict[tuple[str, ...], list[str]] = {}
        for kind, support in by_kind(plugin.manifest):
            grades = tuple(plain(getattr(support, grade)) for grade in _GRADES)
            groups.setdefault(grades, []).append(kind)
        missing = [kind.value for kind in PoolKind if kind not in plugin.manifest.kinds]
        if missing:
            groups["-", "-", "-"] = ["none of", *missing]
        for grades, kinds in groups.items():
            shown = (Cell(grade, tone_of(grade)) for grade in grades)
            rows.append((name, *shown, " ".join(kinds)))
            name = ""
    return rows


def by_kind(manifest: Manifest) -> list[tuple[str, KindSupport]]:
    """Return the kinds of a manifest in the order in which they are defined."""
    return [
        (kind.value, manifest.kinds[kind])
        for kind in PoolKind
        if kind in manifest.kinds
    ]


def plugin_data(plugin: LoadedPlugin) -> dict[str, Any]:
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
