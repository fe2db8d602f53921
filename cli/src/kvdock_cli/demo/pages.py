"""The pools of the demo, and what their pages hold."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvdock import NO_PAGE, Namespace
from kvdock.pools import mamba, mha

if TYPE_CHECKING:
    from kvdock import PoolSpec
    from kvdock.arrays import ByteArray, Int64Array

PAGES = 48
"""Pages of the prompt."""

STATE_EVERY = 8
"""A recurrent state is stored behind each so many pages."""

NAMESPACE = Namespace(model="kvdock-demo")


def pools() -> tuple[PoolSpec, ...]:
    """Return the pools of a hybrid model: attention, states, and those of a draft."""
    attention = partial(mha, page_tokens=16, heads=4, head_dim=128)
    return (
        attention("kv", layers=range(1, 8, 2), anchor=True),
        mamba(
            "mamba",
            layers=range(0, 8, 2),
            page_tokens=16,
            temporal=(16, 64, 64),
            conv=[(512, 3)],
        ),
        attention("draft", layers=(8,), draft=True, required=False, indices_from="kv"),
    )


def hashes(prompt: str, pages: int = PAGES) -> list[str]:
    """Return the hashes of a prompt's pages."""
    return [
        hashlib.sha256(f"{prompt}/{page}".encode()).hexdigest() for page in range(pages)
    ]


def positions(pool: PoolSpec, pages: int) -> Int64Array:
    """Return the page of a pool for each position, int64 (n,); some have none."""
    where = np.arange(pages, dtype=np.int64)
    if pool.anchor or pool.indices_from:
        return where
    return np.where((where + 1) % STATE_EVERY == 0, where, NO_PAGE)


def content(pool: str, page_hash: str, nbytes: int) -> ByteArray:
    """Return what a page holds, uint8 (nbytes,): the same in every process."""
    seed = hashlib.sha256(f"{pool}/{page_hash}".encode()).digest()
    return np.random.default_rng([*seed]).integers(0, 256, nbytes, np.uint8)
