"""A load on SGLang's radix tree in a process of its own, with the events it publishes.

    router_load.py FOLDER PAGES FIRST [KILLED]

Prefixes of four pages are stored and asked for again, in a store that has room for a
part of them. What the tree tells routers is appended to FOLDER/events, one message a
line. At the end the process waits until it has nothing more to publish, and writes the
event hashes of its pages that the store still has. With KILLED it does not end.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
HARNESS = HERE.parents[3] / "tests" / "harness"
sys.path[:0] = [str(HERE), str(HERE.parent), str(HARNESS)]

import environment  # noqa: E402 - found by the path above

os.environ.update(environment.CPU)

import controllers  # noqa: E402
import sgl_kernel  # noqa: E402, F401 - the stand-in comes before SGLang
from router_index import published  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    CacheRequestHandle,
    EvictParams,
)
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)
from sglang.test.kits.unified_radix_cache import fixtures, mixins  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from test_radix_cache import FULL, Kit, through_kvdock  # noqa: E402
from test_router_events import in_store, opened, write  # noqa: E402

TOKENS = 16
PAGES = 4
NEEDED = TOKENS * PAGES
QUIET_S = 3.0
"""No event for so long after the last question to the store: it has no more."""
SMALL = CacheConfig(
    page_size=TOKENS, components=(FULL,), num_layers=1, head_num=1, head_dim=32,
    kv_size=1024,
)  # fmt: skip


def tokens(number: int) -> list[int]:
    """Return the tokens of a prefix: no two of them share a page."""
    return [100_000 + number, *range(1, NEEDED)]


def room(cache: Any, allocator: Any) -> None:
    """Make room for a prefix in both memories, as the scheduler does."""
    host = cache.cache_controller.mem_pool_host
    if host.available_size() < 2 * NEEDED:
        cache.evict_host(2 * NEEDED)
    if allocator.available_size() < 2 * NEEDED:
        cache.evict(EvictParams(num_tokens=2 * NEEDED))


def run(kit: Any, folder: Path, pages: int, first: int, *, end: bool) -> None:
    engine = opened(kit, folder)
    cache, allocator, _ = engine
    chosen = random.Random(first)  # noqa: S311 - a load
    mine: dict[str, None] = {}
    with (folder / "events").open("a") as file:

        def publish() -> int:
            events = cache.take_events()
            if events:
                file.write(base64.b64encode(published(events)).decode() + "\n")
                file.flush()
            return len(events)

        for number in range(first, first + pages // PAGES):
            room(cache, allocator)
            node = write(kit, engine, tokens(number))
            mine |= dict.fromkeys(node.hash_value)
            if chosen.random() < 0.2:  # an earlier prefix is asked for again
                back = tokens(chosen.randrange(first, number + 1))
                room(cache, allocator)
                handle = CacheRequestHandle(f"again {number}", 0)
                kit._consume_prefetch(cache, back, handle)
            publish()
        if not end:
            time.sleep(600)
        last_s = time.monotonic()
        while time.monotonic() < last_s + QUIET_S:
            if publish():
                last_s = time.monotonic()
            time.sleep(0.01)
    left = in_store(cache, folder / "store", list(mine))
    (folder / "left").write_text(json.dumps(sorted(left)))
    cache.cache_controller.detach_storage_backend()


def main() -> None:
    """Open a tree whose storage is a small store."""
    folder, pages, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    set_global_server_args_for_scheduler(
        ServerArgs(model_path="dummy", device="cpu", page_size=TOKENS)
    )
    controllers.close_name_branches()
    store = {
        "plugin": "file", "root": str(folder / "store"), "free_space": "1 MiB",
        "quota": "1 MiB", "segment_bytes": "64 KiB", "core": {"page_events": 1 << 16},
    }  # fmt: skip
    kit, arguments = Kit(), partial(through_kvdock, store)
    kit.cfg = SMALL
    with (
        mock.patch.object(mixins, "ServerArgs", arguments),
        mock.patch.object(fixtures, "ServerArgs", arguments),
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
    ):
        run(kit, folder, pages, first, end=not sys.argv[4:])
        kit.doCleanups()


if __name__ == "__main__":
    main()
