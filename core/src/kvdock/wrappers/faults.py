"""Inject faults between the core and a backend, for tests and drills.

A wrapper: `wrap = [{name = "faults", kinds = ["delay"]}]` among a backend's
settings puts it around the backend's stores, so that observers see what the core
sees. Never use it in front of an engine that serves: `short`, `corrupt`, `swap`
and `lie` alter bytes.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import attrs

from kvdock.batch import Batch, BatchResult, Operation
from kvdock.config import fields
from kvdock.config.fields import duration, option
from kvdock.plugin.store import StoreWrapper
from kvdock.plugin.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.geometry.region import Region
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.plugin.manifest import Manifest
    from kvdock.plugin.store import PeerMemory, PoolStore
    from kvdock.plugin.wrapper import InnerStore
    from kvdock.pools.spec import PoolSpec


class Fault(StrEnum):
    """What can be done to a batch."""

    DELAY = "delay"
    """Take longer, by `delay`."""
    THROTTLE = "throttle"
    """Take `delay` and what `bandwidth` allows, one batch after the other."""
    ERROR = "error"
    """Do the work, and raise."""
    DROP = "drop"
    """Raise at once, without reaching the backend."""
    HANG = "hang"
    """Hang past the deadline, for `hang`, and then do nothing."""
    LATE = "late"
    """Hang past the deadline, and then do the work: late bytes."""
    SHORT = "short"
    """Leave the end of each object as it was; say so or do not."""
    CORRUPT = "corrupt"
    """Alter one byte of one object, on its way in or out."""
    SWAP = "swap"
    """Load two objects into each other's memory."""
    LIE = "lie"
    """Say that everything is there, with noise for bytes."""
    GARBLE = "garble"
    """Answer with something that is not an answer."""


class InjectedFault(Exception):  # noqa: N818 - it is a fault, by design
    """A fault that was asked for."""


@attrs.frozen(kw_only=True)
class FaultSettings:
    """Which faults, where, how often."""

    kinds: tuple[Fault, ...] = option((), help="Faults to inject.")
    rate: float = option(1.0, help="Share of batches that each of them hits.")
    operations: tuple[Operation, ...] = option(
        tuple(Operation), help="Only in these operations."
    )
    pools: tuple[str, ...] = option((), help="Only for these pools; none for all.")
    ranks: tuple[int, ...] = option((), help="Only on these TP ranks; none for all.")
    delay: float = duration("20 ms", help="How much longer a delay takes.")
    bandwidth: int = fields.size(1 << 30, help="Bytes per second of a throttle.")
    jitter: float = option(0.0, help="Share by which a throttle is faster or slower.")
    hang: float = duration("1 h", help="How long a hang lasts, at most.")
    seed: int = option(0, help="Makes the choices repeat.")


