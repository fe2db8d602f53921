"""One engine process of the example: stores pages, or reads and checks them."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from kvdock import Attachment, Dock, Namespace, Outcome, PoolSpec, Region, Shard
from kvdock.pools import Part

POOL = PoolSpec(
    name="kv",
    kind="mla",
    parts=(Part("kv", "bf16", (512,)),),
    layers=range(4),
    page_tokens=64,
    anchor=True,
)


def main(master: str, what: str, pages: int) -> None:
    """Put pages, or get them and compare every byte."""
    shard = Shard()
    page_bytes = POOL.page_bytes(shard)
    hashes = [hashlib.sha256(str(page).encode()).hexdigest() for page in range(pages)]
    right = np.random.default_rng(7).integers(0, 256, (pages, page_bytes), np.uint8)
    memory = right.copy() if what == "put" else np.zeros_like(right)

    dock = Dock.load(require=["mooncake"])
    plan = dock.plan([POOL], shard, ["mooncake"])
    region = Region.of(POOL, shard, (memory,), pages)
    settings = {"mooncake": {"master": master, "segment_bytes": 0, "lease_s": 5}}
    with Attachment.open(
        dock, plan, Namespace(model="example"), {"kv": region}, settings
    ) as attachment:
        moving = attachment.put if what == "put" else attachment.get
        moved = moving(hashes, {"kv": np.arange(pages)})
    good = moved.outcomes["kv"] == Outcome.OK
    wrong = int((memory[good] != right[good]).any(axis=1).sum())
    sys.stdout.write(f"{int(good.sum())} of {pages} pages, {wrong} of them wrong\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
