"""The network that tests of NIXL run in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_MINE = Path("/proc/thread-self/ns/net")
_FIRST = os.open(_MINE, os.O_RDONLY | os.O_CLOEXEC) if _MINE.exists() else -1
"""The network of this process as it began: tests are collected before any is run."""


@pytest.fixture(scope="module", autouse=True)
def first_network() -> Iterator[None]:
    """Run each module in the network in which UCX was first used.

    Tests of other packages leave this thread in a network of its own. UCX looks once
    in a process, and then finds that a peer of now is in another one.
    """
    if _FIRST < 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(_MINE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc.setns(_FIRST, _CLONE_NEWNET)
        yield
        libc.setns(before, _CLONE_NEWNET)
    finally:
        os.close(before)
