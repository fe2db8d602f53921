"""Seal pages: encrypt each object with a key of its tenant before it is stored.

    wrap = [{name = "seal", keys = "/etc/kvdock/keys.json"}]

AES-256-GCM of the `cryptography` library. The name, the length and the namespace of
an object are bound to its bytes, so one that was moved to another key, altered or
cut short is found. The inner store gets objects that are 40 bytes longer, in memory
of this wrapper: their trailers of format 2 (decision 126) have the number of the key,
the nonce and the tag.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.config import fields
from kvdock.config.fields import count, option
from kvdock.config.tenants import NO_TENANT
from kvdock.geometry.region import Block, Region
from kvdock.native import address_space
from kvdock.plugin.manifest import Support
from kvdock.plugin.store import StoreWrapper
from kvdock.plugin.wrapper import Wrapper
from kvdock.pools.objects import TRAILER_BYTES
from kvdock.synchronization import ProcessGuard, new_condition, remaining_s
from kvdock.throttled_log import ThrottledLog
from kvdock.wrappers.key_ring import (
    NONCE_BYTES,
    TAG_BYTES,
    DataKey,
    KeyRing,
    KeyUnusableError,
    Subkey,
    read_master_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvdock.arrays import BoolArray, ByteArray, Int64Array, OutcomeArray
    from kvdock.plugin.hookspecs import AttachConfig, HostMemory
    from kvdock.plugin.manifest import Manifest
    from kvdock.plugin.store import PoolStore
    from kvdock.plugin.wrapper import InnerStore
    from kvdock.pools.spec import PoolSpec

_HEAD = struct.Struct("<cBHII")
"""Magic, format, number of the key, salt of the subkey, expiry (not used yet)."""
_FORMAT = 2
_NONCE = slice(_HEAD.size, _HEAD.size + NONCE_BYTES)
_TAG = slice(_HEAD.size + NONCE_BYTES, TRAILER_BYTES)
_SALT_BYTES = 4
_SALT_OBJECTS = 1 << 24
"""Objects of one store that a subkey seals at most, or a batch more."""
_SPACE = address_space()
_OK = int(Outcome.OK)
_MOST_LOST = 1 << 16
"""Names of objects without a key that one store remembers."""
_PAGE = 4096
_MOVES = (Operation.PUT, Operation.GET)
_ASKS = (*_MOVES, Operation.EXISTS, Operation.RETAIN)


@attrs.frozen(kw_only=True)
class SealSettings:
    """Where keys are, and how much memory sealed pages pass through."""

    keys: Path = option(help="The file of wrapped keys.")
    master_file: Path | None = option(
        None, help="The file of the master key; without one the variable has it."
    )
    master_env: str = option(
        "KV_MASTER_KEY", help="The variable of the master key, in hexadecimal."
    )
    buffer_bytes: int = fields.size(16 << 20, help="Memory of one call, for each pool.")
    buffers: int = count(4, least=1, help="Calls at a time, for each pool.")


class Seal:
    """Puts sealing stores around the stores of one backend."""

    def __init__(self, settings: SealSettings) -> None:
        from cryptography.hazmat.primitives import (  # noqa: F401, PLC0415
            ciphers,
        )

        self.settings = settings
        master = read_master_key(settings.master_file, settings.master_env)
        self.ring = KeyRing(settings.keys, master)

    def manifest(self, inner: Manifest) -> Manifest:
        """Declare that pages are copied, sealed and proven here."""
        kinds = {
            kind: attrs.evolve(one, multi_buffer=Support.NATIVE)
            for kind, one in inner.kinds.items()
        }
        room = inner.max_object_bytes - TRAILER_BYTES
        return attrs.evolve(
            inner,
            kinds=kinds,
            sealed=True,
            integrity=Support.NATIVE,
            zero_copy=Support.EMULATED,
            memory_registration=Support.NO,
            host_allocator=Support.NO,
            fork_safe=Support.NO,
            gated_get=Support.NATIVE,
            gated_put=Support.NATIVE,
            peers=Support.NO,
            max_object_bytes=max(1, room) if inner.max_object_bytes else 0,
        )

    def wrap(
        self,
        inner: InnerStore,
        pool: PoolSpec,
        region: Region,
        config: AttachConfig,
    ) -> PoolStore:
        """Open the store of one pool for memory of this wrapper."""
        if not pool.physical:
            return inner.open(region)  # there are no bytes to seal
        buffers = _Buffers(region, self.settings, inner.allocate)
        try:
            store = inner.open(buffers.region)
        except BaseException:
            buffers.close()
            raise
        # Requests of one engine may be those of several tenants.
        names = {**config.tenants.names, NO_TENANT: config.tenant}
        return SealedStore(
            store, buffers, self.ring, names, config.namespace, pool.name
        )


class _Buffers:
    """Memory that sealed objects pass through, in slots of one size.

    Args:
        allocate: Returns memory that the backend reaches; None where any will do.
    """

    def __init__(
        self,
        region: Region,
        settings: SealSettings,
        allocate: Callable[[int], HostMemory | None],
    ) -> None:
        each = len(region.objects)
        largest = int(region.object_bytes.max()) + TRAILER_BYTES
        self.slot_bytes = -(-largest // _PAGE) * _PAGE
        pages = max(1, settings.buffer_bytes // (self.slot_bytes * each))
        self.rows = pages * each
        self._nbytes = self.rows * self.slot_bytes
        total = settings.buffers * self._nbytes
        self._loan = allocate(total + _PAGE)
        if self._loan is None:
            # Memory that was never touched costs address space only.
            raw = np.zeros(total + _PAGE, np.uint8)
        else:
            raw = np.frombuffer(self._loan.buffer, np.uint8)
        memory = raw[-raw.ctypes.data % _PAGE :][:total]
        self._free = list(np.split(memory, settings.buffers))
        self._lock, self._changed = new_condition()
        starts = memory.ctypes.data + self.slot_bytes * np.arange(each)
        self.region = Region(
            pool=region.pool,
            pages=pages * settings.buffers,
            objects=tuple(
                attrs.evolve(one, nbytes=one.nbytes + TRAILER_BYTES)
                for one in region.objects
            ),
            bases=starts[:, None],
            strides=np.full((each, 1), self.slot_bytes * each),
            sizes=region.object_bytes[:, None] + TRAILER_BYTES,
            layout=region.layout,
            blocks=(Block(memory.ctypes.data, memory.nbytes),),
            owners=(memory,),
        )

    def acquire(self, deadline_s: float) -> ByteArray | None:
        """Wait for memory of one call; None if there is none in time."""
        with self._lock:
            self._changed.wait_for(lambda: self._free, remaining_s(deadline_s))
            return self._free.pop() if self._free else None

    def release(self, memory: ByteArray) -> None:
        """Release memory for the next call."""
        with self._lock:
            self._free.append(memory)
            self._changed.notify()

    def close(self) -> None:
        """Give the backend's memory back; no store may use it any more."""
        if self._loan is not None:
            self._loan.give_back()


