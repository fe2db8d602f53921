"""Harming stored pages, without knowing how a backend lays them out.

The distribution of a backend may bring an oracle, which changes stored bytes behind
the backend's back. What has none is harmed by the backend's own hooks: a process that
can write to a store can read an object, remove it, and store other bytes under its
key. Only what a backend keeps below its keys is out of reach then.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

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
from kvdock.arrays import ByteArray
from kvdock.pools import Part, Per
from kvdock.testing import Oracle, oracle_of
from model_demo.backends import completed
from model_demo.records import Job, Served


class Harm(StrEnum):
    """Kinds of damage to the first object of a page."""

    FLIP = "flip"
    """One bit in the middle changes."""

    TRUNCATE = "truncate"
    """The second half is gone."""

    DELETE = "delete"
    """All of it is gone."""


Target = tuple[str, int, Harm]
"""A pool, a page of it, and what is done to it."""

_KV_HARMS = ((0.97, Harm.DELETE), (0.92, Harm.TRUNCATE), (0.78, Harm.FLIP))
"""Where in the prefix the target's attention pages are harmed, and how."""

_CALL_S = 30.0
_SOON_S = 2.0
_BIT = 0x40


def damage_store(job: Job, served: Served) -> tuple[Target, ...]:
    """Harm stored pages of every pool: three ways for the anchor, one for others.

    Args:
        job: Where the store is.
        served: The run that stored the pages.

    Returns:
        What was harmed, and how.
    """
    pages = served.prefix_pages
    targets: list[Target] = []
    for name, record in served.pools.items():
        if record.backend != job.backend:
            continue
        if record.draft:
            aimed: list[Target] = [(name, pages // 2, Harm.FLIP)]
        elif record.window_pages:
            before = [page for page in record.stored if page < pages * 3 // 4]
            aimed = [(name, max(before, default=-1), Harm.DELETE)]
        else:
            aimed = [(name, int(pages * share), harm) for share, harm in _KV_HARMS]
        targets += [target for target in aimed if target[1] in record.stored]
    if not targets:
        return ()
    dock = Dock.load(require=(job.backend,))
    store = job.directory / "store" / served.family
    settings = completed(dock, [job.backend], store, job.given)[job.backend]
    longest = max(served.pools[name].object_bytes for name, _, _ in targets)
    done = []
    with _harming(dock, job.backend, settings, longest) as do:
        for name, page, harm in targets:
            record = served.pools[name]
            key = record.keys[record.stored.index(page)]
            if do(key, record.object_bytes, harm):
                done.append((name, page, harm))
    return tuple(done)


@contextmanager
def _harming(
    dock: Dock, name: str, settings: Mapping[str, object], nbytes: int
) -> Iterator[Callable[[str, int, Harm], bool]]:
    """Yield what harms an object of a backend; it returns whether it was there."""
    backend = dock.backends[name]
    oracle = oracle_of(backend, settings)
    if oracle:
        yield lambda key, _, harm: harm_behind(oracle, key, harm)
        return
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
            yield Hand(backend, handle, memory).harm
        finally:
            handle.close()
    finally:
        lent.give_back()


def harm_behind(oracle: Oracle, key: str, harm: Harm) -> bool:
    """Harm an object in the store itself; return whether that could be done."""
    try:
        data = oracle.peek(key)
        if data is None:
            return False
        middle = len(data) // 2
        match harm:
            case Harm.FLIP:
                oracle.poke(key, middle, bytes([data[middle] ^ _BIT]))
            case Harm.TRUNCATE:
                oracle.resize(key, middle)
            case Harm.DELETE:
                oracle.remove(key)
    except NotImplementedError:
        return False
    return True


@attrs.frozen(eq=False)
class Hand:
    """Memory attached to a backend, to read and write single objects.

    Args:
        backend: Who keeps the objects.
        handle: What it gave for the memory.
        memory: uint8 (n,), as long as the longest object.
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
        if harm is Harm.DELETE:
            return True
        if harm is Harm.FLIP:
            self.memory[nbytes // 2] ^= _BIT
        else:
            nbytes //= 2
        return self.call(Operation.PUT, key, nbytes)
