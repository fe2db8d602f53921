"""Harming stored pages, without knowing how a backend lays them out.

On disk, a page is found by its first and last bytes, wherever they lie below a
directory. So this works on any backend that keeps pages as plain bytes in files, one
file per page or many pages in one, and needs no help from it.

What lies in no file is harmed by the backend's own hooks: a process that can write to
a store can read an object, remove it, and store other bytes under its key. Only what a
backend keeps below its keys is out of reach.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import cast

import attrs
import numpy as np

from kvdock import (
    AttachConfig,
    Backend,
    Batch,
    Dock,
    DType,
    Operation,
    Outcome,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.arrays import ByteArray, UInt64Array
from kvdock.pools import Part, Per
from kvdock_transformers.demo.records import Job, PoolRecord, Served


class Harm(StrEnum):
    """Kinds of damage to a page's bytes, or to the file that holds them."""

    FLIP = "flip"
    """One bit in the middle of the page changes."""

    TRUNCATE = "truncate"
    """The file ends in the middle of the page."""

    DELETE = "delete"
    """The page is gone: its file, or its bytes where the file holds others."""

    EXTEND = "extend"
    """The file has bytes behind its end."""


Target = tuple[str, int, Harm]
"""A pool, a page of it, and what is done to it."""

_KV_HARMS = (
    (0.97, Harm.DELETE),
    (0.92, Harm.TRUNCATE),
    (0.86, Harm.EXTEND),
    (0.78, Harm.FLIP),
)
"""Where in the prefix the target's attention pages are harmed, and how."""

_SURPLUS_BYTES = 64
_CALL_S = 30.0
_SOON_S = 2.0
_KEY_BYTES = 8
_TABLE_BITS = 18
_ORDER = (Harm.FLIP, Harm.DELETE, Harm.TRUNCATE, Harm.EXTEND)


@attrs.frozen
class Place:
    """The place of a page: a byte range in a file."""

    path: Path
    start: int
    stop: int

    @property
    def middle(self) -> int:
        """A byte of the page far from its ends."""
        return (self.start + self.stop) // 2


@attrs.frozen
class Damage:
    """The damage that was done to a store.

    Args:
        done: (pool, page, harm) of each page that was aimed at.
        lost: (pool, page) of all pages that cannot be whole any more.
        doubtful: (pool, page) of the last page of an extended file: a backend
            may give it up or distinguish the surplus.
    """

    done: tuple[Target, ...]
    lost: frozenset[tuple[str, int]]
    doubtful: frozenset[tuple[str, int]]

    def joined(self, other: "Damage") -> "Damage":
        """Return both as one."""
        lost = self.lost | other.lost
        doubtful = (self.doubtful | other.doubtful) - lost
        return Damage(self.done + other.done, lost, doubtful)


NO_DAMAGE = Damage((), frozenset(), frozenset())


