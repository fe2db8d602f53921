"""An engine over rings with memory and files of its own, and pages with known bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import Block, HostMemory
from kvdock_hf3fs import library
from kvdock_hf3fs.engine import UsrbioEngine
from kvdock_hf3fs.rings import Rings
from kvdock_hf3fs.shared_memory import IOVS
from kvdock_segments import IORequest, IOResult

PAGE = 8192
BLANK = 0xA5


@attrs.define(eq=False)
class Rig:
    """An engine, memory for its pages, and one file of slots."""

    engine: UsrbioEngine
    rings: Rings
    memory: npt.NDArray[np.uint8]
    folder: int
    token: int
    loan: HostMemory

    def request(
        self,
        slots: Sequence[int],
        *,
        write: bool,
        at: Sequence[int] | None = None,
        within_s: float = 30.0,
        parts: int = 1,
    ) -> IORequest:
        """Ask for slots of the file, from or to pages of the memory."""
        places = np.array(slots if at is None else at)
        start = self.memory.ctypes.data + places * PAGE
        size = PAGE // parts
        addresses = start[:, None] + np.arange(parts) * size
        return IORequest(
            write=write,
            files=(self.token,),
            file_of=np.zeros(len(slots), np.int64),
            offsets=np.array(slots) * PAGE,
            addresses=addresses.astype(np.int64),
            sizes=np.full((len(slots), parts), size),
            deadline_s=time.monotonic() + within_s,
        )

    def write(self, slots: Sequence[int], seed: int = 0, **more: Any) -> IOResult:
        """Write pages that follow from slot and seed."""
        for slot in slots:
            self.memory[slot] = page(slot, seed)
        return self.engine.move(self.request(slots, write=True, **more))

    def read(self, slots: Sequence[int], **more: Any) -> IOResult:
        """Read pages into blank memory."""
        self.memory[:] = BLANK
        return self.engine.move(self.request(slots, write=False, **more))

    def right(self, slots: Sequence[int], seed: int = 0) -> list[bool]:
        """Return which pages of the memory have their own bytes."""
        return [bool((self.memory[slot] == page(slot, seed)).all()) for slot in slots]


def page(slot: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    words = np.arange(PAGE // 8, dtype=np.uint64) * np.uint64(2**61 + 9)
    return (words + np.uint64(slot * 1009 + seed * 7919 + 1)).view(np.uint8)


@contextmanager
def opened(
    mount: Path,
    *,
    pages: int = 64,
    entries: int = 16,
    rings: int = 8,
    block: int = 0,
) -> Iterator[Rig]:
    """Make an engine with an empty file of as many slots."""
    usrbio = library.load()
    loan = IOVS.allocate(usrbio, str(mount), pages * PAGE, block=block)
    memory = loan.buffer.reshape(pages, PAGE)
    iovs = IOVS.hold([Block(memory.ctypes.data, memory.nbytes)])
    shared = Rings(usrbio, str(mount), entries, rings)
    shared.join()
    engine = UsrbioEngine(usrbio, shared, iovs, chunk=PAGE, block=block)
    name = f"rig-{os.urandom(8).hex()}"
    folder = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    token = engine.open_file(name, folder, create=True)
    engine.preallocate(token, pages * PAGE)
    try:
        yield Rig(engine, shared, memory, folder, token, loan)
    finally:
        engine.close_file(token)
        engine.close()
        loan.give_back()
        os.unlink(name, dir_fd=folder)
        os.close(folder)


def ring_threads() -> int:
    """Return how many threads of the fake are alive."""
    return sum(one.name == "fake-3fs" for one in threading.enumerate())
