"""Harming stored pages through their backend, where they lie in no file.

A process that can write to a store can read an object, remove it, and store other
bytes under its key: this does so with the plain hooks, so that it works on any
backend. Only what a backend keeps below its keys is out of reach.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import (
    AttachConfig,
    Backend,
    Batch,
    Dock,
    DType,
    Operation,
    Outcome,
    Part,
    Per,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)
from kvdock_transformers.demo.damage import Damage, Harm
from kvdock_transformers.demo.records import PoolRecord

_SURPLUS_BYTES = 64
_CALL_S = 30.0
_SOON_S = 2.0

Target = tuple[str, int, Harm]


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
    memory: npt.NDArray[np.uint8]

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
