"""Choose the backend of a demo by manifests; loads no torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvdock import (
    Dock,
    DType,
    KvdockError,
    NoRoute,
    Plan,
    PoolKind,
    PoolSpec,
    RouteRequirements,
    Scope,
    Shard,
)
from kvdock.errors import PluginError
from kvdock.plugin import list_entry_points
from kvdock.pools import Part

TO_PEERS = RouteRequirements(peers=True)
"""What sending to a peer asks of a backend."""

_SERVERS = "kvdock.servers"
_ADVICE = (
    "Install one, for example with: pip install 'kvdock-nixl[cu12]'. `kvdock list` "
    "shows in its column PEERS which ones declare it."
)

Settings = Mapping[str, object]
"""What was given for a backend: setting to value."""


def choose_lasting(dock: Dock, wanted: str = "") -> tuple[str, str]:
    """Return a backend whose pages outlive the process, and why this one.

    Args:
        dock: The loaded backends.
        wanted: The backend that was asked for, or "" for the first that
            needs nothing but a directory.

    Raises:
        KvdockError: If there is none; a PluginError where the one asked for
            cannot do it.
    """
    fit = [
        name
        for name, backend in sorted(dock.backends.items())
        if backend.manifest.durability >= Scope.PROCESS
    ]
    if not wanted:
        for name in fit:
            if dock.backends[name].manifest.path_setting:
                return name, "keeps pages in a directory"
        raise KvdockError(
            "no backend is installed that keeps pages in a directory",
            fix="Install one, for example with: pip install kvdock-file",
        )
    if wanted not in fit:
        raise PluginError(
            f"backend {wanted!r} keeps pages no longer than the process that stored "
            "them",
            fix=f"The demo ends its processes. Backends that would do: {fit}",
        )
    return wanted, "asked for"


def choose_sending(dock: Dock, wanted: str = "") -> tuple[str, str]:
    """Return a backend that sends pages straight to a peer, and why this one.

    Without one that is asked for, the first that needs no server, by name.

    Args:
        dock: The loaded backends.
        wanted: The backend that was asked for, or "".

    Raises:
        PluginError: If the one that was asked for does not declare it.
        KvdockError: If none does, or what they need is not installed.
    """
    declared = [
        name
        for name, backend in sorted(dock.backends.items())
        if backend.manifest.peers
    ]
    if wanted and wanted not in declared:
        others = f"Backends that do: {', '.join(declared)}." if declared else _ADVICE
        raise PluginError(
            f"backend {wanted!r} does not declare peers: it cannot write "
            "into the memory of another process",
            fix=others,
        )
    if not declared:
        raise KvdockError(
            "no installed backend declares peers: none can write into the "
            "memory of another process",
            fix=_ADVICE,
        )
    served = {one.name for one in list_entry_points(_SERVERS)}
    ordered = sorted([wanted] if wanted else declared, key=lambda one: one in served)
    refused = {name: _why_not(dock, name) for name in ordered}
    fit = [name for name in ordered if not refused[name]]
    if not fit:
        raise KvdockError(
            "no backend can send pages here: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items()),
            fix="Install what it needs, or choose another one with --backend.",
        )
    if wanted:
        return wanted, "asked for"
    needs = "a server is started for it" if fit[0] in served else "needs no server"
    parts = [f"declares peers and {needs}"]
    if fit[1:]:
        parts.append(f"also possible with --backend: {', '.join(fit[1:])}")
    parts += [f"not {name}: {why}" for name, why in refused.items() if why]
    return fit[0], "; ".join(parts)


def _why_not(dock: Dock, name: str) -> str:
    """Return why a backend does not take a plain pool; "" if it does."""
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MHA,
        parts=[Part(one, DType.F32, (1, 16)) for one in ("k", "v")],
        layers=range(1),
        page_tokens=16,
        anchor=True,
    )
    try:
        dock.plan([pool], Shard(), (name,), needs=TO_PEERS)
    except NoRoute as error:
        routes = error.plan.routes if isinstance(error.plan, Plan) else ()
        found = [option.reason for one in routes for option in one.options]
        return found[0] if found else error.what
    return ""


def completed(
    dock: Dock, names: Iterable[str], directory: Path, given: Mapping[str, Settings]
) -> dict[str, Settings]:
    """Return the settings of some backends.

    One that keeps files gets a directory of its own, if it is given none.

    Args:
        dock: The loaded backends.
        names: Which of them.
        directory: Where directories are made.
        given: Backend to the settings that the user gave.
    """
    settings: dict[str, Settings] = {}
    for name in names:
        path = dock.backends[name].manifest.path_setting
        own: Settings = {path: str(directory / name)} if path else {}
        settings[name] = {**own, **given.get(name, {})}
    return settings
