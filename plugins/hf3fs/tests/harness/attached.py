"""Pages of one pool, attached to the backend as an engine does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import (
    Attachment,
    Dock,
    DType,
    HostMemory,
    Namespace,
    Plan,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.pools import Part, Per

PAGE_BYTES = 16 << 10
BLANK = 7
OK = 0


@attrs.define(eq=False)
class Engine:
    """Memory of some pages, and what is right in it."""

    attachment: Attachment
    memory: npt.NDArray[np.uint8]
    loan: HostMemory | None = None

    def put(self, numbers: Sequence[int], at: Sequence[int] = ()) -> list[int]:
        """Store pages from slots of the memory; return their outcomes."""
        places = np.array(at or range(len(numbers)))
        for place, number in zip(places, numbers, strict=True):
            self.memory[place] = page(number)
        hashes = [spell(number) for number in numbers]
        found = self.attachment.put(hashes, {"kv": places}).outcomes["kv"]
        return [int(one) for one in found]

    def get(self, numbers: Sequence[int], at: Sequence[int] = ()) -> list[int]:
        """Load pages into blank memory; those that are OK must be right."""
        places = np.array(at or range(len(numbers)))
        self.memory[places] = BLANK
        hashes = [spell(number) for number in numbers]
        found = self.attachment.get(hashes, {"kv": places}).outcomes["kv"]
        for place, number, one in zip(places, numbers, found, strict=True):
            right = (self.memory[place] == page(number)).all()
            assert one != OK or right, f"wrong bytes of page {number}"
        return [int(one) for one in found]

    def there(self, numbers: Sequence[int]) -> int:
        """Return how many pages of a prefix are found."""
        return self.attachment.exists([spell(n) for n in numbers]).best

    @property
    def store(self) -> Any:
        return self.attachment.pools_by_name["kv"].handle


def spell(number: int) -> str:
    """Return the hash of a page."""
    return f"{number:064x}"


def page(number: int) -> npt.NDArray[np.uint8]:
    words = np.arange(PAGE_BYTES // 8, dtype=np.uint64) * np.uint64(2**61 + 9)
    return (words + np.uint64(number * 1009 + 1)).view(np.uint8)


def pool() -> PoolSpec:
    return PoolSpec(
        name="kv",
        kind="mla",
        parts=(Part("kv", DType.U8, (PAGE_BYTES,), per=Per.PAGE),),
        layers=(0,),
        page_tokens=1,
        anchor=True,
    )


def planned(given: dict[str, Any], *, lent: bool) -> tuple[Dock, Plan]:
    """Plan the pool for memory of the backend's allocator, or for other memory."""
    dock = Dock.load(require=("hf3fs",))
    needs = RouteRequirements(allocator="hf3fs" if lent else "")
    plan = dock.plan(
        [pool()], Shard(), ("hf3fs",), needs=needs, settings={"hf3fs": given}
    )
    return dock, plan


@contextmanager
def attached(
    given: dict[str, Any], pages: int = 64, *, lent: bool = True, core: Any = None
) -> Iterator[Engine]:
    """Attach memory of the backend's own, or of numpy's."""
    dock, plan = planned(given, lent=lent)
    loan = None
    memory = np.zeros((pages, PAGE_BYTES), np.uint8)
    if lent:
        loan = dock.allocate("hf3fs", pages * PAGE_BYTES, given)
        memory = np.asarray(loan.buffer).reshape(pages, PAGE_BYTES)
    attachment = Attachment.open(
        dock,
        plan,
        Namespace(model="tests"),
        {"kv": Region.of(pool(), Shard(), (memory,), pages)},
        {"hf3fs": given},
        core=core,
    )
    try:
        yield Engine(attachment, memory, loan)
    finally:
        attachment.close()
        if loan:
            loan.give_back()
