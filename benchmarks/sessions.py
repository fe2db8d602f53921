"""What safety costs: threads, observers, trailers, and a backend that hangs.

Usage: python benchmarks/sessions.py [--quick] [--save]

Everything but the journal is measured over a backend that copies pages in memory, so
that nothing hides the overhead: with a real store every share below is smaller.
Ways are timed in turn, and the fastest round of each counts: on a machine
that others use as well, noise only adds. All of them move the same memory: the
place of two copies alone makes them differ by up to a tenth.

Bars: the observers cost 3 % of throughput, the journal 2 %. Two per cent drown in
the fastest rounds of two ways, so the journal is measured on its own: short rounds
with it and without it in turn, compared in pairs, with the median of all pairs; on a
file store in memory, the fastest store there is, and once more on bare copies. A
second attachment without a journal is measured in the same way: its "loss" is what
the measure shows where there is none.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import (
    API_VERSION,
    AttachConfig,
    Attachment,
    Backend,
    Batch,
    BatchResult,
    Dock,
    KindSupport,
    Manifest,
    Namespace,
    Operation,
    Outcome,
    PoolKind,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
    Support,
    TransferManager,
    hookimpl,
)
from kvdock.config import CoreSettings, structure
from kvdock.events import BatchEnded, Origin, PagesAnswered
from kvdock.journal import Journal, JournalSettings
from kvdock.observers.metrics import Metrics
from kvdock.observers.tracing import Tracing
from kvdock.plugin import Candidate, accept
from kvdock.pools import Part

PAGE_BYTES = 64 * 1024
PAGES = 512
BATCH = 128
SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - only for a folder of our own in it
_BATCHES = 200
"""Batches whose records the journal writes at once, as under load."""
_ROUND = 80
"""Batches of a short round: as many as the journal gathers in its 50 ms, or so."""
_BARS = {"observers": 0.03, "journal": 0.02}
"""Most of the throughput that each may cost."""


@attrs.define(eq=False)
class Copier:
    """Moves pages to and from one block of memory, as fast as memory goes."""

    integrity: Support = Support.NATIVE
    extra: int = 0
    hang: threading.Event | None = None
    rows: dict[str, int] = attrs.field(factory=dict)
    store: Any = None

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        """Declare zero copy and nothing to verify."""
        return Manifest(
            name="copier", api=API_VERSION, summary="memory",
            kinds={PoolKind.K_ONLY: KindSupport(multi_buffer=Support.NATIVE)},
            zero_copy=Support.NATIVE, integrity=self.integrity,
        )  # fmt: skip

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Copier:
        """Make room for every page, touched once."""
        del pool, config
        if self.store is None:
            self.store = np.ones((region.pages, PAGE_BYTES + 64), np.uint8)
        return self

    def close(self) -> None:
        """Keep what is stored."""

    def run(self, batch: Batch) -> BatchResult:
        """Copy each object; keys are numbers of rows."""
        if self.hang is not None:
            self.hang.wait()
        if batch.operation is Operation.EXISTS:
            return BatchResult.all(batch, Outcome.OK)
        return self.copied(batch)

    def copied(self, batch: Batch) -> BatchResult:
        """Copy every piece of every object."""
        import ctypes  # noqa: PLC0415 - only where bytes move

        put = batch.operation is Operation.PUT
        base = self.store.ctypes.data
        rows = zip(
            batch.keys, batch.addresses.tolist(), batch.sizes.tolist(), strict=True
        )
        for key, addresses, sizes in rows:
            row = self.rows.setdefault(key, len(self.rows) % len(self.store))
            at = base + row * self.store.shape[1]
            for address, size in zip(addresses, sizes, strict=True):
                if put:
                    ctypes.memmove(at, address, size)
                else:
                    ctypes.memmove(address, at, size)
                at += size
        return BatchResult.all(batch, Outcome.OK)


def attached(
    copier: Copier,
    *,
    core: CoreSettings | None = None,
    observed: bool = False,
    journal: Journal | None = None,
    memory: npt.NDArray[np.uint8] | None = None,
) -> tuple[Attachment, Backend]:
    """Attach one pool of 64K pages."""
    candidate = Candidate(
        name="copier", value="-", distribution="-", version="0", oracle="-"
    )
    backend = Backend(accept(copier, candidate))
    dock = Dock({"copier": backend})
    if observed:
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - an extra

        dock.add_observer("metrics", Metrics(CollectorRegistry()))
        dock.add_observer("tracing", Tracing())
    if journal is not None:
        dock.add_observer("journal", journal)
    memory = np.ones((PAGES, PAGE_BYTES), np.uint8) if memory is None else memory
    core = core or CoreSettings()
    pool, regions = pool_of(memory)
    plan = dock.plan([pool], Shard(), needs=RouteRequirements(integrity=core.integrity))
    return (
        Attachment.open(dock, plan, Namespace(model="m"), regions, core=core),
        backend,
    )


def pool_of(memory: npt.NDArray[np.uint8]) -> tuple[PoolSpec, dict[str, Region]]:
    """Describe a pool whose pages are rows of memory."""
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0], page_tokens=16, anchor=True,
    )  # fmt: skip
    return pool, {"kv": Region.of(pool, Shard(), [memory], PAGES)}


def seconds(work: Callable[[], object], times: int) -> float:
    """Time some calls; seconds for each."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def rounds(
    ways: dict[str, Callable[[], object]], count: int, times: int
) -> dict[str, float]:
    """Time several ways in turn; the fastest round of each in seconds."""
    for work in ways.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, work in ways.items():
            found[name].append(seconds(work, times))
    return {name: min(every) for name, every in found.items()}


