"""vLLM's pages through its own file tier and through kvdock-file.

Usage: python benchmarks/vllm.py [--rounds N] [--prompts N] [--level tier|engine]
                                [--busy N]

Runs in vLLM's own environment, which it builds if it is not there (3.4 GB). Both
tiers get the very same rows from the very same memory, as vLLM's manager submits
them, by turns, on the same disk: with direct I/O both, and buffered both; with 1, 8
and 32 jobs in flight at once. Bare writes and reads of one thread and one file stand
beside, and processor seconds: those of the process, all of its threads. As much as a
round stores is written and unlinked first, and all rows are loaded once before that is
timed: a tier touches the memory of its threads once in its life. With --busy N, N
processes that never wait run beside the tiers. Then two engines, one with each and in
processes as in production, answer new prompts by turns, and the same ones from
storage: how many times sooner the first token comes. Figures are ratios, of the best
and of the median, over 1 is better for kvdock; `cpu` is kvdock's processor time over
that of the fs tier, where less is better. The last line is a JSON object;
benchmarks/results/vllm.json gets these figures, and a run of one level or beside busy
processes keeps its others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "engines" / "vllm" / "tests"
# This file is called like the engine, so its folder must not be searched.
HERE = sys.path[0]
sys.path[0] = str(TESTS)
RESULT = Path(__file__).parent / "results" / "vllm.json"

import vllm_environment  # noqa: E402 - found by the path above

if Path(sys.prefix) != vllm_environment.VENV:
    python = str(vllm_environment.build())
    os.execve(  # noqa: S606 - the same script, where vLLM is
        python,
        [python, __file__, *sys.argv[1:]],
        {**os.environ, **vllm_environment.CPU},
    )

sys.path.insert(0, str(TESTS / "engine"))

import argparse  # noqa: E402 - after the environment is the right one
import json  # noqa: E402
import mmap  # noqa: E402
import shutil  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import suppress  # noqa: E402
from itertools import product  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import attrs  # noqa: E402
import numpy as np  # noqa: E402

sys.path.append(HERE)
from machine import beside, describe  # noqa: E402

sys.path.pop()

SIZES = {"64K": (64 << 10, 512), "1M": (1 << 20, 256)}
"""Bytes of a row, and how many rows are stored in a round."""
STORE_ROWS, LOAD_ROWS = 16, 64
"""Most rows of a job: what a step of prefill stores, and what a prefix loads."""
JOBS = (1, 8, 32)
"""Jobs in flight at once."""
ROUNDS = 5
PROMPTS = 10
END_S = 120.0
"""How long an engine may take to end on a busy machine."""
OWN_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""As by default: in the process of the prompts, vLLM's loop keeps the interpreter's
lock while it waits for storage, which slows each thread that needs it."""
CONTENDERS = ("fs_direct", "kvdock_direct", "fs_buffered", "kvdock_buffered")
Times = dict[tuple[str, int, str], list[tuple[float, float]]]
"""Seconds, and processor seconds, by contender, jobs in flight and what they did."""


@attrs.frozen(eq=False)
class Rows:
    """Host memory as vLLM's: the first half is stored, the second one is loaded."""

    memory: Any
    row_bytes: int
    count: int

    @classmethod
    def of(cls, row_bytes: int, count: int) -> Rows:
        """Map memory with random rows."""
        flat = np.frombuffer(mmap.mmap(-1, 2 * count * row_bytes), np.uint8)
        memory = flat.reshape(2 * count, row_bytes)
        memory[:count] = np.random.default_rng(0).integers(
            0, 256, (count, row_bytes), np.uint8
        )
        return cls(memory, row_bytes, count)


def fs_tier(rows: Rows, folder: Path, *, direct: bool) -> Any:  # noqa: ANN401 - vLLM's object
    """Open vLLM's own tier."""
    from vllm.v1.kv_offload import config  # noqa: PLC0415 - the engine
    from vllm.v1.kv_offload.tiering.fs.manager import (  # noqa: PLC0415 - same
        FileSystemTierManager,
    )

    spec = SimpleNamespace(
        config=config.OffloadingConfig(
            (config.OffloadingGroupConfig(32, ("layer",), 0),),
            rows.row_bytes,
            False,
            {},
            "benchmark",
            config.OffloadingModelConfig("model", "float32"),
            config.OffloadingCacheConfig(32, 1),
            config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        ),
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )
    tier = FileSystemTierManager(
        spec, memoryview(rows.memory), "fs", root_dir=str(folder)
    )
    if direct and not tier._use_o_direct:  # noqa: SLF001 - vLLM has no setting for it
        raise SystemExit(f"{folder} does not support direct I/O")
    tier._use_o_direct = direct  # noqa: SLF001 - same
    return tier


