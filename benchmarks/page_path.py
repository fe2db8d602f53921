"""Count what a warm call goes through between an engine and the system call.

Usage: python benchmarks/page_path.py [--stacks]

`Attachment.get`, `put` and `exists` run on the file backend under `sys.setprofile`, in
the caller's thread and in the workers. The last line is JSON; `tests/budgets` holds the
figures against `tests/budgets/budgets.toml`.

Warm calls of 1 and of 128 pages of 4 KiB, which one thread moves. Chance makes some
calls longer and few shorter: of 40, the figures are those of most.

- `calls`: calls of Python functions, numpy's and the standard library's included;
- `modules`: modules of kvdock and pluggy whose functions run;
- `records`: objects that are built, as calls of `__init__`;
- `system_calls`: those of Python's modules, and reads and writes as the kernel counts
  them;
- `frames`: the caller's stack from `Attachment` on, while it waits, and the worker's
  stack at the first system call, or at the compiled code that makes it;
- `handoffs` to other threads, of a call with four pools.

Calls of 128 pages that vary from run to run: `large` are pages of 64 KiB, which two
threads share; `full` are puts into a full store, on average, where functions in C count
too.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock import (
    Attachment,
    Dock,
    Namespace,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
    native,
)
from kvdock.pools import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SYSTEM_CALLS = {"put": "pwritev", "get": "preadv"}
TRANSFERS = {"read", "readv", "write", "writev", "pread", "preadv", "pwrite", "pwritev"}
BATCH = 128
WARM_CALLS = 40
SETTLING_S = 0.1
"""A folder goes on being read until its last change is 12 ms old."""

_BOOTSTRAP = {threading.__file__}
"""What starts a thread is not a step of a page."""


@attrs.define(eq=False)
class Call:
    """What one call did, in all threads."""

    functions: list[tuple[str, str]] = attrs.field(factory=list)
    """Module and name of each function of Python, in the order of their calls."""
    stack: list[str] = attrs.field(factory=list)
    c_functions: int = 0
    system_calls: int = 0
    handoffs: int = 0

    @property
    def records(self) -> int:
        """Objects that were built."""
        return sum(name.rpartition(".")[2] == "__init__" for _, name in self.functions)

    @property
    def modules(self) -> set[str]:
        """Modules of kvdock and of pluggy whose functions ran."""
        modules = {module for module, _ in self.functions}
        return {name for name in modules if name.startswith(("kvdock", "pluggy"))}


@attrs.define(eq=False)
class Recorder:
    """The profiler of all threads that start after `recording` began."""

    _call: Call | None = None
    _system_call: str = ""
    _caller: int = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401 - the profiler's own
        """Take one event of the profiler."""
        call = self._call
        if call is None:
            return
        name = getattr(arg, "__name__", "")
        if event == "call":
            module = str(frame.f_globals.get("__name__", ""))
            if module != __name__:
                call.functions.append((module, frame.f_code.co_qualname))
        elif event == "c_call":
            call.c_functions += 1
            outside = getattr(arg, "__module__", "") in {"posix", "fcntl"}
            call.system_calls += outside and name not in TRANSFERS
            call.handoffs += getattr(arg, "__qualname__", "") == "SimpleQueue.put"
        compiled = event == "call" and frame.f_code is native.Movement.move.__code__
        begun = event == "c_call" and name == self._system_call
        if (compiled or begun) and not call.stack:
            # The caller waits by now: its frames do not change.
            waiting = sys._current_frames()[self._caller]  # noqa: SLF001 - documented
            call.stack = [*_stack(waiting), *_stack(frame)]

    def record(self, operation: str, move: Callable[[], object]) -> Call:
        """Make one call and return what it did."""
        call = Call()
        reading = -transfers() + transfers()
        before = transfers()
        self._caller = threading.get_ident()
        self._system_call = SYSTEM_CALLS.get(operation, "")
        sys.setprofile(self)
        self._call = call
        try:
            move()
        finally:
            self._call = None
            sys.setprofile(None)
        call.system_calls += transfers() - before - reading
        return call


def _stack(frame: FrameType | None) -> list[str]:
    """Return the functions from the outermost to `frame`."""
    functions = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename == __file__:
            break
        if code.co_filename not in _BOOTSTRAP:
            file = "/".join(Path(code.co_filename).parts[-2:])
            functions.append(f"{file}:{code.co_qualname}")
        frame = frame.f_back
    return functions[::-1]


def transfers() -> int:
    """Return how many calls that read or write this process has made."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["syscr"]) + int(counts["syscw"])


@contextmanager
def recording() -> Iterator[Recorder]:
    """Yield what records calls: workers take it when they are first needed."""
    recorder = Recorder()
    threading.setprofile(recorder)
    try:
        yield recorder
    finally:
        threading.setprofile(None)