def overhead(count: int) -> dict[str, float]:
    """What a batch costs without moving anything: one key."""
    plain, backend = attached(Copier())
    observed, wrapped = attached(Copier(), observed=True)
    name = [f"{0:064x}"]
    batch = Batch(Operation.EXISTS, name, pool="kv")
    handle = plain["kv"].handle
    channel = observed["kv"].channel
    event = {
        "backend": "copier", "pool": "kv", "operation": Operation.EXISTS,
        "outcomes": {Outcome.OK: 1}, "nbytes": PAGE_BYTES, "seconds": 0.001,
    }  # fmt: skip
    times = rounds(
        {
            "hook": lambda: backend.batch_io(handle, batch),
            "wrapped": lambda: wrapped.batch_io(handle, batch),
            "notified": lambda: channel.notify(BatchEnded(**event)),  # type: ignore[arg-type]  # as written above
            "exists": lambda: plain.exists(name),
            "exists_observed": lambda: observed.exists(name),
        },
        3 * count,
        200,
    )
    plain.close()
    observed.close()
    us = {name: value * 1e6 for name, value in times.items()}
    return {
        "hook_us": us["hook"],
        "exists_us": us["exists"],
        "exists_observed_us": us["exists_observed"],
        # Without threads in between, whose wake-ups differ by more than this.
        "observers_us_per_batch": us["wrapped"] - us["hook"] + us["notified"],
    }


def journalled(count: int) -> dict[str, float]:
    """What the journal costs a batch of 128 pages, on both of its threads."""
    with TemporaryDirectory() as folder:
        journal = Journal(JournalSettings(dir=Path(folder)))
        names = [f"{page:064x}" for page in range(BATCH)]
        outcomes = np.zeros(BATCH, np.uint8)
        event = PagesAnswered(
            backend="copier", pool="kv", operation=Operation.GET, hashes=names,
            outcomes=outcomes, request="r",
        )  # fmt: skip

        found = []
        for _ in range(count):
            began = time.process_time()  # of both threads, and not of other processes
            for _ in range(_BATCHES):
                journal.kvdock_observe(event=event, origin=Origin())
            assert journal.flush(60)  # noqa: S101 - the writer's time counts as well
            found.append((time.process_time() - began) / _BATCHES)
        return {"journal_us_per_batch": min(found) * 1e6}


