"""How long one small read takes while a long batch is being written."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from file_contenders import Contender, Kvdock, Pool, Raw

PAGE_BYTES = 64 << 10
PAGES = 2048
READS = 200
_TURN = 7


@contextmanager
def writing(contender: Contender) -> Iterator[None]:
    """Write batches of all pages, one after the other, on a thread of its own."""
    stop, going = threading.Event(), threading.Event()

    def write() -> None:
        turn = 10**9
        while not stop.is_set():
            going.set()
            contender.put([list(range(1, PAGES))], turn)
            turn += 1

    thread = threading.Thread(target=write)
    thread.start()
    going.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def reads_us(contender: Contender) -> list[float]:
    """Load one page again and again; microseconds of each."""
    return [1e6 * contender.get([[0]], _TURN) for _ in range(READS)]


def half_and_worst(took: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(took)
    return {
        "p50": round(statistics.median(took), 1),
        "p99": round(ordered[int(0.99 * len(ordered))], 1),
    }


def measure(where: Path | None) -> dict[str, dict[str, float]]:
    """Return microseconds of a 64K read alone and beside a batch of 128 MiB.

    Raw reads beside raw writes say what the machine itself makes of it.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvdock-bench-", dir=where))
    found = {}
    try:
        pool = Pool.of(PAGES, PAGE_BYTES)
        made: dict[str, Callable[[], Contender]] = {
            "raw": lambda: Raw(folder / "raw", pool),
            # Room for what is written meanwhile: what is read must not go.
            "kvdock": lambda: Kvdock(folder / "kvdock", pool, quota=1 << 30),
        }
        for name, make in made.items():
            contender = make()
            contender.put([[0]], _TURN)
            reads_us(contender)
            found[f"{name}_alone"] = half_and_worst(reads_us(contender))
            whole = [1e6 * contender.put([list(range(1, PAGES))], t) for t in (8, 9)]
            found[f"{name}_whole_write"] = half_and_worst(whole)
            with writing(contender):
                beside = reads_us(contender)
            found[f"{name}_beside_a_write"] = half_and_worst(beside)
            contender.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found
