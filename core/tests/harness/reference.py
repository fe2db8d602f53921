"""A correct and slow backend.

It is what the contract looks like in code: the kit passes on it, and the
mutants are copies of it with one thing wrong. Two kinds of shelf: a dict of
this process, and a folder that outlives it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from unittest.mock import patch

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.capacity import Capacity
from kvdock.config.fields import option, size
from kvdock.config.tenants import NO_TENANT
from kvdock.errors import KvdockError
from kvdock.keys import key_suffixes
from kvdock.plugin.hookspecs import AttachConfig, Finding, hookimpl
from kvdock.plugin.manifest import API_VERSION, KindSupport, Manifest, Scope, Support
from kvdock.plugin.store import MEMBERS
from kvdock.testing.oracles import Fails, Oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.arrays import Int64Array
    from kvdock.geometry.region import Block, Region
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec

CHECK_BYTES = 32
"""What a shelf keeps before the bytes: a digest of key and bytes."""


class Shelf(Protocol):
    """Where blobs lie under names."""

    def read(self, key: str) -> bytes | None:
        """Return a blob, or None."""

    def write(self, key: str, blob: bytes) -> None:
        """Keep a blob, visible whole or not at all."""

    def remove(self, key: str) -> None:
        """Forget a blob, if it is there."""

    def names(self) -> Sequence[str]:
        """Return all names, oldest first."""

    def used(self) -> int:
        """Return the bytes that all blobs take."""


@attrs.define(eq=False)
class DictShelf:
    """Blobs in this process."""

    blobs: dict[str, bytes] = attrs.field(factory=dict)

    def read(self, key: str) -> bytes | None:
        return self.blobs.get(key)

    def write(self, key: str, blob: bytes) -> None:
        self.blobs[key] = blob

    def remove(self, key: str) -> None:
        """Forget a blob, if it is there."""
        self.blobs.pop(key, None)

    def names(self) -> list[str]:
        """Return all names, oldest first."""
        return list(self.blobs)

    def used(self) -> int:
        """Return the bytes that all blobs take."""
        return sum(map(len, list(self.blobs.values())))


@attrs.frozen(eq=False)
class FolderShelf:
    """Blobs as files, each with a second file that holds its key."""

    root: Path

    def path(self, key: str) -> Path:
        """Return the file of a key; keys never become a path themselves."""
        head, _, tail = key.partition("/")
        name = hashlib.sha256(tail.encode()).hexdigest()
        return self.root / hashlib.sha256(head.encode()).hexdigest() / name

    def read(self, key: str) -> bytes | None:
        try:
            fd = os.open(self.path(key), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return self.load(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def load(self, fd: int, nbytes: int) -> bytes:
        """Read a file in one call."""
        return os.pread(fd, nbytes, 0)

    def write(self, key: str, blob: bytes) -> None:
        """Keep a blob: written aside, then renamed."""
        path = self.path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.begin_write("index", path.name)
        self._replace(path.with_suffix(".key"), key.encode())
        self.begin_write("data", path.name)
        self._replace(path, blob)

    def begin_write(self, part: str, place: str) -> None:
        """Do nothing; an oracle lets it raise, as a disk that fails would."""

    def _replace(self, path: Path, blob: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.root, delete=False) as file:
            os.pwrite(file.fileno(), blob, 0)
        Path(file.name).rename(path)

    def remove(self, key: str) -> None:
        """Forget a blob, if it is there."""
        self.path(key).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [
            path.read_text()
            for path in sorted(self.root.glob("*/*.key"))
            if path.with_suffix("").exists()
        ]

    def used(self) -> int:
        """Return the bytes that all blobs take."""
        return sum(
            path.stat().st_size for path in self.root.glob("*/*") if not path.suffix
        )


@attrs.frozen
class ReferenceSettings:
    """Where the reference backend keeps pages."""

    root: Path | None = option(
        None, help="Folder to keep pages in; none for memory.", place=True
    )
    store: str = option("", help="Which of this process's stores to use.")
    quota_bytes: int = size(0, help="Most bytes to keep; 0 for no limit.")


@attrs.define(eq=False)
class Handle:
    """The store of one attached pool; its plugin has a method for each member."""

    plugin: MemoryReference
    shelf: Shelf
    blocks: tuple[Block, ...]
    quota_bytes: int
    tracked: dict[str, None] = attrs.field(factory=dict)
    """Keys that it has stored, oldest first, once it was asked what is gone."""
    track_limit: int = 0
    times: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """By key: until when it is kept, and when it expires."""
    max_age_s: float = 0.0
    erase_within_s: float = 60.0
    quotas: dict[int, int] = attrs.field(factory=dict)
    """Bytes, by the number of a tenant."""
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch."""
        return self.plugin.run(self, batch)

    def close(self) -> None:
        """Release the pool."""
        self.plugin.close(self)

    def __getattr__(self, member: str) -> Any:
        """Return what the plugin does for an optional member that it declares."""
        if member in MEMBERS and getattr(self.plugin.declared, member):
            return partial(getattr(self.plugin, member), self)
        raise AttributeError(member)