def kvdock_tier(rows: Rows, folder: Path, *, direct: bool) -> Any:  # noqa: ANN401 - as above
    """Open kvdock's, with its checksums and deadlines."""
    import vllm_rigs as tiers  # noqa: PLC0415 - imports vLLM

    from kvdock.throttled_log import ThrottledLog  # noqa: PLC0415 - in vLLM's environment
    from kvdock_vllm.adapters import AdapterFiles  # noqa: PLC0415 - same
    from kvdock_vllm.pools import Handover  # noqa: PLC0415 - same
    from kvdock_vllm.rows import Group  # noqa: PLC0415 - same
    from kvdock_vllm.settings import collect  # noqa: PLC0415 - same
    from kvdock_vllm.tier import KvdockTier  # noqa: PLC0415 - same

    group = Group(
        number=0,
        spec_class="FullAttentionSpec",
        spec="full",
        layers=("layer",),
        tokens=32,
        pieces=((0, rows.row_bytes),),
    )
    given = {
        "plugin": "file",
        "root": str(folder),
        "free_space": "1 MiB",
        "host_memory": 2 * rows.count * rows.row_bytes,
        "direct": direct,
    }
    spec = SimpleNamespace(
        kv_bytes_per_chunk=rows.row_bytes,
        cpu_page_size_per_worker=rows.row_bytes,
        replicated_layout=False,
        config=SimpleNamespace(
            canonical_layout=False, parallel=SimpleNamespace(world_size=1)
        ),
    )
    identity = tiers.identity(groups=(group,))
    handover = Handover(
        collect(given, environ={}), identity, AdapterFiles(ThrottledLog())
    )
    tier = KvdockTier(spec, memoryview(rows.memory), "KvdockTier", handover=handover)
    tier.open(identity)
    return tier


def moved(
    tier: Any,  # noqa: ANN401 - as above
    keys: list[bytes],
    base: int,
    each: int,
    jobs: int,
    *,
    load: bool,
) -> None:
    """Move rows in jobs of `each`, and look for ends as often as a busy scheduler.

    Args:
        tier: Moves them.
        keys: Of all rows.
        base: The first row.
        each: Rows of a job.
        jobs: How many are in flight at once.
        load: Whether to load them, or to store them.
    """
    from vllm.v1.kv_offload.base import ReqContext  # noqa: PLC0415 - the engine
    from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: PLC0415 - same

    submit = tier.submit_load if load else tier.submit_store
    waiting = list(range(0, len(keys), each))[::-1]
    flying = 0
    while waiting or flying:
        while waiting and flying < jobs:
            first = waiting.pop()
            part = keys[first : first + each]
            rows = np.arange(base + first, base + first + len(part))
            submit(TransferJob(first, part, rows, load, ReqContext(req_id="r")))
            flying += 1
        ended = list(tier.get_finished_jobs())
        if not all(one.success for one in ended):
            raise SystemExit(f"a job has failed: {ended}")
        flying -= len(ended)
        if not ended:
            time.sleep(0.0002)


