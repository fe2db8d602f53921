"""Seal pages: encrypt each object with a key of its tenant before it is stored.

    wrap = [{name = "seal", keys = "/etc/kvdock/keys.json"}]

AES-256-GCM of the `cryptography` library. The name, the length and the namespace of
an object are bound to its bytes, so one that was moved to another key, altered or
cut short is found. The inner store gets objects that are 40 bytes longer, in memory
of this wrapper: their trailers of format 2 (decision 126) have the number of the key,
the nonce and the tag.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np

from kvdock.batch import BatchResult, Operation, Outcome
from kvdock.config import fields
from kvdock.config.fields import count, option
from kvdock.errors import PluginError
from kvdock.geometry.region import Block, Region
from kvdock.plugin.manifest import Support
from kvdock.plugin.store import StoreWrapper
from kvdock.plugin.wrapper import Wrapper
from kvdock.pools.objects import TRAILER_BYTES
from kvdock.synchronization import new_condition, remaining_s
from kvdock.throttled_log import ThrottledLog
from kvdock.wrappers.key_ring import (
    NONCE_BYTES,
    DataKey,
    KeyRing,
    KeyUnusableError,
    read_master_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.arrays import ByteArray, OutcomeArray
    from kvdock.batch import Batch
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.plugin.manifest import Manifest
    from kvdock.plugin.store import PoolStore
    from kvdock.pools.spec import PoolSpec

PIECE_BYTES = 1 << 20
"""Bytes that the library is given at once: it holds the interpreter's lock."""

_HEAD = struct.Struct("<cBHII")
"""Magic, format, number of the key, tenant, expiry; as `DATED_TRAILER`. The last two
are not used yet."""
_FORMAT = 2
_TAG_BYTES = 16
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
        if inner.host_allocator:
            raise PluginError(
                f"{inner.name!r} reaches only memory that it brings, and sealed pages "
                "pass through other memory",
                fix="Leave the wrapper 'seal' out, or choose another backend.",
            )
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
            gated_get=Support.NATIVE,
            gated_put=Support.NATIVE,
            direct_transfer=Support.NO,
            max_object_bytes=max(1, room) if inner.max_object_bytes else 0,
        )

    def wrap(
        self,
        open_inner: Callable[[Region], PoolStore],
        pool: PoolSpec,
        region: Region,
        config: AttachConfig,
    ) -> PoolStore:
        """Open the store of one pool for memory of this wrapper."""
        if not pool.physical:
            return open_inner(region)  # there are no bytes to seal
        buffers = _Buffers(region, self.settings)
        inner = open_inner(buffers.region)
        return SealedStore(
            inner, buffers, self.ring, config.tenant, config.namespace, pool.name
        )