class SealedStore(StoreWrapper):
    """A store whose objects are sealed.

    Args:
        tenants: Number of a batch's tenant to its name.
    """

    def __init__(
        self,
        inner: PoolStore,
        buffers: _Buffers,
        ring: KeyRing,
        tenants: Mapping[int, str],
        namespace: str,
        pool: str,
    ) -> None:
        super().__init__(inner)
        self.peers = None  # what goes straight to peers would not be sealed
        self._buffers, self._ring = buffers, ring
        self._tenants, self._namespace, self._pool = tenants, namespace, pool
        self._bound = namespace.encode() + b"\0"
        self._salt, self._salted = 0, _SALT_OBJECTS
        self._salting = threading.Lock()
        # Names of stored objects, and the numbers of the keys that they lacked.
        self._lost: dict[str, int] = {}
        self._guard = ProcessGuard()
        self._log = ThrottledLog()

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch; without a usable key every page is a miss."""
        if self._guard.forked:
            # The parent may be using the same memory of a backend, and the same salt.
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        if batch.operation not in _ASKS:
            return self.inner.run(batch)
        key, own = None, self._tenants[NO_TENANT]
        about = f"pages of tenant {own!r} are misses"
        tenant, look = self._tenants.get(batch.tenant, own), False
        try:
            if batch.operation is Operation.PUT:
                about = f"pages of tenant {tenant!r} are not stored"
                key, look = self._ring.sealing(tenant), self._ring.has_lost(tenant)
            else:
                self._ring.reading(own)
        except KeyUnusableError as error:
            self._warn(error, about)
            refused = BatchResult.all(batch, Outcome.REFUSED)
            return attrs.evolve(refused, cause="key")
        if batch.operation is Operation.PUT and (look or self._lost):
            self._make_way(batch, look=look)
        if batch.operation not in _MOVES or not len(batch):
            return self._without_lost(batch, self.inner.run(batch))
        most = self._buffers.rows
        if len(batch) <= most:
            return self._move(batch, key)
        starts = range(0, len(batch), most)
        return _joined([self._move(batch.part(at, at + most), key) for at in starts])

    def close(self) -> None:
        """Close the store, and give back the memory that it reached."""
        self.inner.close()
        self._buffers.close()

    def _without_lost(self, batch: Batch, result: BatchResult) -> BatchResult:
        """Answer a lookup: what no key opens is to be stored again."""
        if batch.operation is not Operation.EXISTS or not self._lost:
            return result
        lost = self._are_lost(batch.keys)
        outcomes = np.where(lost, Outcome.ABSENT, result.outcomes)
        return attrs.evolve(BatchResult.of(batch, outcomes), cause=result.cause)

    def _are_lost(self, keys: Sequence[str]) -> BoolArray:
        """Return which objects lacked a key when loaded, and lack it still."""
        numbers = [self._lost.get(key, 0) for key in keys]
        shut = {one for one in {*numbers} - {0} if not self._ring.opens(one)}
        return np.array([one in shut for one in numbers], np.bool_)

    def _make_way(self, batch: Batch, *, look: bool) -> None:
        """Delete what no key opens under the names of a put.

        The inner store would believe that it has these objects already. With `look`
        those that are there are loaded first, to find out.
        """
        about: dict[str, Any] = {"deadline_s": batch.deadline_s, "pool": batch.pool}
        if look:
            asked = Batch(Operation.EXISTS, batch.keys, **about)
            there = np.flatnonzero(self.inner.run(asked).ok)
            for start in range(0, len(there), self._buffers.rows):
                rows = there[start : start + self._buffers.rows]
                sizes = batch.object_bytes[rows]
                scratch = np.empty(int(sizes.sum()), np.uint8)
                places = scratch.ctypes.data + np.cumsum(sizes) - sizes
                names = [batch.keys[row] for row in rows.tolist()]
                memory = places[:, None], sizes[:, None]
                self._move(Batch(Operation.GET, names, *memory, **about), None)
        which = np.flatnonzero(self._are_lost(batch.keys)).tolist()
        if which:
            names = [batch.keys[row] for row in which]
            gone = self.inner.run(Batch(Operation.DELETE, names, **about)).ok
            for row in np.flatnonzero(gone).tolist():
                self._lost.pop(names[row], None)

    def _move(self, batch: Batch, key: DataKey | None) -> BatchResult:
        """Move as many objects as one buffer has room for."""
        memory = self._buffers.acquire(batch.deadline_s)
        if memory is None:
            return BatchResult.all(batch, Outcome.TIMEOUT)
        hold = None
        try:
            rooms = _Rooms.of(batch, memory, self._buffers.slot_bytes)
            if key is None:
                rooms.memory[rooms.ends] = 0  # what was left there proves nothing
            elif not _gated(batch, lambda: self._seal(batch, rooms, key)):
                return BatchResult.all(batch, Outcome.TIMEOUT)
            result = self.inner.run(rooms.inner_batch(batch))
            hold = result.hold
            if key is not None:
                return attrs.evolve(
                    BatchResult.of(batch, result.outcomes),
                    kept=result.kept,
                    cause=result.cause,
                )
            if hold is not None:
                # Bytes may still arrive, so none of them is proven.
                return BatchResult.all(batch, Outcome.TIMEOUT)
            outcomes = result.outcomes.copy()
            excess = result.nbytes - rooms.sizes
            outcomes[(outcomes == _OK) & (excess < 0)] = Outcome.SHORT
            outcomes[(outcomes == _OK) & (excess > 0)] = Outcome.LONG
            if not _gated(batch, lambda: self._open(batch, rooms, outcomes)):
                return BatchResult.all(batch, Outcome.TIMEOUT)
            nbytes = np.where(outcomes == _OK, batch.object_bytes, 0)
            return attrs.evolve(result, outcomes=outcomes, nbytes=nbytes)
        finally:
            if hold is None:
                self._buffers.release(memory)
            else:
                hold.on_release(lambda: self._buffers.release(memory))

    def _seal(self, batch: Batch, rooms: _Rooms, key: DataKey) -> None:
        """Seal the objects of a batch into their rooms."""
        count = len(batch)
        with self._salting:
            if self._salted >= _SALT_OBJECTS:
                self._salt = int.from_bytes(os.urandom(_SALT_BYTES), "little")
                self._salted = 0
            self._salted += count
            salt = self._salt
        head = _HEAD.pack(b"K", _FORMAT, key.number, salt, 0)
        subkey = key.subkey(self._namespace, salt)
        # One call for all: for each object it would cost as much as 8 KiB of AES.
        nonces = os.urandom(NONCE_BYTES * count)
        for row, (name, room, pieces) in enumerate(rooms.rows(batch)):
            nonce = nonces[row * NONCE_BYTES : (row + 1) * NONCE_BYTES]
            subkey.seal(nonce, self._about(head, len(room), name), room, pieces)
        trailers = np.empty((count, TRAILER_BYTES), np.uint8)
        trailers[:, : _HEAD.size] = np.frombuffer(head, np.uint8)
        trailers[:, _NONCE] = np.frombuffer(nonces, np.uint8).reshape(count, -1)
        # The library writes a tag right behind the bytes.
        trailers[:, _TAG] = rooms.memory[rooms.ends[:, :TAG_BYTES]]
        rooms.memory[rooms.ends] = trailers

    def _open(self, batch: Batch, rooms: _Rooms, outcomes: OutcomeArray) -> None:
        """Open what was loaded; write to `outcomes` what became of the rest."""
        trailers = rooms.memory[rooms.ends]
        # The library looks for a tag right behind the bytes.
        rooms.memory[rooms.ends[:, :TAG_BYTES]] = trailers[:, _TAG]
        found: dict[bytes, Subkey | None] = {}
        each, wrong = trailers.tobytes(), outcomes.tolist()
        for row, (name, room, pieces) in enumerate(rooms.rows(batch)):
            if wrong[row]:
                continue
            trailer = each[row * TRAILER_BYTES : (row + 1) * TRAILER_BYTES]
            head = trailer[: _HEAD.size]
            try:
                if head not in found:
                    found[head] = self._subkey(head)
            except KeyUnusableError as error:
                number = _HEAD.unpack(head)[2]
                self._warn(error, f"pages sealed with key {number} are misses")
                # Not CORRUPT, which deletes: with the right key it can be read.
                outcomes[row] = Outcome.REFUSED
                if len(self._lost) >= _MOST_LOST:
                    self._lost.clear()
                self._lost[name] = number
                continue
            subkey = found[head]
            about = self._about(head, len(room), name)
            if not subkey or not subkey.open(trailer[_NONCE], about, room, pieces):
                outcomes[row] = Outcome.CORRUPT

    def _subkey(self, head: bytes) -> Subkey | None:
        """Return what opens objects with this head of a trailer; None for no head."""
        magic, form, number, salt, ends = _HEAD.unpack(head)
        if (magic, form, ends) != (b"K", _FORMAT, 0) or not number:
            return None
        return self._ring.opening(number).subkey(self._namespace, salt)

    def _about(self, head: bytes, nbytes: int, name: str) -> bytes:
        """Return what is bound to an object's bytes: it cannot stand elsewhere."""
        return head + nbytes.to_bytes(8, "little") + self._bound + name.encode()

    def _warn(self, error: KeyUnusableError, about: str) -> None:
        self._log.warning(
            f"{error.problem.name} {about}",
            f"pool {self._pool}: {about}: {error.problem}",
        )


