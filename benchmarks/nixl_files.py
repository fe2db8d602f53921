"""Measure the nixl backend against the file backend and against NIXL alone.

Usage: python benchmarks/nixl_files.py [--rounds N] [--dir DIR]

The clients take turns within a round, in an order of its own, on the same pages in
the same memory: the nixl and the file backend through whole attachments, NIXL's own
calls for the same descriptors, and those calls followed by the checksums without
which no page may be served. Stores have room for twelve batches, so that files are
written again and again, each batch over one of the oldest, and the first rounds, which
touch new memory of the page cache and check each byte, are not counted. A ratio is the
median over the rounds. The last line is a JSON object, which with more figures is also
written to benchmarks/results/nixl.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from clients import PATIENT, Client, Kvdock, Memory, finish, nixl_agent, pool_of
from machine import describe

from kvdock import Attachment, Dock, Namespace, Region, Shard
from kvdock.config import CoreSettings
from kvdock_segments import checksums

SIZES = {"64k": (64 << 10, 128), "1m": (1 << 20, 32)}
"""Bytes and number of the pages of a batch: 8 and 32 MiB."""

MODES: dict[str, tuple[dict[str, object], bool]] = {
    "buffered": ({}, False),
    "direct": ({"direct": True}, True),
    "aio": ({"direct": True, "io": "aio"}, True),
}
"""Settings of the nixl backend, and whether the others bypass the page cache."""

BATCHES = 12
WARM_ROUNDS = BATCHES + 2
RESULT = Path(__file__).parent / "results" / "nixl.json"


@attrs.define
class Raw:
    """NIXL's own calls: one transfer for a batch, and polling."""

    agents: dict[str, Any]
    memory: Memory
    fd: int
    sums: bool
    slots: dict[str, npt.NDArray[np.int64]] = attrs.field(factory=dict)
    turn: int = 0

    @classmethod
    def open(
        cls, folder: Path, memory: Memory, io: str, *, direct: bool, sums: bool
    ) -> Raw:
        """Make the agents, and register the memory and a file."""
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        fd = os.open(folder / f"raw-{sums}", flags, 0o600)
        os.posix_fallocate(fd, 0, BATCHES * memory.nbytes)
        agents = {}
        for way in ("WRITE", "READ"):
            agent = nixl_agent(f"bench-{way}-{io}-{sums}")
            agent.create_backend("POSIX", {io: "true"})
            agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
            agent.register_memory([(0, BATCHES * memory.nbytes, fd, "")], "FILE")
            agents[way] = agent
        return cls(agents, memory, fd, sums)

    def put(self, hashes: Sequence[str]) -> None:
        """Write all pages."""
        pages = len(self.memory)
        self.turn = (self.turn + 1) % BATCHES
        self.slots[hashes[0]] = self.turn * pages + np.arange(pages)
        if self.sums:
            self._sum()
        self._move("WRITE", self.slots[hashes[0]])

    def get(self, hashes: Sequence[str]) -> None:
        """Read all pages."""
        self._move("READ", self.slots.pop(hashes[0]))
        if self.sums:
            self._sum()

    def _sum(self) -> None:
        pages, page_bytes = self.memory.shape
        at = self.memory.ctypes.data + np.arange(pages).reshape(-1, 1) * page_bytes
        checksums(at, np.full((pages, 1), page_bytes))

    def _move(self, way: str, slots: npt.NDArray[np.int64]) -> None:
        pages, page_bytes = self.memory.shape
        agent = self.agents[way]
        memory = np.zeros((pages, 3), np.uint64)
        file = np.empty((pages, 3), np.uint64)
        memory[:, 0] = self.memory.ctypes.data + np.arange(pages) * page_bytes
        memory[:, 1] = file[:, 1] = page_bytes
        file[:, 0], file[:, 2] = slots * page_bytes, self.fd
        finish(
            agent,
            way,
            agent.get_xfer_descs(memory, "DRAM"),
            agent.get_xfer_descs(file, "FILE"),
        )


