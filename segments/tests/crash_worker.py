"""One process of the crash trial: writes or reads pages until it is killed.

Run as `python crash_worker.py ROOT ROLE SEED`. Whatever is read must be what
its key says; anything else is written to ROOT.wrong and ends the process.
"""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdock.batch import Batch, Operation
from kvdock_segments import PosixIOEngine, SegmentSettings, SegmentStore, StoreLocation

Numbers = npt.NDArray[np.int64]

NAMESPACE = "c0" * 32
PAGE_BYTES = 8192
KEYS = 1500
QUOTA = 6 << 20
_WORDS = np.arange(PAGE_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def pages_of(numbers: Numbers) -> npt.NDArray[np.uint8]:
    """Return the only right bytes of pages, uint8 (n, PAGE_BYTES)."""
    words: npt.NDArray[np.uint64] = _WORDS + numbers.astype(np.uint64)[:, None]
    return words.view(np.uint8)


def keys_of(numbers: Numbers) -> list[str]:
    return [f"{NAMESPACE}/{number:032x}.kv" for number in numbers.tolist()]


def open_store(root: Path) -> SegmentStore:
    place = StoreLocation(
        root=root, namespace=NAMESPACE, pool="kv", object_bytes=(PAGE_BYTES,)
    )
    settings = SegmentSettings(root, QUOTA, free_space=0, segment_bytes=256 << 10)
    return SegmentStore(place, PosixIOEngine(2), settings)


def batch(
    operation: Operation, numbers: Numbers, memory: npt.NDArray[np.uint8]
) -> Batch:
    addresses = memory.ctypes.data + np.arange(len(numbers)) * PAGE_BYTES
    sizes = np.broadcast_to(np.int64(PAGE_BYTES), (len(numbers), 1))
    return Batch(operation, keys_of(numbers), addresses.reshape(-1, 1), sizes)


def check(store: SegmentStore, numbers: Numbers) -> tuple[int, list[int]]:
    """Read pages; return how many were there, and those that are wrong."""
    memory = np.zeros((len(numbers), PAGE_BYTES), np.uint8)
    ok = store.run(batch(Operation.GET, numbers, memory)).ok
    right = (memory == pages_of(numbers)).all(axis=1)
    return int(ok.sum()), numbers[ok & ~right].tolist()


def main(root: Path, role: str, seed: int) -> None:
    store = open_store(root)
    rng = np.random.default_rng(seed)
    rounds = 0
    while True:
        numbers = rng.choice(KEYS, 24, replace=False)
        if role == "write":
            memory = pages_of(numbers)
            store.run(batch(Operation.PUT, numbers, memory))
        _, wrong = check(store, rng.choice(KEYS, 24, replace=False))
        if wrong:
            Path(f"{root}.wrong").write_text(f"{role} {seed}: {wrong}\n")
            raise SystemExit(1)
        rounds += 1
        if rounds == 3:
            print("going", flush=True)  # noqa: T201 - the trial waits for it


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
