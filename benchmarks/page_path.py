"""Count the frames and the files between an engine's call and the system call.

Usage: python benchmarks/page_path.py [--stacks]

One warm `Attachment.get` and one `Attachment.put` of four pages run on the
file backend under `sys.setprofile`, in the caller's thread and in the workers.
Frames are the caller's stack from `Attachment` on, while it waits, and the
worker's stack at the first system call, or at the compiled code that makes it, the
plugin relay included. Files are
those of kvdock's packages and of pluggy whose functions run between the two;
numpy and the standard library are not counted. Above a limit the script says
so and ends with status 1; the last line is JSON.

Then it counts what whole calls do, in all threads: function calls of Python and C,
and system calls, those of compiled code as the kernel counts them, of 128 pages in a
full store, on average; and hand-offs to other threads of a call with four pools.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
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

LIMITS = {"get": (20, 25), "put": (22, 27)}
"""Operation to the most frames and the most files."""

COUNT_LIMITS = {
    "put_calls": 1800,
    "put_system_calls": 52,
    "put_handoffs": 1,
    "get_calls": 1000,
    "get_system_calls": 18,
    "get_handoffs": 1,
}
"""Figure to the most that a call may do."""

SYSTEM_CALLS = {"put": "pwritev", "get": "preadv"}
TRANSFERS = {"read", "readv", "write", "writev", "pread", "preadv", "pwrite", "pwritev"}
PAGES = 4
BATCH = 128
_BOOTSTRAP = {threading.__file__}
"""What starts a thread is not a step of a page."""


@attrs.define(eq=False)
class Recorder:
    """What one call went through, in all threads."""

    system_call: str = ""
    caller: int = 0
    files: set[str] = attrs.field(factory=set)
    stack: list[str] = attrs.field(factory=list)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401 - the profiler's own
        """Take one event of the profiler."""
        if not self.system_call:
            return
        if event == "call":
            self._note(frame)
            compiled = frame.f_code is native.Movement.move.__code__
        else:
            compiled = False
        begun = event == "c_call" and getattr(arg, "__name__", "") == self.system_call
        if (compiled or begun) and not self.stack:
            # The caller waits by now: its frames do not change.
            waiting = sys._current_frames()[self.caller]  # noqa: SLF001 - documented
            self.stack = [*_stack(waiting), *_stack(frame)]

    def _note(self, frame: FrameType) -> None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        ours = package.startswith(("kvdock", "pluggy"))
        # What attrs generates is compiled from no file.
        if ours and not self.stack and not frame.f_code.co_filename.startswith("<"):
            self.files.add(frame.f_code.co_filename)


def _stack(frame: FrameType | None) -> list[str]:
    """Return the functions from the outermost to `frame`."""
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename == __file__:
            break
        if code.co_filename not in _BOOTSTRAP:
            found.append(f"{_short(code.co_filename)}:{code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def record(recorder: Recorder, operation: str, call: Callable[[], object]) -> None:
    """Make one call and keep what it went through."""
    recorder.files, recorder.stack = set(), []
    recorder.caller = threading.get_ident()
    sys.setprofile(recorder)
    recorder.system_call = SYSTEM_CALLS[operation]
    try:
        call()
    finally:
        recorder.system_call = ""
        sys.setprofile(None)


def gets() -> Iterator[tuple[str, int]]:
    """Yield turns of get until a folder that was changed before is settled."""
    end_s = time.monotonic() + 0.2
    while time.monotonic() < end_s:
        yield "get", 0


def measure() -> dict[str, tuple[list[str], list[str]]]:
    """Return the stack and the files of each operation, on the file backend."""
    pool = PoolSpec(
        name="kv", kind=PoolKind.K_ONLY, parts=[Part("k", "f16", (8, 64))],
        layers=range(2), page_tokens=16, anchor=True,
    )  # fmt: skip
    recorder = Recorder()
    found: dict[str, tuple[list[str], list[str]]] = {}
    # Workers start when they are first needed, and take it from here.
    threading.setprofile(recorder)
    try:
        with tempfile.TemporaryDirectory() as root:
            dock = Dock.load(require=["file"])
            plan = dock.plan([pool], Shard(), prefer=["file"])
            memory = np.ones((4 * PAGES, pool.page_bytes(Shard())), np.uint8)
            regions = {"kv": Region.of(pool, Shard(), [memory], len(memory))}
            settings = {"file": {"root": root, "free_space": 0}}
            with Attachment.open(
                dock, plan, Namespace(model="m"), regions, settings
            ) as cache:
                # Warm: files are open, threads are running, and the folder was
                # read since it changed, which is not on the way of each page.
                # It goes on being read until its time of change is 12 ms old.
                for operation, turn in chain((("put", at) for at in range(5)), gets()):
                    names = [f"{turn * PAGES + at:064x}" for at in range(PAGES)]
                    move = getattr(cache, operation)
                    pages = {"kv": np.arange(PAGES)}
                    record(recorder, operation, lambda: move(names, pages))  # noqa: B023 - called at once
                    found[operation] = (recorder.stack, sorted(recorder.files))
    finally:
        threading.setprofile(None)
    return found


def transfers() -> int:
    """Return how many calls that read or write this process has made."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["syscr"]) + int(counts["syscw"])


