"""A load on kvdock's tier in a process of its own, with the events that it publishes.

    router_load.py FOLDER PAGES FIRST [KILLED]

Requests of four pages are stored and asked for again, in a store that has room for a
tenth of them. vLLM's own tracker makes KV events of what the tier reports; they are
appended to FOLDER/events, a message a line. At the end the process waits until it has
nothing more to publish, and writes which pages it has stored and the store still has.
With KILLED it does not end.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HARNESS = HERE.parents[3] / "tests" / "harness"
sys.path[:0] = [str(HERE), str(HERE.parent), str(HARNESS)]

from router_index import published  # noqa: E402 - found by the path above
from vllm.distributed.kv_events import MEDIUM_STORAGE  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (  # noqa: E402
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
    _OffloadEventMetadata,
)
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig  # noqa: E402
from vllm_rigs import Rig, open_rig, storage  # noqa: E402

TOKENS = 16
PAGES = 4
QUIET_S = 3.0
"""No event for so long after the last question to the store: it has no more."""


def tokens(number: int) -> list[int]:
    return [(7 * number + at) % 50_000 for at in range(TOKENS)]


def describe(tracker: Any, keys: list[Any]) -> None:
    """Tell vLLM's tracker of a request's pages, as its scheduler does."""
    for at, key in enumerate(keys):
        number = int.from_bytes(key[:32], "big")
        known = tracker._pending_event_metadata.get(key)
        tracker._pending_event_metadata[key] = _OffloadEventMetadata(
            block_hashes=(key[:32],),
            parent_block_hash=keys[at - 1][:32] if at else None,
            token_ids=tuple(tokens(number)),
            block_size=TOKENS,
            lora_id=None,
            lora_name=None,
            extra_keys=None,
            group_idx=0,
            kv_cache_spec=OffloadingEventGroupSpec("full_attention", None),
            active_residencies=known.active_residencies if known else set(),
        )


def there(rig: Rig, names: list[str]) -> set[str]:
    """Return which pages the store has."""
    attached = rig.tier.attached["kv"]
    found = attached.exists(names, time.monotonic() + 60)
    return {name for name, one in zip(names, found, strict=True) if one}


def main() -> None:
    """Run the load."""
    folder, pages, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    given = storage(folder / "store", page_events=1 << 16)
    given |= {"quota": "2 MiB", "segment_bytes": "64 KiB", "enable_kv_events": True}
    rig = open_rig(given)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    chosen, mine = random.Random(first), []  # noqa: S311 - a load

    def publish() -> int:
        events = list(tracker.take_events(rig.tier.take_events()))
        # What vLLM's own memory has is not asked about here.
        events = [one for one in events if one.medium == MEDIUM_STORAGE]
        if events:
            line = base64.b64encode(published(events)).decode()
            file.write(line + "\n")
            file.flush()
        return len(events)

    with (folder / "events").open("a") as file:
        for start in range(first, first + pages, PAGES):
            keys = rig.keys(first=start, count=PAGES)
            describe(tracker, keys)
            rig.rows[:PAGES] = start % 251
            rig.store(keys, list(range(PAGES)))
            mine += [key[:32].hex() for key in keys]
            if chosen.random() < 0.2:  # an earlier prefix is used again
                back = chosen.randrange(first, start + 1, PAGES)
                again = rig.keys(first=back, count=PAGES)
                if set(rig.lookup(again)) == {"HIT"}:
                    rig.load(again, list(range(PAGES, 2 * PAGES)))
                rig.finish_request()
            publish()
        if sys.argv[4:]:
            time.sleep(600)
        last_s = time.monotonic()
        while time.monotonic() < last_s + QUIET_S:
            if publish():
                last_s = time.monotonic()
            time.sleep(0.01)
    # Asked for in parts: a lookup has a deadline.
    left: set[str] = set()
    for at in range(0, len(mine), 1024):
        left |= there(rig, mine[at : at + 1024])
    (folder / "left").write_text(json.dumps(sorted(left)))
    rig.tier.shutdown()


if __name__ == "__main__":
    main()