def looked_up(tier: Any, keys: list[bytes], request: str) -> None:  # noqa: ANN401 - as above
    """Ask for keys, step by step, until all are answered."""
    from vllm.v1.kv_offload.base import (  # noqa: PLC0415 - the engine
        LookupResult,
        ReqContext,
        ScheduleEndContext,
    )

    context = ReqContext(req_id=request)
    left = keys
    while left:
        answers = [(key, tier.lookup(key, context)) for key in left]
        if any(answer is LookupResult.MISS for _, answer in answers):
            raise SystemExit("a stored page is not found")
        left = [key for key, answer in answers if answer is LookupResult.RETRY]
        tier.on_schedule_end(ScheduleEndContext((), ()))
        if left:
            time.sleep(0.0002)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return what work takes in seconds, and in processor seconds of all threads."""
    began, spent = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - spent


def bare_round(rows: Rows, folder: Path, *, direct: bool) -> dict[str, Any]:
    """Time writing and reading all rows on one thread, in one file."""
    path = folder / "bare"
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    file = os.open(path, flags, 0o600)
    try:

        def move(call: Callable[..., int], base: int, each: int) -> None:
            for at in range(0, rows.count, each):
                part = rows.memory[base + at : base + at + each]
                if call(file, [part], at * rows.row_bytes) != part.nbytes:
                    raise SystemExit("a bare call has moved less")

        store = timed(lambda: move(os.pwritev, 0, STORE_ROWS))
        load = timed(lambda: move(os.preadv, rows.count, LOAD_ROWS))
    finally:
        os.close(file)
        path.unlink()
    return {"store": store, "load": load}


def round_of(name: str, rows: Rows, folder: Path, turn: int, jobs: int) -> Any:  # noqa: ANN401 - as bare_round
    """Time storing, finding and loading all rows with a fresh tier."""
    kind, _, mode = name.partition("_")
    if kind == "bare":
        return bare_round(rows, folder, direct=mode == "direct")
    make = fs_tier if kind == "fs" else kvdock_tier
    place = folder / name
    place.mkdir(mode=0o700)
    tier = make(rows, place, direct=mode == "direct")
    keys = [os.urandom(32) + bytes(4) for _ in range(rows.count)]
    each = min(LOAD_ROWS, rows.count // jobs)

    def load() -> None:
        moved(tier, keys, rows.count, each, jobs, load=True)

    took = {
        "store": timed(
            lambda: moved(tier, keys, 0, min(STORE_ROWS, each), jobs, load=False)
        ),
        "lookup": timed(lambda: looked_up(tier, keys, f"look-{turn}")),
    }
    load()  # the memory of its threads is touched now
    rows.memory[rows.count :] = 1
    took["load"] = timed(load)
    if not (rows.memory[rows.count :] == rows.memory[: rows.count]).all():
        raise SystemExit(f"{name} has loaded other bytes")
    tier.shutdown()
    shutil.rmtree(place)
    return took


def tier_level(rounds: int, busy: int) -> dict[str, Any]:
    """Compare the tiers on rows of two sizes."""
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(dir=vllm_environment.VENV) as name,
        beside(busy),
    ):
        for size, (row_bytes, count) in SIZES.items():
            rows = Rows.of(row_bytes, count)
            # A page that a virtual host has to give costs many times more.
            bare_round(rows, Path(name), direct=False)
            took: Times = {}
            # The first round pays for what is set up on first use.
            for turn in range(-1, rounds):
                for jobs in JOBS:
                    for one in (*CONTENDERS, "bare_direct", "bare_buffered"):
                        times = round_of(one, rows, Path(name), turn, jobs)
                        for what, spent in times.items() if turn >= 0 else ():
                            took.setdefault((one, jobs, what), []).append(spent)
            show(size, row_bytes * count / 2**30, took)
            for jobs, mode in product(JOBS, ("direct", "buffered")):
                for what in ("store", "load", "lookup"):
                    theirs = zip(*took[f"fs_{mode}", jobs, what], strict=True)
                    ours = zip(*took[f"kvdock_{mode}", jobs, what], strict=True)
                    ended = f"{jobs}_busy" if busy else str(jobs)
                    found[f"{what}_vs_fs_{mode}_{size}_{ended}"] = compared(
                        [*theirs], [*ours]
                    )
    return found


def compared(theirs: list[Any], ours: list[Any]) -> dict[str, float]:
    """Compare seconds, and processor seconds, of two contenders."""
    median = statistics.median
    return {
        "best": round(min(theirs[0]) / min(ours[0]), 2),
        "median": round(median(theirs[0]) / median(ours[0]), 2),
        "cpu": round(median(ours[1]) / median(theirs[1]), 2),
    }


def show(size: str, gib: float, took: Times) -> None:
    """Print the rate and the processor time of each contender."""
    for (contender, jobs, what), times in took.items():
        seconds, spent = zip(*times, strict=True)
        best, median = min(seconds), statistics.median(seconds)
        shown = (
            f"best {best * 1e3:6.2f} ms, median {median * 1e3:6.2f} ms"
            if what == "lookup"
            else f"best {gib / best:5.2f} GiB/s, median {gib / median:5.2f} GiB/s, "
            f"cpu {statistics.median(spent) / gib:.3f} s/GiB"
        )
        print(f"{size:>3} {contender:15} {jobs:2} jobs {what:6} {shown}")


def start(kind: str, model: Path, folder: Path) -> subprocess.Popen[str]:
    """Start an engine that keeps its pages in a folder of its own."""
    place = folder / kind
    place.mkdir(mode=0o700)
    script = str(Path(__file__).with_name("vllm_process.py"))
    with (folder / f"{kind}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, script, kind, str(model), str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **vllm_environment.CPU, **OWN_CORE},
        )


def first_tokens(engine: subprocess.Popen[str], prompt: int) -> tuple[float, float]:
    """Return the seconds to a prompt's first token: computed, and restored."""
    assert engine.stdin  # noqa: S101 - it was asked for
    assert engine.stdout  # noqa: S101 - same
    engine.stdin.write(f"{prompt}\n")
    engine.stdin.flush()
    computed_s, restored_s = map(float, engine.stdout.readline().split())
    return computed_s, restored_s