class _Buffers:
    """Memory that sealed objects pass through, in slots of one size.

    Args:
        region: The memory that plain objects are moved from and to.
        settings: How much of it there is.
    """

    def __init__(self, region: Region, settings: SealSettings) -> None:
        each = len(region.objects)
        largest = int(region.object_bytes.max()) + TRAILER_BYTES
        self.slot_bytes = -(-largest // _PAGE) * _PAGE
        pages = max(1, settings.buffer_bytes // (self.slot_bytes * each))
        self.rows = pages * each
        self._nbytes = self.rows * self.slot_bytes
        # Memory that was never touched costs address space only.
        raw = np.zeros(settings.buffers * self._nbytes + _PAGE, np.uint8)
        memory = raw[-raw.ctypes.data % _PAGE :][: settings.buffers * self._nbytes]
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


class SealedStore(StoreWrapper):
    """A store whose objects are sealed.

    Args:
        inner: The store around which this one is put.
        buffers: The memory that it was opened for.
        ring: All keys.
        tenant: Whose pages these are.
        namespace: The namespace that begins their keys.
        pool: The pool's name.
    """

    def __init__(
        self,
        inner: PoolStore,
        buffers: _Buffers,
        ring: KeyRing,
        tenant: str,
        namespace: str,
        pool: str,
    ) -> None:
        super().__init__(inner)
        self.peers = None  # what goes straight to peers would not be sealed
        self._buffers, self._ring = buffers, ring
        self._tenant, self._namespace, self._pool = tenant, namespace, pool
        self._log = ThrottledLog()

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch; without a usable key every page is a miss."""
        if batch.operation not in _ASKS:
            return self.inner.run(batch)
        try:
            if batch.operation is Operation.PUT:
                key = self._ring.sealing(self._tenant)
            else:
                key = None
                self._ring.reading(self._tenant)
        except KeyUnusableError as error:
            self._warn(error)
            return BatchResult.all(batch, Outcome.REFUSED)
        if batch.operation not in _MOVES:
            return self.inner.run(batch)
        parts = []
        for start in range(0, len(batch), self._buffers.rows):
            part = batch.part(start, start + self._buffers.rows)
            parts.append(self._move(part, key))
        return parts[0] if len(parts) == 1 else _joined(batch, parts)

    def _move(self, batch: Batch, key: DataKey | None) -> BatchResult:
        """Move as many objects as one buffer has room for."""
        memory = self._buffers.acquire(batch.deadline_s)
        if memory is None:
            return BatchResult.all(batch, Outcome.TIMEOUT)
        hold = None
        try:
            if key is None:
                self._erase(batch, memory)
            elif not _gated(batch, lambda: self._seal_all(batch, memory, key)):
                return BatchResult.all(batch, Outcome.TIMEOUT)
            result = self.inner.run(self._inner_batch(batch, memory))
            hold = result.hold
            if key is not None:
                return attrs.evolve(
                    BatchResult.of(batch, result.outcomes), kept=result.kept
                )
            if hold is not None:
                # Bytes may still arrive, so none of them is proven.
                return BatchResult.all(batch, Outcome.TIMEOUT)
            outcomes = result.outcomes.copy()
            if not _gated(
                batch, lambda: self._open_all(batch, memory, result, outcomes)
            ):
                return BatchResult.all(batch, Outcome.TIMEOUT)
            nbytes = np.where(outcomes == Outcome.OK, result.nbytes - TRAILER_BYTES, 0)
            return BatchResult(outcomes, nbytes, expire_at=result.expire_at)
        finally:
            if hold is None:
                self._buffers.release(memory)
            else:
                hold.on_release(lambda: self._buffers.release(memory))

    def _inner_batch(self, batch: Batch, memory: ByteArray) -> Batch:
        """Return the batch of the inner store, which moves sealed objects."""
        step = self._buffers.slot_bytes
        return attrs.evolve(
            batch,
            addresses=memory.ctypes.data + step * np.arange(len(batch))[:, None],
            sizes=batch.object_bytes[:, None] + TRAILER_BYTES,
            gate=None,  # the memory is this wrapper's own
        )

    def _rooms(self, batch: Batch, memory: ByteArray) -> list[memoryview]:
        """Return the memory of each sealed object."""
        step = self._buffers.slot_bytes
        return [
            memory[at * step :][: size + TRAILER_BYTES].data
            for at, size in enumerate(batch.object_bytes.tolist())
        ]

    def _erase(self, batch: Batch, memory: ByteArray) -> None:
        """Erase trailers: what was left from before proves nothing."""
        for room in self._rooms(batch, memory):
            room[-TRAILER_BYTES:] = bytes(TRAILER_BYTES)

    def _seal_all(self, batch: Batch, memory: ByteArray, key: DataKey) -> None:
        for row in zip(
            batch.keys, _objects(batch), self._rooms(batch, memory), strict=True
        ):
            self._seal(*row, key)

    def _about(self, head: bytes, nbytes: int, name: str) -> bytes:
        """Return what is bound to an object's bytes: it cannot stand elsewhere."""
        return b"%s%s%s\0%s" % (
            head,
            nbytes.to_bytes(8, "little"),
            self._namespace.encode(),
            name.encode(),
        )

    def _seal(
        self, name: str, plain: list[memoryview], room: memoryview, key: DataKey
    ) -> None:
        """Seal one object into `room`, which has 40 bytes more."""
        size = len(room) - TRAILER_BYTES
        head = _HEAD.pack(b"K", _FORMAT, key.number, 0, 0)
        nonce, about = os.urandom(NONCE_BYTES), self._about(head, size, name)
        raw, cipher = key.cipher(self._namespace, name)
        tag: bytes
        if size <= PIECE_BYTES and len(plain) == 1:
            cipher.encrypt_into(nonce, plain[0], about, room[: size + _TAG_BYTES])
            tag = bytes(room[size : size + _TAG_BYTES])
        else:
            work = _long_message(raw, nonce).encryptor()
            work.authenticate_additional_data(about)
            start = 0
            for piece in plain:
                _in_pieces(work, piece, room[start : start + len(piece)])
                start += len(piece)
            work.finalize()
            tag = work.tag
        room[size:] = head + nonce + tag

    def _open_all(
        self,
        batch: Batch,
        memory: ByteArray,
        result: BatchResult,
        outcomes: OutcomeArray,
    ) -> None:
        """Open what was loaded; write CORRUPT to `outcomes` where a proof fails."""
        rows, rooms = _objects(batch), self._rooms(batch, memory)
        loaded = result.nbytes.tolist()
        for at in np.flatnonzero(outcomes == Outcome.OK).tolist():
            plain, room = rows[at], rooms[at]
            if loaded[at] != len(room):
                short = loaded[at] < len(room)
                outcomes[at] = Outcome.SHORT if short else Outcome.LONG
                continue
            try:
                good = self._open(batch.keys[at], room, plain)
            except KeyUnusableError as error:
                self._warn(error)
                # Not CORRUPT, which deletes: with the right key it can be read.
                outcomes[at] = Outcome.REFUSED
                continue
            if not good:
                outcomes[at] = Outcome.CORRUPT

    def _open(self, name: str, room: memoryview, plain: list[memoryview]) -> bool:
        """Open one object into `plain`; return whether it is the right one."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        size = len(room) - TRAILER_BYTES
        trailer = bytes(room[size:])
        head = trailer[: _HEAD.size]
        nonce = trailer[_HEAD.size : -_TAG_BYTES]
        magic, form, number, tenant, ends = _HEAD.unpack(head)
        if (magic, form, tenant, ends) != (b"K", _FORMAT, 0, 0) or not number:
            return False
        raw, cipher = self._ring.opening(self._tenant, number).cipher(
            self._namespace, name
        )
        about = self._about(head, size, name)
        try:
            if size <= PIECE_BYTES and len(plain) == 1:
                room[size : size + _TAG_BYTES] = trailer[-_TAG_BYTES:]
                cipher.decrypt_into(nonce, room[: size + _TAG_BYTES], about, plain[0])
                return True
            work = _long_message(raw, nonce).decryptor()
            work.authenticate_additional_data(about)
            start = 0
            for piece in plain:
                _in_pieces(work, room[start : start + len(piece)], piece)
                start += len(piece)
            work.finalize_with_tag(trailer[-_TAG_BYTES:])
        except InvalidTag:
            # Whatever was written there is not what was stored.
            for piece in plain:
                piece[:] = bytes(len(piece))
            return False
        return True

    def _warn(self, error: KeyUnusableError) -> None:
        self._log.warning(
            error.problem.name,
            lambda: (
                f"pool {self._pool}: sealed pages of tenant {self._tenant!r} are "
                f"misses: {error.problem}"
            ),
        )


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


def _objects(batch: Batch) -> list[list[memoryview]]:
    """Return the memory of each object, in its pieces."""
    return [
        [_view(at, size) for at, size in zip(starts, sizes, strict=True) if size]
        for starts, sizes in zip(
            batch.addresses.tolist(), batch.sizes.tolist(), strict=True
        )
    ]


def _view(address: int, nbytes: int) -> memoryview:
    raw: Any = (ctypes.c_char * nbytes).from_address(address)
    return memoryview(raw).cast("B")


def _long_message(key: bytes, nonce: bytes) -> Any:  # noqa: ANN401 - the library's
    from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415
        Cipher,
        algorithms,
        modes,
    )

    return Cipher(algorithms.AES(key), modes.GCM(nonce))


def _in_pieces(work: Any, source: memoryview, target: memoryview) -> None:  # noqa: ANN401 - the library's
    """Encrypt or decrypt one message; other threads run between its pieces."""
    for start in range(0, len(source), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        work.update_into(source[piece], target[piece])


def _joined(batch: Batch, parts: list[BatchResult]) -> BatchResult:
    """Return the answers to the parts of a batch as one."""

    def column(name: str, kind: type) -> Any:  # noqa: ANN401 - an array of that kind
        found = [getattr(one, name) for one in parts]
        if all(one is None for one in found):
            return None
        return np.concatenate(
            [
                np.zeros(len(part.outcomes), kind) if one is None else one
                for one, part in zip(found, parts, strict=True)
            ]
        )

    if not parts:
        return BatchResult.all(batch, Outcome.OK)
    return BatchResult(
        cast("OutcomeArray", np.concatenate([one.outcomes for one in parts])),
        np.concatenate([one.nbytes for one in parts]),
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
