"""Find out whether a backend works: ask its probe, attach it on trial, move pages.

The one way for commands and for the doctors of engines. Pages go the way of an engine's
pages: keys, memory, trailers and deadlines. Nothing of them is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.dock import Dock
from kvdock.errors import KvdockError
from kvdock.plugin.backend import run_probe
from kvdock.plugin.hookspecs import AttachConfig, Finding
from kvdock.plugin.manifest import Capability
from kvdock.pools.enums import HitPolicy, Per, PoolKind, Sharding
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec
from kvdock.resilience import LateError, run_within
from kvdock.routing.verdicts import RouteRequirements

if TYPE_CHECKING:
    from kvdock.config.engine import EngineConfiguration
    from kvdock.plugin.backend import Backend
    from kvdock.plugin.manifest import KindSupport

PATIENCE_S = 30.0
"""Time for each half of a trial where no option says another."""

_PAGE_BYTES = 4096
_TO_PEERS = "to peers"
_SEND_S = 10.0
"""How long one page may take from an endpoint to another."""

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - looked for, not bound

_KEPT = "keeps for a while"
"""What a health check says of a page that its backend does not delete at once."""


@attrs.frozen
class Trial:
    """What was found out about one backend.

    Args:
        kinds: The kinds of pools that it was tried with.
        probed: What its probe found.
        moved: What became of each step with pages; empty where the probe found
            something wrong, or no page was to be stored.
    """

    kinds: tuple[str, ...]
    probed: tuple[Finding, ...]
    moved: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return all findings, in the order of the steps."""
        return (*self.probed, *self.moved)

    @property
    def short(self) -> tuple[Finding, ...]:
        """Return the same, with one finding for all steps with pages that passed."""
        if not self.moved or not all(step.ok for step in self.moved):
            return self.findings
        kept = sum(_KEPT in step.what for step in self.moved)
        dropped = f"dropped ({kept} of them later)" if kept else "dropped"
        what = (
            f"self test: a page of each kind ({', '.join(self.kinds)}) was stored, "
            f"found, read back, compared and {dropped}"
        )
        sent = [step.what for step in self.moved if _TO_PEERS in step.what]
        warned = [step for step in self.moved if step.warning]
        return (*self.probed, Finding(ok=True, what="; ".join([what, *sent])), *warned)


def try_backend(
    backend: Backend,
    settings: Mapping[str, object],
    *,
    timeout_s: float = PATIENCE_S,
    hint: str = "Look for what it waits for.",
    pages: bool = True,
) -> Trial:
    """Ask a backend's probe, and then move a page of each kind there and back.

    Args:
        backend: A loaded backend.
        settings: Its settings, as its section of a file has them.
        timeout_s: How long the probe may take, and the pages once more.
        hint: What to do about one that takes longer.
        pages: Whether to move pages.

    Raises:
        SettingsError: If the settings are wrong.
    """
    config = AttachConfig(settings=backend.settings(settings))
    kinds = tuple(pool.name for pool in _pools_of(backend.manifest.kinds))
    probed = ask_within(timeout_s, lambda: backend.probe(config), hint)
    if not pages or not all(finding.ok for finding in probed):
        return Trial(kinds, probed)
    moved = ask_within(timeout_s, lambda: _move_pages(backend, settings), hint)
    return Trial(kinds, probed, moved)