def journalling(count: int) -> dict[str, float]:
    """What the journal costs loads of 64K pages in batches of 128.

    From a file store in memory, the fastest that there is, and from memory itself,
    where a load is nothing but a copy. The work of its thread counts as well: a round
    ends when its records are written.
    """
    memory = np.ones((PAGES, PAGE_BYTES), np.uint8)
    copied = np.ones((PAGES, PAGE_BYTES + 64), np.uint8)
    figures: dict[str, float] = {}
    with TemporaryDirectory() as folder, TemporaryDirectory(dir=SHARED) as shared:
        journal = Journal(JournalSettings(dir=Path(folder)))

        def from_memory(name: str) -> Attachment:
            wanted = journal if name == "journal" else None
            return attached(Copier(store=copied), memory=memory, journal=wanted)[0]

        def from_files(name: str) -> Attachment:
            dock = Dock.load(require=["file"])
            if name == "journal":
                dock.add_observer("journal", journal)
            pool, regions = pool_of(memory)
            return Attachment.open(
                dock, dock.plan([pool], Shard(), prefer=["file"]),
                Namespace(model="m"), regions,
                {"file": {"root": Path(shared) / name, "free_space": 0}},
                core=CoreSettings(),
            )  # fmt: skip

        for what, make in (("journal", from_files), ("journal_copies", from_memory)):
            times = in_pairs(count, make, journal)
            figures |= losses_of(what, times)
    return figures


def in_pairs(
    count: int, make: Callable[[str], Attachment], journal: Journal
) -> dict[str, npt.NDArray[np.float64]]:
    """Load in short rounds without a journal, in the same way again, and with it.

    Returns:
        float64 (count, 3) for each: wall time, CPU time, and that of this thread.
    """
    names = [f"{page:064x}" for page in range(BATCH)]
    pages = {"kv": np.arange(BATCH)}
    ways = {name: make(name) for name in ("plain", "again", "journal")}
    times = {name: np.empty((count, 3)) for name in ways}
    for one in ways.values():
        assert one.put(names, pages).pages == BATCH  # noqa: S101 - else it measures nothing
        assert one.get(names, pages).pages == BATCH  # noqa: S101 - same
    order, shuffled = list(ways), random.Random(0)  # noqa: S311 - an order
    for row in range(count):
        shuffled.shuffle(order)
        for name in order:
            assert journal.flush(60)  # noqa: S101 - what another round left
            began = _clocks()
            for _ in range(_ROUND):
                ways[name].get(names, pages)
            if name == "journal":
                assert journal.flush(60)  # noqa: S101 - its thread's time counts
            times[name][row] = _clocks() - began
    for one in ways.values():
        one.close()
    return times


