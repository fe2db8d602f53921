"""Segments that are claimed before they are needed: nothing goes before its time."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import waiting
from waiting import until

from kvdock_segments import WriterLiveness, recycling
from kvdock_segments.format import index_bytes
from kvdock_segments.segment import Segment

OpenDepot = Callable[..., Any]

SLOTS = 16
SEGMENTS = 16
ROOM = SLOTS * SEGMENTS
PAGE_BYTES = 512
LIMITS = {
    "quota_bytes": SEGMENTS * (SLOTS * PAGE_BYTES + index_bytes(SLOTS)),
    "segment_bytes": SLOTS * PAGE_BYTES,
}


def recycler_of(depot: Any) -> Any:
    return depot.store._writer._recycler


def claimed_in(depot: Any) -> Segment | None:
    """Return the segment that is claimed ahead."""
    found = [one.segment for one in recycler_of(depot)._claimed.values()]
    return found[0] if found else None


def ended(depot: Any) -> bool:
    return not recycler_of(depot)._asked


def full_depot(open_depot: OpenDepot, **more: Any) -> Any:
    """Fill a store until a segment is claimed ahead."""
    depot = open_depot(page_bytes=PAGE_BYTES, **LIMITS, **more)
    for first in range(0, 4 * ROOM, 8):
        assert depot.request(range(first, first + 8)).ok.all()
        until(lambda: ended(depot))
        if claimed_in(depot):
            return depot
    return depot


def states(depot: Any) -> list[str]:
    return sorted(
        path.name.rsplit(".", 1)[1]
        for path in depot.root.glob("*/kv.*/*")
        if not path.name.endswith(".dat")
    )


def test_a_full_store_claims_the_next_segment_after_a_put(
    open_depot: OpenDepot,
) -> None:
    depot = full_depot(open_depot)
    segment = claimed_in(depot)
    assert segment is not None
    assert segment.owned
    recycled = depot.store.counts["segments_recycled"]
    first = 10**6
    while claimed_in(depot) is segment:
        assert depot.request(range(first, first + 8)).ok.all()
        first += 8
    assert depot.store.counts["segments_recycled"] == recycled + 1


def test_a_claim_evicts_nothing(open_depot: OpenDepot) -> None:
    depot = full_depot(open_depot)
    segment = claimed_in(depot)
    assert segment is not None
    index = depot.store._catalog.index
    assert index.live(segment.rows).all()
    assert depot.store.usage().pages == int(index.live_in.sum())


def test_pages_of_a_claimed_segment_that_are_used_meanwhile_stay(
    open_depot: OpenDepot,
) -> None:
    depot = full_depot(open_depot)
    segment = claimed_in(depot)
    assert segment is not None
    keys = depot.store._catalog.index.words[segment.rows.span, :2].tolist()
    numbers = range(4 * ROOM)
    mine = [
        number
        for number, digest in zip(
            numbers,
            depot.store._catalog.digests(depot.keys(numbers)).tolist(),
            strict=True,
        )
        if digest in keys
    ]
    assert len(mine) == SLOTS
    assert not any(depot.get(mine))
    first = 10**6
    while claimed_in(depot) is segment:
        depot.request(range(first, first + 8))
        first += 8
    assert depot.there(mine) == [True] * SLOTS


def test_an_idle_claim_is_released_at_close_with_its_pages(
    open_depot: OpenDepot,
) -> None:
    depot = full_depot(open_depot)
    assert claimed_in(depot)
    pages = depot.store.usage().pages
    threads = set(threading.enumerate())
    depot.store.close()
    assert threads - set(threading.enumerate())
    assert states(depot).count("open") <= 1  # the one that is being filled
    assert open_depot(page_bytes=PAGE_BYTES, **LIMITS).store.usage().pages == pages


def test_a_store_that_is_closed_claims_nothing_more(open_depot: OpenDepot) -> None:
    depot = full_depot(open_depot)
    recycler, (folder,) = recycler_of(depot), depot.store._catalog.folders.values()
    depot.store.close()
    recycler.ask(folder)
    assert not recycler._asked


def test_a_claim_that_is_under_way_ends_before_the_store_is_closed(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = full_depot(open_depot)
    recycler, (folder,) = recycler_of(depot), depot.store._catalog.folders.values()
    segment = claimed_in(depot)
    assert segment is not None
    recycler._claimed.clear()
    depot.store._allocator.release_full(folder, segment)
    depot.store._allocator.plans[folder].numbers.append(segment.rows.number)
    begun, go_on = threading.Event(), threading.Event()
    acquire = Segment.acquire

    def slow(self: Segment) -> bool:
        begun.set()
        assert go_on.wait(60)
        return acquire(self)

    monkeypatch.setattr(Segment, "acquire", slow)
    recycler.ask(folder)
    assert begun.wait(60)
    closing = threading.Thread(target=depot.store.close)
    closing.start()
    until(lambda: recycler._closed)
    assert closing.is_alive()
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert states(depot).count("open") <= 1


@pytest.mark.parametrize("by_another", [False, True])
def test_a_claimed_segment_that_is_cleared_is_not_filled(
    open_depot: OpenDepot, *, by_another: bool
) -> None:
    depot = full_depot(open_depot)
    assert claimed_in(depot)
    (open_depot(page_bytes=PAGE_BYTES) if by_another else depot).clear()
    for first in range(0, 4 * ROOM, 8):
        assert depot.request(range(first, first + 8)).ok.all()
    last = range(4 * ROOM - 64, 4 * ROOM)
    assert not any(depot.get(last))
    assert not depot.store.counts["segments_linked"]
    assert not any(open_depot(page_bytes=PAGE_BYTES).get(last))


def test_a_claimed_segment_that_was_linked_meanwhile_keeps_its_bytes(
    open_depot: OpenDepot, tmp_path: Path
) -> None:
    depot = full_depot(open_depot)
    segment = claimed_in(depot)
    assert segment is not None
    (data,) = depot.root.glob(f"*/kv.*/{segment.name.data}")
    copy = tmp_path / "copy"
    copy.hardlink_to(data)
    before = copy.read_bytes()
    first = 10**6
    while claimed_in(depot) is segment:
        depot.request(range(first, first + 8))
        first += 8
    for more in range(10):
        depot.request(range(first + 8 * more, first + 8 * more + 8))
    assert copy.read_bytes() == before
    assert depot.store.counts["segments_linked"] == 1


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest, test_recycling as here
from kvdock_segments import PosixIOEngine, SegmentStore, StoreLimits, StoreLocation

def open_depot(page_bytes, **limits):
    place = StoreLocation(root=Path(sys.argv[2]), namespace=conftest.NAMESPACE,
        pool="kv", object_bytes=(page_bytes,))
    store = SegmentStore(place, PosixIOEngine(2), StoreLimits(**limits))
    return conftest.Depot(place.root, store, page_bytes)

depot = here.full_depot(open_depot)
assert here.claimed_in(depot)
print(depot.store.usage().pages, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_new_process_takes_what_a_killed_one_had_claimed(
    open_depot: OpenDepot, tmp_path: Path
) -> None:
    """Killed with a claim: its pages are there, and the segment is recycled."""
    folders = [str(Path(__file__).parent), str(tmp_path / "store")]
    path = str(Path(waiting.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *folders],
        stdout=subprocess.PIPE, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    depot = open_depot(page_bytes=PAGE_BYTES, **LIMITS)
    assert depot.store.usage().pages == int(done.stdout)
    for first in range(10**6, 10**6 + 2 * ROOM, 8):
        assert depot.request(range(first, first + 8)).ok.all()
    assert depot.store.counts["segments_created"] == 0


@pytest.mark.parametrize("change", ["silence", "watermark", "few", "open"])
def test_a_store_that_needs_its_segments_claims_none_ahead(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "silence": {"liveness": WriterLiveness.TIMEOUT},
        "watermark": {"low_watermark": 0.9},
    }
    more = changes.get(change, {})
    if change == "few":
        monkeypatch.setattr(recycling, "_LEAST_SEGMENTS", 2 * SEGMENTS)
    elif change == "open":  # as of other writers
        monkeypatch.setattr(recycling, "_MOST_OPEN", 4 * SEGMENTS)
    depot = open_depot(page_bytes=PAGE_BYTES, **(LIMITS | more))
    for first in range(0, 3 * ROOM, 8):
        assert depot.request(range(first, first + 8)).ok.all()
    assert depot.store.counts["segments_recycled"]
    until(lambda: ended(depot))
    assert claimed_in(depot) is None


def test_free_slots_are_filled_before_a_claimed_segment(open_depot: OpenDepot) -> None:
    depot = full_depot(open_depot)
    segment = claimed_in(depot)
    assert segment is not None
    index = depot.store._catalog.index
    rows = next(
        one.rows
        for one in depot.store._catalog.segments.values()
        if not one.owned and index.live(one.rows).all()
    )
    words = index.words[rows.span, :2].tolist()
    numbers = range(4 * ROOM)
    digests = depot.store._catalog.digests(depot.keys(numbers)).tolist()
    gone = [n for n, one in zip(numbers, digests, strict=True) if one in words]
    depot.delete(gone)
    assert depot.store.usage().pages < ROOM
    evicted = depot.store.counts["pages_evicted"]
    for first in range(10**6, 10**6 + SLOTS, 4):
        assert depot.request(range(first, first + 4)).ok.all()
    assert depot.store.counts["pages_evicted"] == evicted
    shutil.rmtree(depot.root)
