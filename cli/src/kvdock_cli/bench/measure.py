"""Time a backend as an engine sees it: keys, checks, deadlines and all."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock import (
    Namespace,
    Outcome,
    PoolKind,
    PoolSpec,
)
from kvdock.errors import KvdockError
from kvdock.pools import Part, Per
from kvdock_cli.rig import attached

if TYPE_CHECKING:
    from kvdock import Attachment, Backend, TransferResult

RUNS = 5
"""Batches that are timed for each figure where no option says another number."""


@attrs.frozen(kw_only=True)
class Figure:
    """The figures of one size of page and batch.

    Args:
        batch: Pages of a call.
        threads: Threads that call at once.
        put_s: Seconds of storing a batch in each thread, the median.
        raw_write_s: The same bytes to the raw disk or network; 0 if not known.
        spread_s: The shortest and the longest run of each operation.
    """

    page_bytes: int
    batch: int
    threads: int
    put_s: float
    get_s: float
    exists_s: float
    raw_write_s: float = 0.0
    raw_read_s: float = 0.0
    spread_s: Mapping[str, tuple[float, float]] = attrs.field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that all threads together move."""
        return self.page_bytes * self.batch * self.threads

    def pace(self, seconds: float) -> float:
        """Return bytes per second; 0 where nothing was measured."""
        return self.nbytes / seconds if seconds else 0.0


Raw = Callable[[int], tuple[float, float]]
"""Seconds of writing and of reading so many bytes without the backend."""


def measure(
    backend: Backend,
    settings: Mapping[str, object],
    page_bytes: int,
    batch: int,
    threads: int,
    raw: Raw,
    *,
    runs: int = RUNS,
) -> Figure:
    """Store, look up and load batches of pages; nothing of them is left."""
    pool = PoolSpec(
        name="bench",
        kind=PoolKind.MHA,
        parts=(Part("page", "u8", (1, page_bytes), per=Per.PAGE),),
        layers=(0,),
        page_tokens=1,
        anchor=True,
    )
    pages = batch * threads
    with attached(
        backend, settings, Namespace(model="kvdock bench"), [pool], pages, trial=True
    ) as (cache, memory):
        shape = memory["bench"].shape
        memory["bench"][:] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        times: dict[str, list[float]] = {"put": [], "get": [], "exists": []}
        for turn in range(runs + 1):
            names = [
                [
                    hashlib.sha256(f"{turn}/{thread}/{page}".encode()).hexdigest()
                    for page in range(batch)
                ]
                for thread in range(threads)
            ]
            seconds = _turn(cache, names)
            if turn:  # the first one warms up
                for what, passed in seconds.items():
                    times[what].append(passed)
        cache.clear()
    write_s, read_s = raw(pages * page_bytes)
    return Figure(
        page_bytes=page_bytes,
        batch=batch,
        threads=threads,
        put_s=statistics.median(times["put"]),
        get_s=statistics.median(times["get"]),
        exists_s=statistics.median(times["exists"]),
        raw_write_s=write_s,
        raw_read_s=read_s,
        spread_s={what: (min(found), max(found)) for what, found in times.items()},
    )


def _turn(cache: Attachment, names: Sequence[Sequence[str]]) -> dict[str, float]:
    """Let each thread move its batch; return the seconds of each operation."""
    batch = len(names[0])
    where = [np.arange(at * batch, (at + 1) * batch) for at in range(len(names))]

    def put(at: int) -> None:
        cache.exists(names[at])
        _check("stored", cache.put(names[at], {"bench": where[at]}))

    calls: dict[str, Callable[[int], object]] = {
        "put": put,
        "exists": lambda at: cache.exists(names[at]),
        "get": lambda at: _check("loaded", cache.get(names[at], {"bench": where[at]})),
    }
    seconds = {}
    with ThreadPoolExecutor(len(names)) as threads:
        for what, call in calls.items():
            began_s = time.perf_counter()
            list(threads.map(call, range(len(names))))
            seconds[what] = time.perf_counter() - began_s
    return seconds


def _check(done: str, result: TransferResult) -> None:
    outcomes = result.outcomes["bench"]
    if result.pages != len(outcomes):
        worst = Outcome(int(outcomes.max())).name.lower()
        raise KvdockError(
            f"only {result.pages} of {len(outcomes)} pages were {done} ({worst})",
            fix="Give the backend more room, or measure smaller pages and batches.",
        )
