"""Another process of the cluster: attaches a pool and executes commands.

The bytes of page n follow from n, so that every process knows them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

from kvdock import (
    AttachConfig,
    Batch,
    DType,
    Operation,
    Outcome,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.config import structure
from kvdock.pools import Part, Per
from kvdock_mooncake import plugin
from kvdock_mooncake.settings import MooncakeSettings

ROWS = 64
ROW_BYTES = int(os.environ.get("PEER_ROW_BYTES", "65536"))
NAMESPACE = "5e" * 32


def page(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, ROW_BYTES, np.uint8)


def key(number: int) -> str:
    return f"{NAMESPACE}/{hashlib.sha256(str(number).encode()).hexdigest()}.kv.L0-4"


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = structure(MooncakeSettings, json.loads(sys.argv[1]), where="peer")
    memory = np.zeros((ROWS, ROW_BYTES), np.uint8)
    part = Part("kv", DType.U8, (ROW_BYTES,), per=Per.PAGE)
    pool = PoolSpec(
        name="kv", kind=PoolKind.MLA, parts=(part,), layers=(0,), page_tokens=1
    )
    region = Region.of(pool, Shard(), (memory,), ROWS)
    config = AttachConfig(settings=settings, namespace=NAMESPACE)
    handle = plugin.kvdock_register_pool(pool=pool, region=region, config=config)

    def run(operation: Operation, numbers: list[int], within_s: float) -> list[int]:
        addresses = memory.ctypes.data + np.arange(len(numbers))[:, None] * ROW_BYTES
        sizes = np.full(addresses.shape, ROW_BYTES)
        until = time.monotonic() + within_s
        keys = [key(number) for number in numbers]
        batch = Batch(operation, keys, addresses, sizes, until)
        outcomes: list[int] = handle.run(batch).outcomes.tolist()
        return outcomes

    for line in sys.stdin:
        asked = json.loads(line)
        numbers = list(range(*asked.get("pages", (0, 0))))
        within_s = asked.get("within_s", 20.0)
        if asked["do"] == "ready":
            say("ready")
            continue
        answer: dict[str, Any] = {"outcomes": [], "wrong": 0}
        began = time.monotonic()
        for start in range(0, len(numbers), ROWS):
            some = numbers[start : start + ROWS]
            if asked["do"] == "put":
                for row, number in enumerate(some):
                    memory[row] = page(number)
                answer["outcomes"] += run(Operation.PUT, some, within_s)
            elif asked["do"] == "get":
                memory[:] = 0
                outcomes = run(Operation.GET, some, within_s)
                answer["outcomes"] += outcomes
                answer["wrong"] += sum(
                    outcomes[row] == Outcome.OK
                    and not np.array_equal(memory[row], page(number))
                    for row, number in enumerate(some)
                )
            elif asked["do"] == "exists":
                answer["outcomes"] += run(Operation.EXISTS, some, within_s)
        answer["seconds"] = time.monotonic() - began
        say(answer)
    handle.close()


if __name__ == "__main__":
    main()
