"""Try a backend out: one page of each kind, there and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvdock import Dock, Finding, HitPolicy, PoolKind, PoolSpec, Shard, Sharding
from kvdock.errors import KvdockError
from kvdock.pools import Part, Per

if TYPE_CHECKING:
    from kvdock import Backend, KindSupport

_PAGE_BYTES = 4096
_TO_PEERS = "to peers"
_SEND_S = 10.0
"""How long one page may take from an endpoint to another."""

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - looked for, not bound

KEPT = "keeps for a while"
"""What the core says of a page that its backend does not delete at once."""


def pools_of(kinds: Mapping[PoolKind, KindSupport]) -> tuple[PoolSpec, ...]:
    """Return a small pool of each kind that a backend takes, the anchor first."""
    found: list[PoolSpec] = []
    for kind, support in sorted(kinds.items()):
        if kind is PoolKind.LOGICAL or HitPolicy.ALL_PAGES not in support.hit_policies:
            continue
        if not support.layouts:
            continue
        whole = Sharding.REPLICATED in support.shardings
        axis = None if whole else 0
        part = Part("page", "u8", (1, _PAGE_BYTES), per=Per.PAGE, shard_axis=axis)
        found.append(
            PoolSpec(
                name=str(kind),
                kind=kind,
                parts=(part,),
                layers=(0,),
                page_tokens=1,
                anchor=not found,
                required=not found,
                layout=min(support.layouts),
            )
        )
    return tuple(found)


def summary_of(backend: Backend, steps: Sequence[Finding]) -> Finding:
    """Return one finding in place of all steps of a self test that passed."""
    kinds = ", ".join(pool.name for pool in pools_of(backend.manifest.kinds))
    kept = sum(KEPT in step.what for step in steps)
    dropped = f"dropped ({kept} of them later)" if kept else "dropped"
    what = (
        f"self test: a page of each kind ({kinds}) was stored, found, read back, "
        f"compared and {dropped}"
    )
    what += "".join(f"; {step.what}" for step in steps if _TO_PEERS in step.what)
    return Finding(ok=True, what=what)


def self_test(backend: Backend, settings: Mapping[str, object]) -> tuple[Finding, ...]:
    """Store, find, load, compare and drop a page of each kind.

    Goes the way of an engine's pages: keys, memory, trailers and deadlines.
    Every step is a finding; whatever stops the trial is one as well.
    """
    import numpy as np  # noqa: PLC0415 - 65 ms that a listing saves

    from kvdock import Attachment, Namespace, Region  # noqa: PLC0415 - numpy, too

    shard = Shard()
    try:
        dock = Dock({backend.name: backend})
        given = {backend.name: settings} if backend.manifest.settings else None
        pools = pools_of(backend.manifest.kinds)
        plan = dock.plan(pools, shard, [backend.name], settings=given)
        regions = {
            route.pool.name: Region.of(
                route.pool, shard, [np.zeros(_PAGE_BYTES, np.uint8)], pages=1
            )
            for route in plan.accepted
        }
        namespace = Namespace(model="kvdock self test")
        with Attachment.open(
            dock, plan, namespace, regions, given, trial=True
        ) as attachment:
            findings = attachment.self_test()
            attachment.clear()
        return (*findings, *_reach_test(backend, pools[:1], given))
    except KvdockError as error:
        return (Finding(ok=False, what=error.what, hint=error.fix),)


def _reach_test(
    backend: Backend,
    pools: Sequence[PoolSpec],
    given: Mapping[str, Mapping[str, object]] | None,
) -> tuple[Finding, ...]:
    """Send a page from one endpoint to another, where the backend does that."""
    import numpy as np  # noqa: PLC0415 - 65 ms that a listing saves

    from kvdock import (  # noqa: PLC0415 - numpy, too
        Attachment,
        Capability,
        Namespace,
        Region,
        RouteRequirements,
    )
    from kvdock.peers import PeerTransfers, RequestState  # noqa: PLC0415 - same

    if not backend.manifest.peers:
        return ()
    shard = Shard()
    settings = backend.settings(given[backend.name] if given else None)
    said = backend.check_capability(Capability.PEERS, pools[0], shard, settings)
    if said is not None and not said:
        return (Finding(ok=True, what=f"to peers: none go, {said.reason}"),)
    dock = Dock({backend.name: backend})
    needs = RouteRequirements(peers=True)
    plan = dock.plan(pools, shard, [backend.name], settings=given, needs=needs)
    namespace = Namespace(model="kvdock self test")
    memory = [np.full(_PAGE_BYTES, filled, np.uint8) for filled in (0xA5, 0)]
    regions = [
        {
            route.pool.name: Region.of(route.pool, shard, [one], pages=1)
            for route in plan.accepted
        }
        for one in memory
    ]
    name = plan.accepted[0].pool.name
    with (
        Attachment.open(dock, plan, namespace, regions[0], given, trial=True) as near,
        Attachment.open(dock, plan, namespace, regions[1], given, trial=True) as far,
    ):
        sender, receiver = PeerTransfers(near), PeerTransfers(far)
        before = _open_ports()
        offers = receiver.offers()
        opened = sorted(_open_ports() - before)
        request = receiver.expect({name: [0]}, [sender.offers(receives=False)])
        future = sender.send(offers, request.tickets[0], {name: [0]})
        future.wait_quiet(_SEND_S)
        receiver.complete(future.completion())
        arrived = request.wait(0) is RequestState.ARRIVED
        same = bool((memory[0] == memory[1]).all())
    if arrived and same:
        what = "to peers: a page went from one endpoint to another, compared"
        return (Finding(ok=True, what=what), *_open_to_all(opened))
    why = request.reason or "its bytes differ"
    what = f"to peers: a page did not reach another endpoint: {why}"
    hint = "Both endpoints are in this process: see the log for the backend's reason."
    return (Finding(ok=False, what=what, hint=hint),)


def _open_to_all(ports: Sequence[int]) -> tuple[Finding, ...]:
    """Warn of ports of a transfer engine that any host can reach."""
    if not ports:
        return ()
    listed = ", ".join(map(str, ports))
    return (
        Finding(
            ok=True,
            warning=True,
            what=f"to peers: its ports (now {listed}) listen on all interfaces, "
            "without authentication",
            hint="Who reaches them may read and overwrite the pages that are attached: "
            "let only the engines of this deployment reach this host's ports.",
        ),
    )


def _open_ports() -> set[int]:
    """Return the ports on which this process listens on all interfaces.

    UCX has a port for each, not one for all.
    """
    import socket  # noqa: PLC0415 - as above

    import psutil  # type: ignore[import-untyped]  # noqa: PLC0415 - has no types

    process = psutil.Process()
    # `connections` before psutil 6.
    ask = getattr(process, "net_connections", None) or process.connections
    found = [one.laddr for one in ask(kind="tcp") if one.status == psutil.CONN_LISTEN]
    every = {
        one.address
        for name, own in psutil.net_if_addrs().items()
        for one in own
        if one.family == socket.AF_INET and name != "lo"
    }
    open_at = {*_EVERYWHERE}
    if every <= {one.ip for one in found}:
        open_at |= every
    return {one.port for one in found if one.ip in open_at}