@attrs.define(eq=False)
class Tally:
    """What calls do, in all threads that were started after `threading.setprofile`."""

    operation: str = ""
    counts: Counter[str] = attrs.field(factory=Counter)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401, ARG002 - the profiler's own
        """Take one event of the profiler."""
        if not self.operation or event not in {"call", "c_call"}:
            return
        self.counts[f"{self.operation}_calls"] += 1
        module, name = getattr(arg, "__module__", ""), getattr(arg, "__name__", "")
        if module in {"posix", "fcntl"} and name not in TRANSFERS:
            self.counts[f"{self.operation}_system_calls"] += 1
        if getattr(arg, "__qualname__", "") == "SimpleQueue.put":
            self.counts[f"{self.operation}_handoffs"] += 1

    def count(self, operation: str, call: Callable[[], object]) -> None:
        """Make one call and add what it does."""
        own = -transfers() + transfers()
        before = transfers()
        sys.setprofile(self)
        self.operation = operation
        try:
            call()
        finally:
            self.operation = ""
            sys.setprofile(None)
        self.counts[f"{operation}_system_calls"] += transfers() - before - own


def attached(root: str, pools: int) -> Attachment:
    """Attach pools of 4 KiB a page over one file store, of 4,000 pages for one pool."""
    specs = [
        PoolSpec(
            name=f"pool{at}", kind=PoolKind.K_ONLY, parts=[Part("k", "u8", (256,))],
            layers=[0], page_tokens=16, anchor=not at,
        )
        for at in range(pools)
    ]  # fmt: skip
    dock = Dock.load(require=["file"])
    plan = dock.plan(specs, Shard(), prefer=["file"])
    memory = [np.ones((BATCH, 4096), np.uint8) for _ in specs]
    regions = {
        one.name: Region.of(one, Shard(), [its], BATCH)
        for one, its in zip(specs, memory, strict=True)
    }
    settings = {
        "file": {
            "root": root,
            "free_space": 0,
            "quota": (16 if pools == 1 else 1024) << 20,
        }
    }
    return Attachment.open(dock, plan, Namespace(model="m"), regions, settings)


def counts() -> dict[str, float]:
    """Return the figures of `COUNT_LIMITS`."""
    found: dict[str, float] = {}
    for pools, turns, kinds in (
        (1, 60, ("calls", "system_calls")),
        (4, 5, ("handoffs",)),
    ):
        pages = {f"pool{at}": np.arange(BATCH) for at in range(pools)}
        tally = Tally()
        threading.setprofile(tally)
        try:
            with tempfile.TemporaryDirectory() as root, attached(root, pools) as cache:
                for turn in range(2 * turns):
                    names = [f"{turn:032x}{at:032x}" for at in range(BATCH)]
                    cache.exists(names)
                    for operation in SYSTEM_CALLS:
                        move = partial(getattr(cache, operation), names, pages)
                        if turn < turns:  # until the store is full
                            move()
                        else:
                            tally.count(operation, move)
        finally:
            threading.setprofile(None)
        for kind in kinds:
            for operation in SYSTEM_CALLS:
                name = f"{operation}_{kind}"
                found[name] = tally.counts[name] / turns
    return found


def main(arguments: list[str]) -> int:
    """Print the figures; return 1 if one is above its limit."""
    began = time.monotonic()
    figures: dict[str, float] = {}
    status = 0
    for operation, (stack, files) in measure().items():
        most_frames, most_files = LIMITS[operation]
        figures |= {f"{operation}_frames": len(stack), f"{operation}_files": len(files)}
        print(
            f"{operation}: {len(stack)} frames (at most {most_frames}) through "
            f"{len(files)} files (at most {most_files})"
        )
        if "--stacks" in arguments:
            print(*(f"  {one}" for one in stack), sep="\n")
            print(*(f"  {_short(one)}" for one in files), sep="\n")
        if not stack:
            print(f"{operation}: no {SYSTEM_CALLS[operation]} was seen")
            status = 1
        if len(stack) > most_frames or len(files) > most_files:
            print(f"{operation}: above the limit; see --stacks")
            status = 1
    for name, count in counts().items():
        figures[name] = round(count, 1)
        print(f"{name}: {count:.1f} (at most {COUNT_LIMITS[name]})")
        if count > COUNT_LIMITS[name]:
            print(f"{name}: above the limit")
            status = 1
    print(f"measured in {time.monotonic() - began:.1f} s")
    print(json.dumps(figures))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