class FaultInjector:
    """Puts faults into stores. `kinds` and `rate` may be changed while in use."""

    def __init__(self, settings: FaultSettings) -> None:
        self.settings = settings
        self.injected: dict[Fault, int] = dict.fromkeys(Fault, 0)
        self._random = random.Random(settings.seed)  # noqa: S311 - chooses faults, guards nothing
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._free_s = 0.0  # when a throttle is through with what it was given

    def inject(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the settings
        """Change what is injected from now on."""
        self.settings = attrs.evolve(self.settings, **changes)

    def release(self) -> None:
        """End every hang, now and from now on, and inject nothing more."""
        self.settings = attrs.evolve(self.settings, kinds=())
        self._released.set()

    def manifest(self, inner: Manifest) -> Manifest:
        """Declare what the backend declares; the faults are not announced."""
        return inner

    def wrap(
        self,
        inner: InnerStore,
        pool: PoolSpec,
        region: Region,
        config: AttachConfig,
    ) -> PoolStore:
        """Put faults between the core and the store of one pool."""
        del pool
        return _FaultyStore(inner.open(region), self, config.shard.tp_rank)

    def run(
        self, batch: Batch, rank: int, inner: Callable[[Batch], BatchResult]
    ) -> BatchResult:
        """Do harm before, during and after the real call."""
        faults = self._drawn(batch, rank) if self.settings.kinds else frozenset()
        if not faults:
            return inner(batch)
        self._before(batch, faults)
        undo = self._altered_for_put(batch) if Fault.CORRUPT in faults else None
        try:
            result = inner(batch)
        finally:
            if undo is not None:
                undo[0].value = undo[1]
        return self._after(batch, faults, result)

    def _drawn(self, batch: Batch, rank: int) -> frozenset[Fault]:
        given = self.settings
        if (
            batch.operation not in given.operations
            or (given.pools and batch.pool not in given.pools)
            or (given.ranks and rank not in given.ranks)
        ):
            return frozenset()
        with self._lock:
            drawn = [f for f in given.kinds if self._random.random() < given.rate]
            for fault in drawn:
                self.injected[fault] += 1
        return frozenset(drawn)

    def _before(self, batch: Batch, faults: frozenset[Fault]) -> None:
        if Fault.DELAY in faults:
            self._released.wait(self.settings.delay)
        if Fault.THROTTLE in faults:
            self._throttle(int(batch.object_bytes.sum()))
        if Fault.DROP in faults:
            raise InjectedFault("dropped")
        if faults & {Fault.HANG, Fault.LATE}:
            end = time.monotonic() + self.settings.hang
            if batch.deadline_s < end:
                # Past the deadline in any case, released or not.
                self._released.wait(max(0.0, end - time.monotonic()))
            if Fault.HANG in faults:
                raise InjectedFault("hung")

    def _throttle(self, nbytes: int) -> None:
        """Wait for so many bytes, behind those that others wait for."""
        given, now_s = self.settings, time.monotonic()
        with self._lock:
            shake = 1 + self._random.uniform(-given.jitter, given.jitter)
            took_s = shake * nbytes / given.bandwidth
            self._free_s = max(now_s, self._free_s) + took_s
            end_s = self._free_s + shake * given.delay
        self._released.wait(end_s - now_s)

    def _altered_for_put(self, batch: Batch) -> tuple[ctypes.c_ubyte, int] | None:
        """Alter a byte of what is stored; give back what restores it."""
        # Memory with a gate may have another use before the byte is restored.
        if batch.operation is not Operation.PUT or batch.gate is not None:
            return None
        cell = self._some_byte(batch)
        if cell is None:
            return None
        before = cell.value
        cell.value = before ^ 0x10
        return cell, before

    def _after(
        self, batch: Batch, faults: frozenset[Fault], result: BatchResult
    ) -> BatchResult:
        gate = batch.gate
        if batch.operation is Operation.GET and (gate is None or gate.enter()):
            try:
                result = self._spoiled(batch, faults, result)
            finally:
                if gate is not None:
                    gate.leave()
        elif Fault.LIE in faults and batch.operation is Operation.EXISTS:
            result = BatchResult.of(batch, [0] * len(batch))
        if Fault.ERROR in faults:
            raise InjectedFault("failed")
        if Fault.GARBLE in faults:
            return cast(
                "BatchResult",  # it is none, on purpose
                self._choice([None, True, [0] * len(batch), BatchResult([], []), "ok"]),
            )
        return result

    def _spoiled(
        self, batch: Batch, faults: frozenset[Fault], result: BatchResult
    ) -> BatchResult:
        """Do to loaded bytes what these faults do."""
        rows = range(len(batch))
        if Fault.LIE in faults:
            for row in rows:
                self._noise(batch, row, 0)
            result = BatchResult.of(batch, [0] * len(batch))
        if Fault.CORRUPT in faults:
            cell = self._some_byte(batch)
            if cell is not None:
                cell.value ^= 0x10
        if Fault.SWAP in faults:
            self._swap(batch)
        if Fault.SHORT in faults:
            sizes = batch.object_bytes
            for row in rows:
                self._noise(batch, row, int(sizes[row]) // 2)
            if self._choice([True, False]):
                result = BatchResult(result.outcomes, result.nbytes // 2)
        return result

    def _pieces(self, batch: Batch, row: int) -> list[tuple[int, int]]:
        pairs = zip(
            batch.addresses[row].tolist(), batch.sizes[row].tolist(), strict=True
        )
        return [(at, size) for at, size in pairs if size]

    def _some_byte(self, batch: Batch) -> ctypes.c_ubyte | None:
        if not len(batch) or not batch.sizes.size:
            return None
        pieces = self._pieces(batch, self._choice(range(len(batch))))
        if not pieces:
            return None
        at, size = self._choice(pieces)
        return ctypes.c_ubyte.from_address(at + self._choice(range(size)))

    def _noise(self, batch: Batch, row: int, first: int) -> None:
        """Overwrite an object from byte `first` on."""
        for at, size in self._pieces(batch, row):
            keep = min(first, size)
            ctypes.memset(at + keep, self._choice(range(256)), size - keep)
            first -= keep

    def _swap(self, batch: Batch) -> None:
        if len(batch) < 2:  # noqa: PLR2004 - it takes two
            return
        one, two = self._choice(range(len(batch))), self._choice(range(len(batch)))
        pairs = zip(self._pieces(batch, one), self._pieces(batch, two), strict=False)
        for (at, size), (other, other_size) in pairs:
            if size == other_size:
                mine, theirs = ctypes.string_at(at, size), ctypes.string_at(other, size)
                ctypes.memmove(at, theirs, size)
                ctypes.memmove(other, mine, size)

    def _choice(self, among: Any) -> Any:  # noqa: ANN401 - any sequence
        with self._lock:
            return self._random.choice(among)


class _FaultyStore(StoreWrapper):
    """A store with faults."""

    def __init__(self, inner: PoolStore, injector: FaultInjector, rank: int) -> None:
        super().__init__(inner)
        self._injector, self._rank = injector, rank
        peers = getattr(inner, "peers", None)
        if peers is not None:
            self.peers = _FaultyPeers(peers, injector, rank)

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch, with what goes wrong."""
        return self._injector.run(batch, self._rank, self.inner.run)


class _FaultyPeers:
    """Memory for peers, with faults in what is sent."""

    def __init__(self, inner: PeerMemory, injector: FaultInjector, rank: int) -> None:
        self._inner, self._injector, self._rank = inner, injector, rank
        self.endpoint, self.connect = inner.endpoint, inner.connect
        self.disconnect, self.withdraw = inner.disconnect, inner.withdraw

    def send(self, batch: Batch) -> BatchResult:
        """Send rows, with what goes wrong."""
        return self._injector.run(batch, self._rank, self._inner.send)


wrapper = Wrapper(
    name="faults",
    summary="injects faults; for tests and drills only",
    settings=FaultSettings,
    build=FaultInjector,
)
