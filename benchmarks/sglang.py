"""SGLang's batches through its own file backend and through kvdock-file.

Usage: python benchmarks/sglang.py

Runs in SGLang's own environment, which it builds if it is not there (3.4 GB).
Both backends get the very same batches of 128 pages from SGLang's own
controller, by turns, on the same disk, beside a bare write and read of as many bytes.
As much memory is written and unlinked first. Then a whole engine on the CPU is
started twice; the second one answers prompts whose pages are in the store, and
others, by turns; and the same with a storage class that returns at once and loads
nothing, which no store can beat. The figures are written to
benchmarks/results/sglang.json.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "engines" / "sglang" / "tests"
# This file is called like the engine, so its folder must not be searched.
HERE = sys.path[0]
sys.path[0] = str(TESTS)
RESULT = Path(__file__).parent / "results" / "sglang.json"

import environment  # noqa: E402 - found by the path above

if Path(sys.prefix) != environment.VENV:
    python = str(environment.build())
    os.execve(python, [python, __file__], {**os.environ, **environment.CPU})  # noqa: S606 - the same script, where SGLang is

sys.path.insert(0, str(TESTS / "engine"))

import hashlib  # noqa: E402 - after the environment is the right one
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_PAGES = 128
BATCHES = 4
ROUNDS = 3
PROMPT_TOKENS = 960
PROMPTS = 4


def _controller(backend: str, pool: Any, root: Path) -> Any:  # noqa: ANN401 - SGLang's object
    import controllers  # noqa: PLC0415 - imports SGLang

    group = controllers.become_rank(0, 1, root / "gloo")
    extra: dict[str, Any] = {"plugin": "file", "root": str(root / "kvdock")}
    if backend != "dynamic":
        extra = {"file_storage_path": str(root / "own")}
    return controllers.controller({"kv": pool}, extra, group=group, backend=backend)


class _Bare:
    """A batch as one file: what the machine itself takes to write and to read it."""

    def __init__(self, folder: Path, batch_bytes: int) -> None:
        self._folder = folder
        self._memory = bytearray(os.urandom(1 << 20) * (batch_bytes >> 20))
        self._memory += bytes(batch_bytes - len(self._memory))

    def warm(self, nbytes: int) -> None:
        """Write and unlink: a virtual host's memory costs 15 times more at first."""
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            while file.tell() < nbytes:
                file.write(self._memory)

    def put(self, key: str) -> bool:
        """Write a file; return whether all of it was written."""
        with (self._folder / key).open("xb", buffering=0) as file:
            return file.write(self._memory) == len(self._memory)

    def get(self, key: str) -> bool:
        """Read it; return whether all of it was read."""
        with (self._folder / key).open("rb", buffering=0) as file:
            return file.readinto(self._memory) == len(self._memory)