def sealed(key: str, data: bytes) -> bytes:
    """Put a digest of key and bytes before the bytes."""
    return hashlib.blake2b(key.encode() + data, digest_size=CHECK_BYTES).digest() + data


class MemoryReference:
    """The reference backend over a dict of this process."""

    name = "reference"
    handle: ClassVar[type[Handle]] = Handle
    durability = Scope.NONE
    sharing = Scope.PROCESS
    eviction = Support.NATIVE
    retention = Support.NATIVE

    def __init__(self) -> None:
        self.shelves: dict[str, Shelf] = {}
        self.times: dict[str, dict[str, tuple[int, int]]] = {}
        self.latest_s = 0.0
        self.born_s: dict[str, float] = {}
        self.tenants: dict[str, int] = {}
        """By key."""

    @cached_property
    def declared(self) -> Manifest:
        """What it declares, made once."""
        return self.manifest()

    def manifest(self) -> Manifest:
        """Declare everything but memory registration."""
        return Manifest(
            name=self.name,
            api=API_VERSION,
            summary="everything right, nothing fast",
            kinds=KindSupport.of_every_kind(),
            zero_copy=Support.NATIVE,
            memory_registration=Support.NATIVE,
            host_allocator=Support.NO,
            gated_get=Support.NATIVE,
            gated_put=Support.NATIVE,
            peers=Support.NO,
            integrity=Support.NATIVE,
            eviction=self.eviction,
            touch=self.eviction,
            removed=Support.NATIVE,
            capacity=Support.NATIVE,
            retention=self.retention,
            tenant_quotas=self.eviction,
            durability=self.durability,
            sharing=self.sharing,
            clear_reach=Scope.NAMESPACE,
            max_object_bytes=1 << 20,
            max_batch_keys=512,
            max_key_bytes=512,
            fork_safe=Support.NATIVE,
            settings=ReferenceSettings,
        )

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        """Hand out the declaration."""
        return self.manifest()

    @hookimpl
    def kvdock_probe(self, config: AttachConfig) -> list[Finding]:
        """Find that nothing is needed."""
        del config
        return [Finding(ok=True, what="needs nothing but Python")]

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Handle:
        """Open the shelf and remember which memory may be touched."""
        del pool
        return self.handle(
            self,
            self.open_shelf(config.settings),
            region.blocks,
            config.settings.quota_bytes,
            times=self.open_times(config.settings),
            max_age_s=config.max_age_s,
            erase_within_s=config.erase_within_s,
            quotas={
                config.tenants.number(name): room.quota
                for name, room in config.tenants.rooms.items()
            },
        )

    def open_times(self, settings: ReferenceSettings) -> dict[str, tuple[int, int]]:
        """Return the times of what lies on the shelf of that name."""
        return self.times.setdefault(settings.store, {})

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        return self.shelves.setdefault(settings.store, DictShelf())

    @hookimpl
    def kvdock_key_suffix(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        """Spell what an object holds, as the core does."""
        return self.suffixes(pool, shard)

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        """Return the suffixes; a seam for mutants, which pluggy cannot see."""
        return key_suffixes(pool, shard)

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        self.erase(handle)
        outcomes = np.full(len(batch), Outcome.TIMEOUT, np.uint8)
        kept = np.zeros(len(batch), np.bool_)
        for row in range(len(batch)):
            if time.monotonic() < batch.deadline_s:
                outcomes[row] = self.step(handle, batch, row)
                if batch.operation is Operation.PUT and outcomes[row] == Outcome.OK:
                    kept[row] = self.retain(handle, batch, row) is Outcome.OK
        result = BatchResult.of(batch, outcomes)
        native = self.retention is Support.NATIVE
        if native and batch.operation is Operation.GET:
            return attrs.evolve(result, expire_at=self.told(handle, batch))
        asks = batch.expire_at is None and not batch.keep_until
        if native and batch.operation is Operation.RETAIN and asks:
            return self.all_told(handle, batch, result)
        return (
            attrs.evolve(result, kept=kept) if batch.keep_until and native else result
        )

    def told(self, handle: Handle, batch: Batch) -> Int64Array | None:
        """Return when the keys of a load expire."""
        return np.array([handle.times.get(key, (0, 0))[1] for key in batch.keys])

    def all_told(
        self, handle: Handle, batch: Batch, result: BatchResult
    ) -> BatchResult:
        """Add what times keys have to the answer of one who asks."""
        times = np.array([handle.times.get(key, (0, 0)) for key in batch.keys])
        return attrs.evolve(
            result, kept=times[:, 0] > int(self.clock()), expire_at=times[:, 1]
        )

    def erase(self, handle: Handle) -> None:
        """Forget the objects whose time has been over for so long."""
        for key in list(handle.times):
            end = self.end_of(handle, key)
            if 0 < end <= self.clock() - handle.erase_within_s:
                handle.shelf.remove(key)

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        key = batch.keys[row]
        if len(key.encode()) > self.declared.max_key_bytes:
            return Outcome.REFUSED
        match batch.operation:
            case Operation.EXISTS:
                return self.exists(handle, key)
            case Operation.DELETE:
                handle.shelf.remove(key)
                return Outcome.OK
            case Operation.CLEAR:
                return self.clear(handle, key)
            case Operation.RETAIN:
                return self.retain(handle, batch, row)
        return self.move(handle, batch, row)

    def retain(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        """Change the times of one stored key."""
        key = batch.keys[row]
        with handle.lock:
            if self.exists(handle, key) is not Outcome.OK:
                return Outcome.ABSENT
            until, end = handle.times.get(key, (0, 0))
            if batch.expire_at is not None:
                end = int(batch.expire_at[row]) or end
            fits = batch.keep_until <= until or self.promises(handle, key)
            if fits:
                until = max(until, batch.keep_until)
            handle.times[key] = min(until, end) if end else until, end
        return Outcome.OK if fits else Outcome.REFUSED

    def promises(self, handle: Handle, key: str) -> bool:
        """Return whether half of the store has room for one more promise."""
        blobs = [handle.shelf.read(one) or b"" for one in self.promised(handle) | {key}]
        return not handle.quota_bytes or 2 * sum(map(len, blobs)) <= handle.quota_bytes

    def promised(self, handle: Handle) -> set[str]:
        """Return the keys that may not be evicted now."""
        now = int(self.clock())
        return {key for key, (until, _) in handle.times.items() if until > now}

    def clock(self) -> float:
        """Return the time, which never goes back: what has expired stays so."""
        self.latest_s = max(self.latest_s, time.time())
        return self.latest_s

    def expired(self, handle: Handle, key: str) -> bool:
        """Return whether a key's time is over."""
        return 0 < self.end_of(handle, key) <= int(self.clock())

    def end_of(self, handle: Handle, key: str) -> float:
        """Return when a key's time is over; 0 for never."""
        end = handle.times.get(key, (0, 0))[1]
        if end or not handle.max_age_s:
            return end
        return self.born_s.get(key, 0.0) + handle.max_age_s

    def move(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        """Move the bytes of one key."""
        key = batch.keys[row]
        if not self.registered(handle, batch, row):
            return Outcome.REFUSED
        if batch.operation is Operation.PUT:
            self.tenants[key] = batch.tenant
            data = self.taken(batch, row)
            return Outcome.TIMEOUT if data is None else self.put(handle, key, data)
        outcome, data = self.get(handle, key, int(batch.object_bytes[row]))
        return self.landed(batch, row, data) if outcome is Outcome.OK else outcome

    def taken(self, batch: Batch, row: int) -> bytes | None:
        """Copy one key's memory; a seam for mutants."""
        return batch.take(row)

    def landed(self, batch: Batch, row: int, data: bytes) -> Outcome:
        """Fill one key's memory; a seam for mutants."""
        return batch.land(row, data)

    def registered(self, handle: Handle, batch: Batch, row: int) -> bool:
        """Return whether a key's memory lies in what was registered."""
        return all(
            any(
                block.address <= at and at + nbytes <= block.address + block.nbytes
                for block in handle.blocks
            )
            for at, nbytes in zip(
                batch.addresses[row].tolist(), batch.sizes[row].tolist(), strict=True
            )
            if nbytes
        )

    def exists(self, handle: Handle, key: str) -> Outcome:
        """Say whether a key could be read now."""
        there = handle.shelf.read(key) is not None and not self.expired(handle, key)
        return Outcome.OK if there else Outcome.ABSENT

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        """Keep an object, if it is new and there is room."""
        limit = self.declared.max_object_bytes
        if 0 < limit < len(data):
            return Outcome.REFUSED
        with handle.lock:
            if self.get(handle, key, len(data))[0] is Outcome.OK:
                return Outcome.OK
            handle.times.pop(key, None)
            self.born_s[key] = self.clock()
            blob = sealed(key, data)
            if not self.room(handle, len(blob)):
                return Outcome.REFUSED
            try:
                handle.shelf.write(key, blob)
            except OSError:
                return Outcome.ERROR
            self.track(handle, key)
        return Outcome.OK

    def track(self, handle: Handle, key: str) -> None:
        """Keep track of a stored key, if that was asked for."""
        handle.tracked.pop(key, None)
        handle.tracked[key] = None
        while len(handle.tracked) > handle.track_limit:
            del handle.tracked[next(iter(handle.tracked))]

    def room(self, handle: Handle, nbytes: int) -> bool:
        """Return whether there is room, after making some if declared."""
        quota = handle.quota_bytes
        if not quota:
            return True
        while handle.shelf.used() + nbytes > quota:
            staying = self.promised(handle) | self.within_quotas(handle)
            keys = [key for key in handle.shelf.names() if key not in staying]
            if not self.eviction or not keys:
                return False
            handle.shelf.remove(keys[0])
        return True

    def within_quotas(self, handle: Handle) -> set[str]:
        """Return the keys of tenants that are not above their quotas."""
        keys: dict[int, list[str]] = {number: [] for number in handle.quotas}
        for key in handle.shelf.names() if keys else ():
            keys.get(self.tenants.get(key, NO_TENANT), []).append(key)
        return {
            key
            for number, mine in keys.items()
            if sum(len(handle.shelf.read(key) or b"") for key in mine)
            <= handle.quotas[number]
            for key in mine
        }

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        """Return an object, if it is there and right; drop it if it is not."""
        blob = handle.shelf.read(key)
        if blob is None or self.expired(handle, key):
            return Outcome.ABSENT, b""
        data = blob[CHECK_BYTES:]
        if blob != sealed(key, data):
            handle.shelf.remove(key)
            return Outcome.CORRUPT, b""
        if len(data) != nbytes:
            return Outcome.SHORT if len(data) < nbytes else Outcome.LONG, b""
        return Outcome.OK, data

    def clear(self, handle: Handle, prefix: str) -> Outcome:
        """Forget every key that begins with a prefix."""
        for key in handle.shelf.names():
            if key.startswith(prefix):
                handle.shelf.remove(key)
        return Outcome.OK

    def touch(self, handle: Handle, keys: Sequence[str]) -> None:
        """Make objects the newest ones, so that others are evicted before them."""
        with handle.lock:
            for key in keys if self.eviction else ():
                blob = handle.shelf.read(key)
                if blob is not None:
                    handle.shelf.remove(key)
                    handle.shelf.write(key, blob)

    def removed(self, handle: Handle, limit: int) -> Sequence[str]:
        """Return stored keys that are gone, each once."""
        with handle.lock:
            handle.track_limit = limit
            gone = [key for key in handle.tracked if handle.shelf.read(key) is None]
            for key in gone:
                del handle.tracked[key]
        return gone

    def capacity(self, handle: Handle) -> Capacity:
        """Count what all pools of the store take."""
        return Capacity(handle.shelf.used(), handle.quota_bytes)

    def close(self, handle: Handle) -> None:
        """Release a pool."""
        handle.blocks = ()


class HookReference(MemoryReference):
    """The reference backend with hooks in place of what the core would answer."""

    name = "reference_hooks"

    @hookimpl
    def kvdock_batch_io(self, store: Handle, batch: Batch) -> BatchResult:
        """Do one batch."""
        return self.run(store, batch)


class FolderReference(MemoryReference):
    """The reference backend over a folder that other processes see."""

    name = "reference_folder"
    durability = Scope.HOST
    sharing = Scope.HOST
    eviction = Support.NO
    retention = Support.EMULATED
    folder: ClassVar[Any] = FolderShelf
    """What keeps blobs in its folder."""

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        """Open the folder.

        Raises:
            KvdockError: If no folder is given.
        """
        if settings.root is None:
            raise KvdockError("setting 'root' is missing", fix="Give it a folder.")
        settings.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        shelf: Shelf = self.folder(settings.root)
        return shelf


class ShelfOracle(Oracle):
    """Peeks and pokes into a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def peek(self, key: str) -> bytes | None:
        blob = self.shelf.read(key)
        return None if blob is None else blob[CHECK_BYTES:]

    def poke(self, key: str, offset: int, data: bytes) -> None:
        """Overwrite bytes in place."""
        blob = bytearray(self.shelf.read(key) or b"")
        at = CHECK_BYTES + offset
        blob[at : at + len(data)] = data
        self.shelf.write(key, bytes(blob))

    def resize(self, key: str, nbytes: int) -> None:
        """Cut or extend an object."""
        blob = self.shelf.read(key) or b""
        self.shelf.write(key, blob[: CHECK_BYTES + nbytes].ljust(CHECK_BYTES + nbytes))

    def swap(self, key: str, other: str) -> None:
        """Let two blobs change places."""
        one, two = self.shelf.read(key) or b"", self.shelf.read(other) or b""
        self.shelf.write(key, two)
        self.shelf.write(other, one)

    def remove(self, key: str) -> None:
        """Take an object away."""
        self.shelf.remove(key)

    @contextmanager
    def failing(self, store: object, part: str, fails: Fails) -> Iterator[None]:
        """Let writes into folders fail."""
        del store
        usual = FolderShelf.begin_write

        def begin(shelf: FolderShelf, which: str, place: str) -> None:
            usual(shelf, which, place)
            if which == part and fails(place):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with patch.object(FolderShelf, "begin_write", begin):
            yield


def __getattr__(name: str) -> MemoryReference:
    """Make a fresh plugin: `reference:memory`, `:hooks` or `:folder`."""
    match name:
        case "memory":
            return MemoryReference()
        case "hooks":
            return HookReference()
        case "folder":
            return FolderReference()
    raise AttributeError(name)