def losses_of(what: str, times: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    """Name the losses, and what the measure shows where there is none."""
    figures = {}
    for name, title in (("journal", what), ("again", f"{what}_noise")):
        for at, clock in enumerate(("wall", "cpu")):
            loss, error = _paired(times["plain"][:, at], times[name][:, at])
            figures[f"{title}_{clock}_loss"] = loss
            figures[f"{title}_{clock}_loss_error"] = error
    more_s = np.median(times["journal"][:, 2] - times["plain"][:, 2])
    figures[f"{what}_caller_us_per_batch"] = float(more_s) / _ROUND * 1e6
    return figures


def _clocks() -> npt.NDArray[np.float64]:
    """Return the time, and the CPU time of this process and of this thread."""
    return np.array([time.perf_counter(), time.process_time(), time.thread_time()])


def _paired(
    without: npt.NDArray[np.float64], with_it: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Return the median loss of throughput of pairs of rounds, and how sure it is."""
    losses = 1 - without / with_it
    low, middle, high = np.percentile(losses, (25, 50, 75)).tolist()
    # The notch of a box plot: two medians that differ by more do differ.
    return middle, 1.57 * (high - low) / len(losses) ** 0.5


def handing_over(count: int) -> dict[str, float]:
    """What the hand-over to a worker thread adds to a call."""
    from kvdock.resilience.executor import DeadlineExecutor  # noqa: PLC0415 - this part alone

    executor = DeadlineExecutor("bench", 1, 1)
    times = rounds(
        {
            "here": lambda: None,
            "there": lambda: executor.run(lambda: None, time.monotonic() + 5),
        },
        count,
        500,
    )
    executor.shutdown(time.monotonic() + 5, lambda: None)
    return {"hand_over_us": (times["there"] - times["here"]) * 1e6}


def in_background(count: int) -> dict[str, float]:
    """What a background load of one page costs over the call that waits."""
    store = np.ones((PAGES, PAGE_BYTES + 64), np.uint8)
    cache, _ = attached(Copier(store=store))
    name, pages = [f"{0:064x}"], np.zeros(1, np.int64)
    assert cache.put(name, {"kv": pages}).pages == 1  # noqa: S101 - else it measures nothing
    # In turn, and the median: where the system puts two threads changes what a
    # hand-over costs by a factor of two, for many calls in a row.
    took: dict[str, list[float]] = {"direct": [], "manager": []}
    with TransferManager(cache) as manager:
        ways: dict[str, Callable[[], object]] = {
            "direct": lambda: cache["kv"].get(name, pages),
            "manager": lambda: manager.read("kv", name, pages).wait(5),
        }
        for _ in range(100 * count):
            for way, call in ways.items():
                began = time.perf_counter()
                call()
                took[way].append(time.perf_counter() - began)
    times = {way: statistics.median(every) for way, every in took.items()}
    return {
        "manager_get1_us": times["manager"] * 1e6,
        "manager_get1_over_direct": times["manager"] / times["direct"],
    }


def throughput(count: int) -> dict[str, float]:
    """Load 64K pages in batches of 128: bare, observed, with trailers."""
    names = [f"{page:064x}" for page in range(BATCH)]
    pages = {"kv": np.arange(BATCH)}
    memory = np.ones((PAGES, PAGE_BYTES), np.uint8)
    store = np.ones((PAGES, PAGE_BYTES + 64), np.uint8)
    staged = structure(
        CoreSettings, {"calls": {"staging": "always"}}, where="benchmark"
    )
    kinds: dict[str, Attachment] = {
        "plain": attached(Copier(store=store), memory=memory)[0],
        "observed": attached(Copier(store=store), observed=True, memory=memory)[0],
        "trailer": attached(Copier(Support.NO, store=store), memory=memory)[0],
        "staged": attached(Copier(store=store), core=staged, memory=memory)[0],
    }
    for one in kinds.values():
        assert one.put(names, pages).pages == BATCH  # noqa: S101 - else it measures nothing
        assert one.get(names, pages).pages == BATCH  # noqa: S101 - same
    loads = rounds(
        {name: lambda one=one: one.get(names, pages) for name, one in kinds.items()},  # type: ignore[misc]  # the default binds the loop's value
        count,
        10,
    )
    stores = rounds(
        {name: lambda one=one: one.put(names, pages) for name, one in kinds.items()},  # type: ignore[misc]  # same
        count,
        10,
    )
    for one in kinds.values():
        one.close()
    gib = BATCH * PAGE_BYTES / 2**30
    return {
        "get_plain_gib_s": gib / loads["plain"],
        "get_trailer_gib_s": gib / loads["trailer"],
        "get_staged_gib_s": gib / loads["staged"],
        "put_plain_gib_s": gib / stores["plain"],
        "put_trailer_gib_s": gib / stores["trailer"],
        "observers_throughput_loss": max(0.0, 1 - loads["plain"] / loads["observed"]),
        "trailer_us_per_64k_page_get": (loads["trailer"] - loads["plain"])
        / BATCH * 1e6,
        "trailer_us_per_64k_page_put": (stores["trailer"] - stores["plain"])
        / BATCH * 1e6,
        "trailer_throughput_loss_get": max(0.0, 1 - loads["plain"] / loads["trailer"]),
    }  # fmt: skip


def hanging() -> dict[str, float]:
    """What a backend that hangs costs the engine, before and after."""
    event = threading.Event()
    core = structure(
        CoreSettings,
        {
            "deadlines": {"exists": "100 ms", "get": "100 ms", "close": "1 s"},
            "breaker": {
                "backoff": "50 ms",
                "max_backoff": "50 ms",
                "probe_timeout": "50 ms",
            },
        },
        where="benchmark",
    )
    cache, _ = attached(Copier(hang=event), core=core)
    name = [f"{0:064x}"]
    before = []
    while cache.breakers()["copier"][Operation.EXISTS] == "closed":
        before.append(seconds(lambda: cache.exists(name), 1))
    # Longer than many backoffs: probes hang as well, and delay no caller.
    many = [f"{page:064x}" for page in range(4096)]
    after, end = [], time.monotonic() + 1.0
    while time.monotonic() < end:
        after.append(seconds(lambda: cache.exists(name), 1))
        time.sleep(0.001)
    long_s = min(seconds(lambda: cache.exists(many), 1) for _ in range(50))
    event.set()
    recovered = time.monotonic()
    while not cache.exists(name).best:
        time.sleep(0.001)
    back_s = time.monotonic() - recovered
    cache.close()
    after.sort()
    return {
        "hang_calls_until_open": float(len(before)),
        "hang_seconds_until_open": sum(before),
        "hang_us_per_call_open": statistics.median(after) * 1e6,
        "hang_us_per_call_open_p99": after[int(len(after) * 0.99)] * 1e6,
        "hang_us_per_4096_pages_open": long_s * 1e6,
        "hang_seconds_to_recover": back_s,
    }


def main(arguments: list[str]) -> None:
    """Measure everything, print a table, and one line of JSON."""
    count = 10 if "--quick" in arguments else 40
    figures: dict[str, float] = {}
    for part in (handing_over, overhead, journalled, in_background, throughput):
        figures |= part(count)
    figures |= journalling(4 * count)
    # Where the difference drowns in the machine's noise, the share of a batch
    # that the observers' own time makes is the better figure.
    batch_us = BATCH * PAGE_BYTES / 2**30 / figures["get_plain_gib_s"] * 1e6
    own = {who: figures[f"{who}_us_per_batch"] / batch_us for who in _BARS}
    figures["observers_throughput_loss"] = max(
        figures["observers_throughput_loss"], own["observers"]
    )
    figures["journal_throughput_loss"] = max(0.0, figures["journal_wall_loss"])
    figures["journal_own_share"] = own["journal"]
    figures |= hanging()
    for name, value in figures.items():
        print(f"{name:34} {value:12.4g}")
    for who, bar in _BARS.items():
        loss = figures[f"{who}_throughput_loss"]
        held = "held" if loss <= bar else "MISSED"
        print(f"bar: {who} cost {loss:.2%} of at most {bar:.0%} of throughput: {held}")
    print(
        "     journal in pairs: wall {journal_wall_loss:.2%} +- "
        "{journal_wall_loss_error:.2%}, CPU {journal_cpu_loss:.2%} +- "
        "{journal_cpu_loss_error:.2%}; without any: {journal_noise_wall_loss:.2%}, "
        "{journal_noise_cpu_loss:.2%}; beside copies in memory alone: wall "
        "{journal_copies_wall_loss:.2%}, CPU {journal_copies_cpu_loss:.2%}".format_map(
            figures
        )
    )
    rounded = {name: round(value, 4) for name, value in figures.items()}
    if "--save" in arguments:
        target = Path(__file__).parent / "results" / "sessions.json"
        target.parent.mkdir(exist_ok=True)
        machine = {
            "cpu": cpu(), "python": platform.python_version(),
            "numpy": np.__version__,
        }  # fmt: skip
        record = {"machine": machine, "rounds": count, "figures": rounded}
        target.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(rounded))


def cpu() -> str:
    """Name the processor, as well as the system knows it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main(sys.argv[1:])