@contextmanager
def attached(
    pools: int = 1, page_bytes: int = 4096, quota_bytes: int = 1 << 30
) -> Iterator[Attachment]:
    """Yield the pools `pool0` and so on, over one empty file store."""
    width = page_bytes // (2 * 2 * 2 * 8 * 8)
    specs = [
        PoolSpec(
            name=f"pool{number}", kind=PoolKind.MHA, layers=range(2), page_tokens=8,
            parts=[Part(name, "bf16", (8, width), shard_axis=0) for name in "kv"],
            anchor=not number,
        )
        for number in range(pools)
    ]  # fmt: skip
    dock = Dock.load(require=["file"])
    plan = dock.plan(specs, Shard(), prefer=["file"])
    memory = [np.ones((BATCH, page_bytes), np.uint8) for _ in specs]
    regions = {
        spec.name: Region.of(spec, Shard(), [pages], BATCH)
        for spec, pages in zip(specs, memory, strict=True)
    }
    with tempfile.TemporaryDirectory() as root:
        settings = {"file": {"root": root, "free_space": 0, "quota": quota_bytes}}
        with Attachment.open(
            dock, plan, Namespace(model="m"), regions, settings
        ) as cache:
            yield cache


def moves(
    cache: Attachment, pages: int, pools: int = 1
) -> Iterator[dict[str, Callable[[], object]]]:
    """Yield, of new pages each time, what puts them, looks them up and gets them."""
    numbers = {f"pool{number}": np.arange(pages) for number in range(pools)}
    turn = 0
    while True:
        names = [f"{turn:032x}{page:032x}" for page in range(pages)]
        yield {
            "put": partial(cache.put, names, numbers),
            "exists": partial(cache.exists, names),
            "get": partial(cache.get, names, numbers),
        }
        turn += 1


def warm_calls(pages: int, page_bytes: int = 4096) -> dict[str, list[Call]]:
    """Return what warm calls did: files are open, threads run, nothing is read anew."""
    calls: dict[str, list[Call]] = {"get": [], "exists": [], "put": []}
    with recording() as recorder, attached(page_bytes=page_bytes) as cache:
        turns = moves(cache, pages)
        first = next(turns)
        for operation in ("put", "exists", "get"):
            first[operation]()
        for operation in ("get", "exists"):
            end_s = time.monotonic() + SETTLING_S
            while len(calls[operation]) < WARM_CALLS or time.monotonic() < end_s:
                calls[operation].append(recorder.record(operation, first[operation]))
        for _ in range(WARM_CALLS):
            calls["put"].append(recorder.record("put", next(turns)["put"]))
    return calls


def usual(calls: list[Call]) -> Call:
    """Return a call with the count that most of them have."""
    counts = Counter(len(call.functions) for call in calls)
    count = min(counts, key=lambda count: (-counts[count], count))
    return next(call for call in calls if len(call.functions) == count)


def full_store(turns: int = 60) -> list[Call]:
    """Return what puts did in a store of 31 batches that is full."""
    calls: list[Call] = []
    with recording() as recorder, attached(quota_bytes=16 << 20) as cache:
        for turn, move in zip(range(2 * turns), moves(cache, BATCH), strict=False):
            move["exists"]()
            if turn < turns:
                move["put"]()
            else:
                calls.append(recorder.record("put", move["put"]))
            move["get"]()
    return calls


def handoffs(turns: int = 5) -> dict[str, int]:
    """Return the most hand-offs of a call with four pools."""
    most: Counter[str] = Counter()
    with recording() as recorder, attached(pools=4) as cache:
        for turn, move in zip(range(turns), moves(cache, BATCH, 4), strict=False):
            for operation in ("put", "get"):
                call = recorder.record(operation, move[operation])
                if turn:
                    most[operation] = max(most[operation], call.handoffs)
    return most


def warm_figures(calls: dict[str, list[Call]], pages: int) -> dict[str, float]:
    """Return the figures of warm calls of `pages` pages."""
    figures: dict[str, float] = {}
    for operation, recorded in calls.items():
        call = usual(recorded)
        figures[f"{operation}_{pages}_calls"] = len(call.functions)
        if pages == 1:
            figures[f"{operation}_modules"] = len(call.modules)
            figures[f"{operation}_records"] = call.records
            figures[f"{operation}_system_calls"] = call.system_calls
            if operation in SYSTEM_CALLS:
                figures[f"{operation}_frames"] = len(call.stack)
    return figures


def main(arguments: list[str]) -> int:
    """Print the figures; return 1 if no system call was seen."""
    began_s = time.monotonic()
    status = 0
    one_page = warm_calls(1)
    figures = warm_figures(one_page, 1) | warm_figures(warm_calls(BATCH), BATCH)
    for operation, system_call in SYSTEM_CALLS.items():
        call = usual(one_page[operation])
        if not call.stack:
            print(f"{operation}: no {system_call} was seen")
            status = 1
        if "--stacks" in arguments:
            print(f"{operation} of one page:")
            print(*(f"  {function}" for function in call.stack), sep="\n")
            print(*(f"  {module}" for module in sorted(call.modules)), sep="\n")
    for operation, most in handoffs().items():
        figures[f"{operation}_handoffs"] = most
    for operation, calls in warm_calls(BATCH, 64 << 10).items():
        if operation in SYSTEM_CALLS:
            figures[f"{operation}_large_calls"] = len(usual(calls).functions)
    full = full_store()
    for name, counts in (
        ("calls", [len(call.functions) + call.c_functions for call in full]),
        ("system_calls", [call.system_calls for call in full]),
    ):
        figures[f"put_full_{name}"] = round(mean(counts), 1)
    for name, count in figures.items():
        print(f"{name:24} {count:6}")
    print(f"measured in {time.monotonic() - began_s:.1f} s")
    print(json.dumps(figures))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