@attrs.frozen(eq=False)
class _Rooms:
    """Where the sealed objects of a batch are: a slot for each.

    Args:
        memory: The slots.
        step: Bytes from one to the next.
        sizes: int64 (n,), bytes of each sealed object.
        ends: int64 (n, 40), where the bytes of each trailer are in `memory`.
    """

    memory: ByteArray
    step: int
    sizes: Int64Array
    ends: Int64Array

    @classmethod
    def of(cls, batch: Batch, memory: ByteArray, step: int) -> _Rooms:
        """Give each object of a batch a slot."""
        plain = batch.object_bytes
        starts = step * np.arange(len(batch)) + plain
        ends = starts[:, None] + np.arange(TRAILER_BYTES)
        return cls(memory, step, plain + TRAILER_BYTES, ends)

    def inner_batch(self, batch: Batch) -> Batch:
        """Return the batch of the inner store, which moves sealed objects."""
        sizes = self.sizes[:, None]
        if batch.sizes.strides[0] == 0 and len(batch):
            # Stores know by this that all have one size.
            sizes = np.broadcast_to(sizes[:1], sizes.shape)
        return attrs.evolve(
            batch,
            addresses=self.memory.ctypes.data
            + self.step * np.arange(len(batch))[:, None],
            sizes=sizes,
            gate=None,  # the memory is the wrapper's own
        )

    def rows(self, batch: Batch) -> Iterator[tuple[str, memoryview, list[memoryview]]]:
        """Yield name, room for bytes and tag, and memory of each plain object."""
        whole, extra = self.memory.data, TRAILER_BYTES - TAG_BYTES
        rooms = [
            whole[row * self.step : row * self.step + size - extra]
            for row, size in enumerate(self.sizes.tolist())
        ]
        if batch.addresses.shape[1] == 1:
            # The usual case, at a third of the time.
            wide = zip(batch.addresses[:, 0].tolist(), self.sizes.tolist(), strict=True)
            pieces = [[_SPACE[at : at + size - TRAILER_BYTES]] for at, size in wide]
        else:
            pieces = [
                [_SPACE[at : at + size] for at, size in zip(*row, strict=True) if size]
                for row in zip(
                    batch.addresses.tolist(), batch.sizes.tolist(), strict=True
                )
            ]
        return zip(batch.keys, rooms, pieces, strict=True)


def _gated(batch: Batch, work: Callable[[], None]) -> bool:
    """Touch the batch's own memory; return False if it has another use by now."""
    if batch.gate is not None and not batch.gate.enter():
        return False
    try:
        work()
    finally:
        if batch.gate is not None:
            batch.gate.leave()
    return True


def _joined(parts: Sequence[BatchResult]) -> BatchResult:
    """Return the answers to the parts of a batch as one."""

    def column(name: str, kind: type) -> Any:  # noqa: ANN401 - an array, or None
        found = [getattr(one, name) for one in parts]
        if all(one is None for one in found):
            return None
        sizes = [len(one.outcomes) for one in parts]
        return np.concatenate(
            [
                np.zeros(size, kind) if one is None else one
                for one, size in zip(found, sizes, strict=True)
            ]
        )

    return BatchResult(
        column("outcomes", np.uint8),
        column("nbytes", np.int64),
        cause=next(filter(None, (part.cause for part in parts)), ""),
        kept=column("kept", np.bool_),
        expire_at=column("expire_at", np.int64),
    )


wrapper = Wrapper(
    name="seal",
    summary="seals pages with keys of their tenants, AES-256-GCM",
    settings=SealSettings,
    build=Seal,
    needs="kvdock[seal]",
)