def require_ready(
    backend: Backend,
    settings: Mapping[str, object],
    advice: str = "",
    *,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Raise what a backend finds wrong before anything is stored in it.

    Without this, a disk without room shows as pages that were refused. `timeout_s` is
    how long its probe may take, which may import an engine.

    Raises:
        SettingsError: If the settings are wrong.
        KvdockError: If its probe finds a problem.
    """
    trial = try_backend(backend, settings, timeout_s=timeout_s, pages=False)
    for finding in trial.findings:
        if not finding.ok:
            raise KvdockError(
                f"backend {backend.name!r} cannot store pages here: {finding.what}",
                fix=" ".join(filter(None, (finding.hint, advice))),
            )


def try_engine(dock: Dock, given: EngineConfiguration[Any]) -> Iterator[Finding]:
    """Yield what is found out about the backends of an engine, for its doctor."""
    for name in given.used:
        backend = dock.backends[name]
        yield Finding(ok=True, what=f"plugin {name}: {backend.manifest.summary}")
        for finding in try_backend(backend, given.backends.get(name, {})).short:
            yield attrs.evolve(finding, what=f"{name}: {finding.what}")


def ask_within(
    timeout_s: float,
    ask: Callable[[], Iterable[Finding]],
    hint: str = "Look for what it waits for.",
) -> tuple[Finding, ...]:
    """Ask on a thread of its own, so that one that hangs is a finding."""
    deadline_s = time.monotonic() + timeout_s
    try:
        return run_within(deadline_s, lambda: run_probe(ask), "asking")
    except LateError:
        what = f"no answer within {timeout_s:g} s"
        return (Finding(ok=False, what=what, hint=hint),)


def _pools_of(kinds: Mapping[PoolKind, KindSupport]) -> tuple[PoolSpec, ...]:
    """Return a small pool of each kind that a backend takes, the anchor first."""
    pools: list[PoolSpec] = []
    for kind, support in sorted(kinds.items()):
        if kind is PoolKind.LOGICAL or HitPolicy.ALL_PAGES not in support.hit_policies:
            continue
        if not support.layouts:
            continue
        whole = Sharding.REPLICATED in support.shardings
        axis = None if whole else 0
        part = Part("page", "u8", (1, _PAGE_BYTES), per=Per.PAGE, shard_axis=axis)
        pools.append(
            PoolSpec(
                name=str(kind),
                kind=kind,
                parts=(part,),
                layers=(0,),
                page_tokens=1,
                anchor=not pools,
                required=not pools,
                layout=min(support.layouts),
            )
        )
    return tuple(pools)


def _move_pages(
    backend: Backend, settings: Mapping[str, object]
) -> tuple[Finding, ...]:
    """Store, find, load, compare and drop a page of each kind; send one to a peer.

    Every step is a finding; whatever stops the trial is one as well.
    """
    import numpy as np  # noqa: PLC0415 - 65 ms that a listing saves

    from kvdock.geometry.region import Region  # noqa: PLC0415 - numpy, too
    from kvdock.namespace import Namespace  # noqa: PLC0415 - same
    from kvdock.transfer.attachment import Attachment  # noqa: PLC0415 - same

    shard, step = Shard(), "choosing a route"
    try:
        dock = Dock({backend.name: backend})
        given = {backend.name: settings} if backend.manifest.settings else None
        pools = _pools_of(backend.manifest.kinds)
        plan = dock.plan(pools, shard, [backend.name], settings=given)
        regions = {
            route.pool.name: Region.of(
                route.pool, shard, [np.zeros(_PAGE_BYTES, np.uint8)], pages=1
            )
            for route in plan.accepted
        }
        namespace = Namespace(model="kvdock self test")
        step = "attaching"
        with Attachment.open(
            dock, plan, namespace, regions, given, trial=True
        ) as attachment:
            with _warnings() as logged:
                findings = attachment.self_test()
            attachment.clear()
        if logged:
            why = f" It was logged: {logged[-1]}"
            findings = tuple(
                finding
                if finding.ok
                else attrs.evolve(finding, hint=finding.hint + why)
                for finding in findings
            )
        step = "sending a page to a peer"
        return (*findings, *_reach_test(backend, pools[:1], given))
    except KvdockError as error:
        what = f"self test, {step}: {error.what}"
        return (Finding(ok=False, what=what, hint=error.fix),)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what is logged as a warning inside: why a step failed."""
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, log = Collecting(logging.WARNING), logging.getLogger("kvdock")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def _reach_test(
    backend: Backend,
    pools: Sequence[PoolSpec],
    given: Mapping[str, Mapping[str, object]] | None,
) -> tuple[Finding, ...]:
    """Send a page from one endpoint to another, where the backend does that."""
    if not backend.manifest.peers:
        return ()
    import numpy as np  # noqa: PLC0415 - 65 ms that a listing saves

    from kvdock.geometry.region import Region  # noqa: PLC0415 - numpy, too
    from kvdock.namespace import Namespace  # noqa: PLC0415 - same
    from kvdock.peers import PeerTransfers, RequestState  # noqa: PLC0415 - same
    from kvdock.transfer.attachment import Attachment  # noqa: PLC0415 - same

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
            route.pool.name: Region.of(route.pool, shard, [page], pages=1)
            for route in plan.accepted
        }
        for page in memory
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
    listening = [
        socket_.laddr
        for socket_ in ask(kind="tcp")
        if socket_.status == psutil.CONN_LISTEN
    ]
    every = {
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name != "lo"
    }
    open_at = {*_EVERYWHERE}
    if every <= {place.ip for place in listening}:
        open_at |= every
    return {place.port for place in listening if place.ip in open_at}