def damage_store(job: Job, served: Served) -> Damage:
    """Harm stored pages of every pool: four ways for the anchor, one for others.

    In the files of the store, and what lies in no file through the hooks of
    the backend that keeps it.

    Args:
        job: Where the store is.
        served: The run that stored the pages.
    """
    pages = served.prefix_pages
    targets: list[Target] = []
    for name, record in served.pools.items():
        if record.draft:
            targets.append((name, pages // 2, Harm.FLIP))
        elif record.window_pages:
            before = [page for page in record.stored if page < pages * 3 // 4]
            targets.append((name, max(before, default=-1), Harm.DELETE))
        else:
            targets += [(name, int(pages * share), harm) for share, harm in _KV_HARMS]
    known = [one for one in targets if one[1] in served.pools[one[0]].stored]
    damage, rest = NO_DAMAGE, known
    for folder in _store_folders(job, served):
        damage = damage.joined(inflict(folder, served.pools, rest))
        rest = [target for target in known if target not in damage.done]
    return damage.joined(tamper(served.pools, rest, job.given)) if rest else damage


def _store_folders(job: Job, served: Served) -> tuple[Path, ...]:
    """Return where a run's pages lie: the trial's own folder, or one of a server.

    A backend that brings a server, such as a mount, may say where its root is. There
    lie the pages of other runs too, altered ones among them, which are the same but
    for one pool: only folders that have the name of this run's namespace are taken.
    """
    dock = Dock.load(require=(job.backend,))
    given = job.settings.get(dock.backends[job.backend].manifest.path_setting)
    names = sorted(
        {
            key.partition("/")[0]
            for record in served.pools.values()
            for key in record.keys
        }
    )
    roots = [Path(str(given))] if given else []
    found = [
        one for name in sorted(names) for root in roots for one in root.rglob(name)
    ]
    return (job.directory / "store" / served.family, *found)


def inflict(
    directory: Path,
    pools: Mapping[str, PoolRecord],
    targets: Sequence[Target],
) -> Damage:
    """Damage pages; return which pages that costs.

    Args:
        directory: Where the store lies.
        pools: All pages that were stored.
        targets: (pool, page, harm), each page at most once.
    """
    # All places are looked up before the first byte changes.
    inhabitants = _inhabitants(directory, pools)
    homes = {who: place for housed in inhabitants.values() for who, place in housed}
    aimed = [
        (pool, page, harm, homes[pool, page])
        for pool, page, harm in targets
        if (pool, page) in homes
    ]
    lost: set[tuple[str, int]] = set()
    doubtful: set[tuple[str, int]] = set()
    # What keeps a file's length comes first, or a place might lie behind its end.
    for pool, page, harm, place in sorted(aimed, key=lambda aim: _ORDER.index(aim[2])):
        housed = inhabitants[place.path]
        match harm:
            case Harm.FLIP:
                _flip(place)
                lost.add((pool, page))
            case Harm.DELETE:
                _delete(place, alone=len(housed) == 1)
                lost.add((pool, page))
            case Harm.TRUNCATE:
                os.truncate(place.path, place.middle)
                lost |= {who for who, at in housed if at.stop > place.middle}
            case Harm.EXTEND:
                with place.path.open("ab") as file:
                    file.write(b"surplus bytes behind the end")
                doubtful.add(max(housed, key=lambda house: house[1].stop)[0])
    done = tuple((pool, page, harm) for pool, page, harm, _ in aimed)
    return Damage(done, frozenset(lost), frozenset(doubtful - lost))


def _inhabitants(
    directory: Path, pools: Mapping[str, PoolRecord]
) -> dict[Path, list[tuple[tuple[str, int], Place]]]:
    """Find out which pages each file below a directory holds."""
    ends = {
        (pool, page): (bytes.fromhex(head), bytes.fromhex(tail))
        for pool, record in pools.items()
        for page, (head, tail) in zip(record.stored, record.ends, strict=True)
    }
    heads: dict[bytes, list[tuple[str, int]]] = {}
    for who, (head, _) in ends.items():
        heads.setdefault(head[:_KEY_BYTES], []).append(who)
    found: dict[Path, list[tuple[tuple[str, int], Place]]] = {}
    for path in sorted(directory.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        for start in _occurrences(content, list(heads)):
            for who in heads[content[start : start + _KEY_BYTES]]:
                head, tail = ends[who]
                stop = start + pools[who[0]].page_bytes
                whole = content.startswith(head, start) and (
                    content[stop - len(tail) : stop] == tail
                )
                if whole:
                    place = Place(path, start, stop)
                    found.setdefault(path, []).append((who, place))
    return found


def _occurrences(content: bytes, keys: Sequence[bytes]) -> list[int]:
    """Find all of many keys in one pass over a file's content.

    One search per key would read the file once for each of hundreds of pages.
    A table of hashed keys lets almost nothing through that is not one, so a
    file of 32 MiB takes a quarter of a second.

    Args:
        content: What to search.
        keys: Of `_KEY_BYTES` bytes each.

    Returns:
        Offsets at which a key begins, ascending.
    """
    if not keys:
        return []
    wanted = np.frombuffer(b"".join(keys), "<u8")
    table = np.zeros(1 << _TABLE_BITS, np.bool_)
    table[_hashed(wanted)] = True
    starts: list[int] = []
    for offset in range(_KEY_BYTES):
        count = max(0, len(content) - offset) // _KEY_BYTES
        words = np.frombuffer(content, "<u8", count, min(offset, len(content)))
        near = np.flatnonzero(table[_hashed(words)])
        exact = near[np.isin(words[near], wanted)]
        starts += (exact * _KEY_BYTES + offset).tolist()
    return sorted(starts)


def _hashed(words: UInt64Array) -> UInt64Array:
    mixed = words * np.uint64(0x9E3779B97F4A7C15)
    return cast("UInt64Array", mixed >> np.uint64(64 - _TABLE_BITS))


def _flip(place: Place) -> None:
    with place.path.open("r+b") as file:
        file.seek(place.middle)
        byte = file.read(1)[0]
        file.seek(place.middle)
        file.write(bytes([byte ^ 0x40]))


def _delete(place: Place, *, alone: bool) -> None:
    if alone:
        place.path.unlink()
        return
    with place.path.open("r+b") as file:
        file.seek(place.start)
        file.write(bytes(place.stop - place.start))


@attrs.frozen(eq=False)
class Hand:
    """Memory attached to a backend, to read and write single objects.

    Args:
        backend: Who keeps the objects.
        handle: What it gave for the memory.
        memory: uint8 (n,), as long as the longest object and some more.
    """

    backend: Backend
    handle: object
    memory: ByteArray

    def call(self, operation: Operation, key: str, nbytes: int = 0) -> bool:
        """Do one thing to one object; return whether it was done."""
        until = time.monotonic() + _CALL_S
        if operation in (Operation.DELETE, Operation.EXISTS):
            batch = Batch(operation, [key], deadline_s=until)
        else:
            place = np.array([[self.memory.ctypes.data]], np.int64)
            batch = Batch(operation, [key], place, np.array([[nbytes]]), until)
        result = self.backend.batch_io(self.handle, batch)
        return bool(result.outcomes[0] == Outcome.OK)

    def found(self, key: str) -> bool:
        """Look an object up; what others stored may be found a little later."""
        until = time.monotonic() + _SOON_S
        while not self.call(Operation.EXISTS, key):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def harm(self, key: str, nbytes: int, harm: Harm) -> bool:
        """Put something else in the place of an object, or nothing."""
        if not self.found(key):
            return False
        if harm is not Harm.DELETE and not self.call(Operation.GET, key, nbytes):
            return False
        if not self.call(Operation.DELETE, key):
            return False
        match harm:
            case Harm.DELETE:
                return True
            case Harm.FLIP:
                self.memory[nbytes // 2] ^= 0x40
            case Harm.TRUNCATE:
                nbytes //= 2
            case Harm.EXTEND:
                nbytes += _SURPLUS_BYTES
        return self.call(Operation.PUT, key, nbytes)


def tamper(
    pools: Mapping[str, PoolRecord],
    targets: Sequence[Target],
    given: Mapping[str, Mapping[str, object]],
) -> Damage:
    """Damage pages; return which pages that costs.

    Args:
        pools: All pages that were stored.
        targets: (pool, page, harm), each page at most once.
        given: Backend to its settings; others are left alone.
    """
    done: list[Target] = []
    for name, settings in given.items():
        own = [target for target in targets if pools[target[0]].backend == name]
        if not own:
            continue
        longest = max(pools[pool].object_bytes for pool, _, _ in own)
        with _attached(name, settings, longest + _SURPLUS_BYTES) as hand:
            for pool, page, harm in own:
                record = pools[pool]
                key = record.keys[record.stored.index(page)]
                if hand.harm(key, record.object_bytes, harm):
                    done.append((pool, page, harm))
    # A backend may distinguish surplus from the object that it was added to.
    doubtful = {(pool, page) for pool, page, harm in done if harm is Harm.EXTEND}
    lost = {(pool, page) for pool, page, _ in done} - doubtful
    return Damage(tuple(done), frozenset(lost), frozenset(doubtful))


@contextmanager
def _attached(name: str, settings: Mapping[str, object], nbytes: int) -> Iterator[Hand]:
    """Attach one page of memory to a backend."""
    dock = Dock.load(require=(name,))
    backend = dock.backends[name]
    lent = dock.allocate(name, nbytes, settings)
    memory = np.frombuffer(lent.buffer, np.uint8)
    pool = PoolSpec(
        name="tamper",
        kind=PoolKind.MLA,
        parts=(Part("kv", DType.U8, (nbytes,), per=Per.PAGE),),
        layers=(0,),
        page_tokens=1,
        anchor=True,
    )
    region = Region.of(pool, Shard(), (memory,), 1)
    config = AttachConfig(settings=backend.settings(settings), namespace="0" * 64)
    try:
        handle = backend.register_pool(pool, region, config)
        try:
            yield Hand(backend, handle, memory)
        finally:
            backend.release(handle)
    finally:
        lent.give_back()
