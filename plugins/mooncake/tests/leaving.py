"""A process that ends while calls of the library run, or whose child does.

Usage: python leaving.py MASTER exit|terminate|raise|fork
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from kvdock import Namespace

STATUS = 3


def keep_calling(pool: Any, hashes: list[str]) -> None:
    """Load pages for as long as the process lives."""
    while True:
        pool.attachment.get(hashes, {pool.name: np.arange(len(hashes))})


def leave(*_: object) -> None:
    """End the process from the main thread, as a host's signal handler does."""
    sys.exit(STATUS)


def main(master: str, how: str) -> None:
    """Store and load pages on several threads, and end."""
    # Beside this script; not there where its tests are collected.
    from engine import DRAFT, HASHES, PAGES, TARGET, Pool

    pools = [
        Pool.attach(one, Namespace(model=one.name), master) for one in (TARGET, DRAFT)
    ]
    for pool in pools:
        assert pool.move("put")["good"] == PAGES
    if how == "fork":
        child = os.fork()
        if not child:
            sys.stdout.write("the child ends\n")
            sys.exit(STATUS)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == STATUS, status
        assert all(pool.move("get")["same"] for pool in pools)
        sys.exit(STATUS)
    for pool in pools * 2:
        threading.Thread(target=keep_calling, args=(pool, HASHES), daemon=True).start()
    time.sleep(0.3)
    if how == "terminate":
        signal.signal(signal.SIGTERM, leave)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    if how == "raise":
        raise RuntimeError("a defect of the host")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
