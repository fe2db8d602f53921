"""The pools of the demo, and what their pages hold."""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from kvdock import NO_PAGE, Namespace
from kvdock.models import Assembly, Deployment, assemble, parse_description

if TYPE_CHECKING:
    from kvdock import PoolSpec
    from kvdock.arrays import ByteArray, Int64Array

PAGES = 48
"""Pages of the prompt."""

STATE_EVERY = 8
"""A recurrent state is stored behind each so many pages."""

NAMESPACE = Namespace(model="kvdock-demo")

MODEL = MappingProxyType(
    {
        "model": "kvdock-demo",
        "summary": "a hybrid model with a draft: attention, states, a draft layer",
        "layers": 8,
        "page_tokens": 16,
        "pools": [
            {
                "family": "mha", "name": "kv", "anchor": True, "layers": "1-7:2",
                "heads": 4, "head_dim": 128,
            },
            {
                "family": "mamba", "name": "mamba", "layers": "0-6:2",
                "temporal": [16, 64, 64], "conv": [[512, 3]],
            },
        ],
        "drafts": {
            "mtp": {
                "summary": "one attending layer",
                "layers": 1,
                "pools": [
                    {
                        "family": "mha", "name": "draft", "indices_from": "kv",
                        "heads": 4, "head_dim": 128,
                    }
                ],
            }
        },
    }
)  # fmt: skip


def assembly() -> Assembly:
    """Return the pools: attention, states, and those of a draft."""
    return assemble(parse_description("demo", MODEL), Deployment(), draft="mtp")


def hashes(prompt: str, pages: int = PAGES) -> list[str]:
    """Return the hashes of a prompt's pages: each covers all before it."""
    found, last = [], prompt
    for page in range(pages):
        last = hashlib.sha256(f"{last}/{page}".encode()).hexdigest()
        found.append(last)
    return found


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
