"""Which backend carries the pages, judged by manifests; loads no torch."""

from collections.abc import Mapping

import attrs

from kvdock import (
    Dock,
    DType,
    KvdockError,
    NoRoute,
    Part,
    Plan,
    PoolKind,
    PoolSpec,
    RouteRequirements,
    Shard,
)
from kvdock.config import load_configuration
from kvdock.errors import PluginError
from kvdock.plugin import list_entry_points
from kvdock_transformers.backends import SERVERS, Settings, path_setting

NEEDS = RouteRequirements(direct_transfer=True)
"""What the demo asks of a backend."""

_ADVICE = (
    "Install one, for example with: pip install 'kvdock-nixl[cu12]'. `kvdock list` "
    "shows in its column DIRECT which ones declare it."
)


@attrs.frozen
class Choice:
    """The backend that carries the pages.

    Args:
        backend: Its name.
        reason: Why this one.
    """

    backend: str
    reason: str


def choose_direct(dock: Dock, wanted: str = "") -> Choice:
    """Return a backend that sends pages straight to a peer.

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
        if backend.manifest.direct_transfer
    ]
    if wanted and wanted not in declared:
        others = f"Backends that do: {', '.join(declared)}." if declared else _ADVICE
        raise PluginError(
            f"backend {wanted!r} does not declare direct transfer: it cannot write "
            "into the memory of another process",
            fix=others,
        )
    if not declared:
        raise KvdockError(
            "no installed backend declares direct transfer: none can write into the "
            "memory of another process",
            fix=_ADVICE,
        )
    served = {one.name for one in list_entry_points(SERVERS)}
    ordered = sorted([wanted] if wanted else declared, key=lambda one: one in served)
    refused = {}
    for name in ordered:
        refused[name] = _why_not(dock, name)
        if not refused[name]:
            rest = {one: refused.get(one, "") for one in ordered if one != name}
            reason = "asked for" if wanted else _reason(name in served, rest)
            return Choice(name, reason)
    raise KvdockError(
        "no backend can send pages here: "
        + "; ".join(f"{name}: {why}" for name, why in refused.items()),
        fix="Install what it needs, or choose another one with --backend.",
    )


def _reason(served: bool, rest: Mapping[str, str]) -> str:  # noqa: FBT001 - a fact
    needs = "a server is started for it" if served else "needs no server"
    parts = [f"declares direct transfer and {needs}"]
    fit = [name for name, why in rest.items() if not why]
    if fit:
        parts.append(f"also possible with --backend: {', '.join(fit)}")
    parts += [f"not {name}: {why}" for name, why in rest.items() if why]
    return "; ".join(parts)


def _why_not(dock: Dock, name: str) -> str:
    """Return why a backend does not take a plain pool; "" if it does."""
    parts = [Part(one, DType.F32, (1, 16)) for one in ("k", "v")]
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MHA,
        parts=parts,
        layers=range(1),
        page_tokens=16,
        anchor=True,
    )
    try:
        dock.plan([pool], Shard(), (name,), needs=NEEDS)
    except NoRoute as error:
        routes = error.plan.routes if isinstance(error.plan, Plan) else ()
        found = [option.reason for one in routes for option in one.options]
        return found[0] if found else error.what
    return ""


def settings_of(dock: Dock, name: str, given: Settings) -> dict[str, object]:
    """Return what is given, over what kvdock's file and environment say.

    All but a directory, unless it is given: the demo brings one for each of its
    processes.

    Raises:
        SettingsError: If the file or the environment cannot be read.
    """
    found = dict(load_configuration().backends.get(name, {}))
    path = path_setting(dock.backends[name].manifest.settings)
    if path:
        found.pop(path, None)
    return {**found, **given}