@contextmanager
def kvdock(
    backend: str, folder: Path, memory: Memory, **settings: object
) -> Iterator[Kvdock]:
    """Attach the memory as a pool."""
    pool, pages = pool_of(memory), len(memory)
    dock = Dock.load(require=(backend,))
    given = {
        "root": str(folder / backend),
        "free_space": 0,
        "quota": BATCHES * memory.nbytes + (4 << 20),
        "segment_bytes": memory.nbytes,
        **settings,
    }
    with Attachment.open(
        dock,
        dock.plan([pool], Shard(), (backend,)),
        Namespace(model="bench"),
        {"kv": Region.of(pool, Shard(), (memory,), pages)},
        {backend: given},
        core=CoreSettings(deadlines=PATIENT),
    ) as attachment:
        yield Kvdock(attachment, pages)


def race(
    clients: dict[str, Client], memory: Memory, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Let the clients take turns; return step and client to seconds."""
    right = memory.copy()
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + WARM_ROUNDS):
        hashes = [f"{turn:032x}{page:032x}" for page in range(len(memory))]
        for name in np.random.default_rng(turn).permutation([*clients]).tolist():
            client = clients[name]
            if isinstance(client, Kvdock):
                client.attachment.exists(hashes)
            for step, call in (("put", client.put), ("get", client.get)):
                if step == "get" and turn < WARM_ROUNDS:
                    # Later it would fill the caches of this thread's processor, which
                    # those who move bytes on a thread of their own have no use of.
                    memory[:] = 0
                gc.collect()
                began = time.perf_counter()
                call(hashes)
                took = time.perf_counter() - began
                if turn >= WARM_ROUNDS:
                    seconds.setdefault((step, name), []).append(took)
            if not (memory == right).all():
                raise SystemExit(f"{name} moved wrong bytes")
    return seconds


def figures_of(
    seconds: dict[tuple[str, str], list[float]], nbytes: int
) -> dict[str, float]:
    """Return speeds, and the ratios of the others' times to those of nixl."""
    found = {
        f"{step}_{name}_gb_s": nbytes / 1e9 / statistics.median(took)
        for (step, name), took in seconds.items()
    }
    for (step, name), took in seconds.items():
        if name != "nixl":
            rounds = zip(took, seconds[step, "nixl"], strict=True)
            found[f"{step}_vs_{name}"] = statistics.median(
                theirs / mine for theirs, mine in rounds
            )
    return found


def main() -> None:
    """Run everything once and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dir", type=Path, default=None)
    given = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    figures: dict[str, float] = {}
    for mode, (settings, direct) in MODES.items():
        for label, (page_bytes, pages) in SIZES.items():
            mapped = mmap.mmap(-1, pages * page_bytes)
            memory = np.frombuffer(mapped, np.uint8).reshape(pages, page_bytes)
            memory[:] = np.random.default_rng(1).integers(
                0, 256, memory.shape, np.uint8
            )
            io = "use_aio" if "io" in settings else "use_uring"
            with (
                tempfile.TemporaryDirectory(dir=given.dir) as name,
                ExitStack() as stack,
            ):
                folder = Path(name)
                folder.chmod(0o700)
                nixl = kvdock("nixl", folder, memory, **settings)
                file = kvdock("file", folder, memory, direct=direct)
                clients: dict[str, Client] = {
                    "nixl": stack.enter_context(nixl),
                    "file": stack.enter_context(file),
                }
                for sums in (False, True):
                    raw = Raw.open(folder, memory, io, direct=direct, sums=sums)
                    stack.callback(os.close, raw.fd)
                    clients["raw_summed" if sums else "raw"] = raw
                found = figures_of(race(clients, memory, given.rounds), memory.nbytes)
            for key, value in found.items():
                figures[f"{mode}_{label}_{key}"] = round(value, 3)
                print(f"{mode}_{label}_{key}: {value:.3f}")
    RESULT.write_text(
        json.dumps({"machine": describe(), "figures": figures}, indent=1) + "\n"
    )
    ratios = {key: value for key, value in figures.items() if "_vs_" in key}
    sys.stdout.write(json.dumps(ratios) + "\n")


if __name__ == "__main__":
    main()