def end(engine: subprocess.Popen[str]) -> None:
    """End an engine, which then removes its shared memory."""
    try:
        # It ends with its input; after a failure it has ended already.
        with suppress(BrokenPipeError):
            engine.communicate(timeout=END_S)
    finally:
        engine.kill()
        engine.wait()


def turns_of_engines(folder: Path, prompts: int) -> dict[str, list[tuple[float, ...]]]:
    """Let two engines answer by turns; return (computed, restored) seconds of each."""
    import vllm_models  # noqa: PLC0415 - imports transformers

    model = vllm_models.make(vllm_models.MIDDLING, folder)
    engines = {kind: start(kind, model, folder) for kind in ("fs", "kvdock")}
    turns: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in engines}
    try:
        # The first prompt pays for what is set up on first use.
        for prompt in range(prompts + 1):
            for kind, engine in engines.items():
                took_s = first_tokens(engine, prompt)
                if prompt:
                    turns[kind].append(took_s)
    except (ValueError, OSError) as error:
        logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
        raise SystemExit(f"an engine has failed: {error}\n{logs}") from error
    finally:
        for engine in engines.values():
            end(engine)
    return turns


def engine_level(prompts: int) -> dict[str, Any]:
    """Compare how much sooner the first token of a restored prompt comes."""
    with tempfile.TemporaryDirectory(dir=vllm_environment.VENV) as name:
        turns = turns_of_engines(Path(name), prompts)
    saved: dict[str, dict[str, float]] = {}
    for kind, mine in turns.items():
        computed, restored = zip(*mine, strict=True)
        best, median = min, statistics.median
        saved[kind] = {
            "best": best(computed) / best(restored),
            "median": median(computed) / median(restored),
        }
        print(
            f"first token with {kind:6} computed best {best(computed) * 1e3:.0f} ms, "
            f"median {median(computed) * 1e3:.0f} ms; restored best "
            f"{best(restored) * 1e3:.0f} ms, median {median(restored) * 1e3:.0f} ms"
        )
    found: dict[str, Any] = {
        f"ttft_computed_over_restored_{kind}": {
            how: round(ratio, 2) for how, ratio in ratios.items()
        }
        for kind, ratios in saved.items()
    }
    found["ttft_vs_fs"] = {
        how: round(saved["kvdock"][how] / saved["fs"][how], 2)
        for how in ("best", "median")
    }
    return found


def main() -> None:
    """Measure and print; the last line is the figures."""
    parser = argparse.ArgumentParser(description="vLLM's tiers, side by side.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--level", choices=("tier", "engine"))
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    if given.level != "engine":
        figures |= tier_level(given.rounds, given.busy)
    if given.level != "tier":
        figures |= engine_level(given.prompts)
    about = {
        **describe(vllm_environment.VENV),
        "vllm": vllm_environment.VLLM,
        "rounds": given.rounds,
        "prompts": given.prompts,
        "busy": given.busy,
    }
    RESULT.parent.mkdir(exist_ok=True)
    part = bool(given.level or given.busy) and RESULT.exists()
    kept = json.loads(RESULT.read_text())["figures"] if part else {}
    whole = {"machine": about, "figures": kept | figures}
    RESULT.write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
