"""A host that stores, evicts and reads until it is killed."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from typing import Any

import threefs
from attached import OK, attached
from stale import StaleAttributes

from kvdock import Dock
from kvdock_hf3fs import store
from kvdock_segments import ownership

# A server forks hosts: what it has imported costs them nothing.
WARM = Dock.load(require=("hf3fs",)), store

KEYS = 400
RUN = 20
SETTINGS = {"free_space": 0, "quota": "4 MiB", "segment_bytes": "256 KiB"}


def live(root: str, mount: str, seed: int, scale: float, report: Any) -> None:
    """Store and read pages at random; report counts after each round.

    Args:
        root: The store, shared with the other host.
        mount: The mount that both use.
        seed: Of what is drawn.
        scale: How many times faster caches expire and writers count as dead.
        report: Gets hits, misses and what was stored, or the text of a failure.
    """
    threefs.use()
    logging.disable(logging.WARNING)
    if not threefs.REAL:
        from hf3fs_fuse import io  # noqa: F401 - it keeps the real system calls

        StaleAttributes(scale).install()
    ownership.SILENCE_S /= scale
    ownership.ABANDONED_S /= scale
    rng = random.Random(seed)  # noqa: S311 - not a secret
    try:
        settings = {"root": root, "mount": mount, **SETTINGS}
        with attached(settings) as engine:
            while True:
                counts: Counter[str] = Counter()
                first = rng.randrange(KEYS - RUN)
                counts["put"] += engine.put(range(first, first + RUN)).count(OK)
                for _ in range(3):
                    first = rng.randrange(KEYS - RUN)
                    found = engine.get(range(first, first + RUN))
                    counts["hit"] += found.count(OK)
                    counts["miss"] += RUN - found.count(OK)
                report.put((seed, dict(counts)))
                time.sleep(0.002 if scale > 1 else 0.2)
    except BaseException as error:
        report.put((seed, repr(error)))
        raise