def storage() -> dict[str, float]:
    """Time SGLang's own calls for a batch, by turns; return the ratios."""
    import zoo  # noqa: PLC0415 - imports SGLang

    zoo.SLOTS = (BATCH_PAGES + 2) * zoo.PAGE
    pool = zoo.mha_host(heads=8, width=128, layers=8)
    zoo.fill(pool, 1)
    page_bytes = zoo.page(pool, 0).nbytes
    slots = zoo.slots(pool, list(range(BATCH_PAGES)))
    took: dict[tuple[str, str], list[float]] = {}

    def timed(backend: str, what: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        done = call()
        took.setdefault((backend, what), []).append(time.perf_counter() - began)
        if done not in (True, BATCH_PAGES):
            raise SystemExit(f"{backend} could not {what}: {done}")

    class Operation:
        request_id = "benchmark"

        @staticmethod
        def is_terminated() -> bool:
            return False

    with tempfile.TemporaryDirectory(dir=environment.VENV) as folder:
        bare = _Bare(Path(folder), BATCH_PAGES * page_bytes)
        bare.warm((1 + len(NAMES)) * ROUNDS * BATCHES * BATCH_PAGES * page_bytes)
        both = {name: _controller(name, pool, Path(folder)) for name in NAMES}
        made = {name: one.__enter__() for name, one in both.items()}
        for number in range(ROUNDS * BATCHES):
            keys = [
                hashlib.sha256(f"{number}.{n}".encode()).hexdigest()
                for n in range(BATCH_PAGES)
            ]
            for name, one in made.items():
                timed(name, "put", lambda c=one, k=keys: c.page_set_func(k, slots))  # type: ignore[misc] # defaults bind the loop's values
            timed("bare", "put", lambda k=keys[0]: bare.put(k))  # type: ignore[misc] # same
            timed("bare", "get", lambda k=keys[0]: bare.get(k))  # type: ignore[misc] # same
            for name, one in made.items():
                timed(
                    name,
                    "get",
                    lambda c=one, k=keys: c.page_get_func(Operation(), k, slots),  # type: ignore[misc] # same
                )
        for context in both.values():
            context.__exit__(None, None, None)
    found = {}
    for what in ("put", "get"):
        own, ours, alone = (
            statistics.median(took[name, what]) for name in (*NAMES, "bare")
        )
        rate = BATCH_PAGES * page_bytes / 2**30
        print(
            f"{what}: {rate / own:.2f} GiB/s through SGLang's file backend, "
            f"{rate / ours:.2f} GiB/s through kvdock-file, "
            f"{rate / alone:.2f} GiB/s bare (pages of {page_bytes >> 10} KiB)"
        )
        found[f"{what}_vs_sglang_file"] = round(own / ours, 2)
        found[f"{what}_vs_bare"] = round(alone / ours, 2)
    return found


NAMES = ("file", "dynamic")


INSTANT = {
    "backend_name": "instant",
    "module_path": "instant_storage",
    "class_name": "InstantStorage",
    "interface_v1": 1,
}
"""A storage class that returns at once, and loads nothing."""


def first_token() -> dict[str, float]:
    """Time the first token of stored prompts against that of new ones."""
    import lives  # noqa: PLC0415 - imports SGLang
    import tiny_models  # noqa: PLC0415 - same

    def prompt(seed: int) -> list[int]:
        return [(seed * n + 7 * seed) % 500 + 4 for n in range(PROMPT_TOKENS)]

    stored = [prompt(seed) for seed in range(1, PROMPTS + 1)]
    others = [prompt(seed) for seed in range(101, PROMPTS + 101)]
    turns = [one for pair in zip(stored, others, strict=True) for one in pair]
    # The first answers of an engine pay for what is set up on first use.
    warm_up = [prompt(1000), prompt(1001)]
    # At the end those that the engine still has itself.
    asked = [*warm_up, *turns, *stored]
    ways = slice(0, len(turns), 2), slice(1, len(turns), 2), slice(len(turns), None)
    tiny = tiny_models.MIDDLING
    medians = {}
    with tempfile.TemporaryDirectory(dir=environment.VENV) as name:
        model = tiny_models.write(tiny, Path(name) / "model")
        for store, storage in (("kvdock", {"plugin": "file"}), ("instant", INSTANT)):
            folder = Path(name) / store
            folder.mkdir()
            storage = {**storage, "root": str(folder / "store")}  # noqa: PLW2901 - with its place
            world = lives.World(tiny=tiny, model=model, folder=folder, storage=storage)
            world.live("first", [{"prompts": stored}], new_tokens=1)
            (answers,) = world.live("second", [{"prompts": asked}], new_tokens=1)
            cached = [one["cached"] for one in answers[len(warm_up) :]]
            found = [all(cached[way]) for way in ways]
            if found != [True, False, True] or any(cached[ways[1]]):
                raise SystemExit(f"{store} has not restored as was meant: {cached}")
            seconds = [one["seconds"] for one in answers[len(warm_up) :]]
            medians[store] = [statistics.median(seconds[way]) for way in ways]
    restored, computed, warm = medians["kvdock"]
    instant, computed_too, _ = medians["instant"]
    print(
        f"first token of {PROMPT_TOKENS} tokens after a restart: "
        f"{restored * 1e3:.0f} ms restored, {computed * 1e3:.0f} ms recomputed, "
        f"{warm * 1e3:.0f} ms from the engine's own cache; with storage that returns "
        f"at once {instant * 1e3:.0f} ms, {computed_too * 1e3:.0f} ms recomputed"
    )
    return {
        "ttft_restored_vs_recomputed": round(restored / computed, 3),
        "ttft_warm_vs_recomputed": round(warm / computed, 3),
        "ttft_instant_vs_recomputed": round(instant / computed_too, 3),
        "ttft_restored_vs_instant": round(restored / instant, 3),
    }


def main() -> None:
    """Measure and print; the last line is the figures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sgl_kernel  # noqa: F401, PLC0415 - the stand-in comes before SGLang

        figures = {**storage(), **first_token()}
    # Nothing that is called like this file is imported any more.
    sys.path.append(HERE)
    from machine import describe  # noqa: PLC0415 - see above

    about = {
        **describe(environment.VENV),
        "sglang": environment.SGLANG,
        "batch_pages": BATCH_PAGES,
        "prompt_tokens": PROMPT_TOKENS,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps({"machine": about, "figures": figures}, indent=2) + "\n"
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
