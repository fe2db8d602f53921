"""How long one small read takes while a long batch is being written."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from file_contenders import Contender, Kvdock, Pool, Raw

PAGE_BYTES = 64 << 10
PAGES = 2048
READS = 200
_TURN = 7
_PAUSE_S = 0.001


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
    """Load one page now and again; microseconds of each.

    With a pause in between, so that reads of every contender are spread over
    all that a write does, however short they are.
    """
    took = []
    for _ in range(READS):
        time.sleep(_PAUSE_S)
        took.append(1e6 * contender.get([[0]], _TURN))
    return took


def half_and_worst(took: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(took)
    return {
        "p50": round(statistics.median(took), 1),
        "p99": round(ordered[int(0.99 * len(ordered))], 1),
    }


def beside(reader: Contender, writer: Contender) -> dict[str, dict[str, float]]:
    """Read alone and beside a writer, and time the writer alone."""
    reader.put([[0]], _TURN)
    reads_us(reader)
    alone = half_and_worst(reads_us(reader))
    whole = [1e6 * writer.put([list(range(1, PAGES))], turn) for turn in (8, 9)]
    with writing(writer):
        among = reads_us(reader)
    return {
        "alone": alone,
        "whole_write": half_and_worst(whole),
        "beside_a_write": half_and_worst(among),
    }


def measure(where: Path | None) -> dict[str, dict[str, float]]:
    """Return microseconds of a 64K read alone and beside a batch of 128 MiB.

    Raw reads beside raw writes say what the machine itself makes of it, and
    both write with as many threads: one, or the two that are kvdock's default.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvdock-bench-", dir=where))
    found: dict[str, dict[str, float]] = {}
    try:
        pool = Pool.of(PAGES, PAGE_BYTES)
        for threads in (1, 2):
            raw = Raw(folder / f"raw-{threads}", pool)
            writer = Raw(folder / f"raw-writer-{threads}", pool, threads)
            # Room for what is written meanwhile: what is read must not go.
            kvdock = Kvdock(
                folder / f"kvdock-{threads}", pool, quota=1 << 30, threads=threads
            )
            taken = {"raw": beside(raw, writer), "kvdock": beside(kvdock, kvdock)}
            for name, figures in taken.items():
                found |= {f"{name}_{threads}_{k}": v for k, v in figures.items()}
            for contender in (raw, writer, kvdock):
                contender.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found
