"""Plans for positional I/O: which objects share a system call, and a thread."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.batch import MemoryGate
    from kvdock.segments.io import IORequest, IOResult

GRANULE = 512 << 10  # bytes between two checks of the deadline; half an L2 cache
MOST_BUFFERS = 1024  # IOV_MAX of Linux
_TASK = 1 << 20  # bytes that a helper takes at once
_SMALL = 128 << 10  # bytes of objects that are written by one thread
_FEW = 256  # objects that are planned one by one

Tasks = list[tuple[int, int]]
"""The first run of each task, and the one behind its last."""


@attrs.frozen(eq=False)
class IOPlan:
    """A request sorted by file and offset, as lists for the inner loop."""

    write: bool
    order: Int64Array
    files: list[int]
    offsets: list[int]
    addresses: list[list[int]]
    sizes: list[list[int]]
    pieces: int
    totals: Int64Array
    runs: list[int]  # first object of each run, and the number of objects
    deadline_s: float
    gate: MemoryGate | None
    expected: list[int] | None
    result: IOResult

    def abandoned(self) -> bool:
        """Return whether the memory has another use by now."""
        return self.gate is not None and self.gate.closed

    def enter(self) -> bool:
        """Begin to touch host memory; False if that is too late."""
        return self.gate is None or self.gate.enter()

    def leave(self) -> None:
        """End what `enter` began."""
        if self.gate is not None:
            self.gate.leave()

    def pieces_of(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return host address and bytes of each piece of some objects."""
        rows = zip(self.addresses[start:stop], self.sizes[start:stop], strict=True)
        for addresses, sizes in rows:
            for at, size in zip(addresses, sizes, strict=True):
                if size:
                    yield at, size


def plan_request(request: IORequest, result: IOResult) -> tuple[IOPlan, Tasks]:
    """Sort objects by offset, join adjacent ones into runs, runs into tasks."""
    plan, tasks = plan_rows(request, result) or plan_arrays(request, result)
    if len(tasks) > 1 and _alone(request):
        tasks = [(0, tasks[-1][1])]
    return plan, tasks


def plan_rows(request: IORequest, result: IOResult) -> tuple[IOPlan, Tasks] | None:
    """Plan a request of equal objects in one file, in lists: as `plan_arrays` does.

    Arrays pay from some 300 objects on; a usual batch has 1 to 128.

    Returns:
        None for another request.
    """
    sizes, count = request.sizes, len(request)
    if len(request.files) != 1 or count > _FEW or (count > 1 and sizes.strides[0]):
        return None
    row = sizes[0].tolist()
    size = sum(row)
    if not 0 < size <= GRANULE:
        return None
    offsets = request.offsets.tolist()
    addresses = request.addresses.tolist()
    order = np.arange(count)
    if sorted(offsets) != offsets:
        which = sorted(range(count), key=offsets.__getitem__)
        offsets = [offsets[at] for at in which]
        addresses = [addresses[at] for at in which]
        order = np.array(which)
    # Runs never cross a granule, nor tasks a megabyte: see `plan_arrays`.
    most = max(1, MOST_BUFFERS // len(row))
    starts: list[int] = []
    edges = [0]
    following = granule = task = -1
    for at, offset in enumerate(offsets):
        begun = at * size
        if offset != following or begun // GRANULE != granule or not at % most:
            granule = begun // GRANULE
            if begun // _TASK != task:
                task = begun // _TASK
                if at:
                    edges.append(len(starts))
            starts.append(at)
        following = offset + size
    edges.append(len(starts))
    expected = request.expected
    plan = IOPlan(
        write=request.write,
        order=order,
        files=[request.files[0]] * count,
        offsets=offsets,
        addresses=addresses,
        sizes=[row] * count,
        pieces=len(row),
        totals=np.full(count, size),
        runs=[*starts, count],
        deadline_s=request.deadline_s,
        gate=request.gate,
        expected=None if expected is None else expected[order].tolist(),
        result=result,
    )
    return plan, list(pairwise(edges))


def plan_arrays(request: IORequest, result: IOResult) -> tuple[IOPlan, Tasks]:
    """Sort objects by offset, join adjacent ones into runs, runs into tasks."""
    count = len(request)
    sizes = request.sizes
    if sizes.strides[0] == 0:
        totals = np.full(count, sizes[0].sum())  # one repeated row
    else:
        totals = sizes.sum(axis=1)
    files, offsets = request.file_of, request.offsets
    one_file = len(request.files) == 1
    order = np.argsort(offsets) if one_file else np.lexsort((offsets, files))
    files, offsets, ordered = files[order], offsets[order], totals[order]
    before = np.cumsum(ordered) - ordered
    granule = before // GRANULE
    cut = np.ones(count, np.bool_)
    inner = cut[1:]
    np.not_equal(offsets[1:], (offsets + ordered)[:-1], out=inner)
    inner |= granule[1:] != granule[:-1]
    if not one_file:
        inner |= files[1:] != files[:-1]
    if ordered.max() > GRANULE:
        # An object of several granules does not share a call with others.
        inner |= (ordered[1:] > GRANULE) | (ordered[:-1] > GRANULE)
    most = max(1, MOST_BUFFERS // max(1, sizes.shape[1]))
    cut[::most] = True
    starts = np.flatnonzero(cut)
    task = before[starts] // _TASK
    edges = [0, *(np.flatnonzero(task[1:] != task[:-1]) + 1).tolist(), len(starts)]
    handles = np.asarray(request.files, np.int64)
    expected = request.expected
    plan = IOPlan(
        write=request.write,
        order=order,
        files=handles[files].tolist(),
        offsets=offsets.tolist(),
        addresses=request.addresses[order].tolist(),
        sizes=request.sizes[order].tolist(),
        pieces=sizes.shape[1],
        totals=ordered,
        runs=[*starts.tolist(), len(order)],
        deadline_s=request.deadline_s,
        gate=request.gate,
        expected=None if expected is None else expected[order].tolist(),
        result=result,
    )
    return plan, list(pairwise(edges))


def _alone(request: IORequest) -> bool:
    """Return whether objects are written by the calling thread alone.

    Writes to one file follow each other in the kernel. Pages of 64K, put by two
    threads, took 2.9 ms where one took 2.2.
    """
    sizes = request.sizes
    if not request.write or not sizes.size or sizes.strides[0]:
        return False
    return int(sizes[0].sum()) <= _SMALL
