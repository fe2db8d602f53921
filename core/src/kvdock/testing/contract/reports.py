"""Use that a backend is informed of, and what it reports of its pages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvdock.batch import Outcome
from kvdock.capacity import Capacity
from kvdock.testing.cases import claimed, contract_test
from kvdock.testing.harness import becomes
from kvdock.testing.samples import page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdock.testing.harness import Harness, Setup

PAGE_BYTES = 16384
ROUND = 16
MOST_ROUNDS = 512
"""128 MiB: a small store has evicted its first pages by then."""

TRACKED = 64
"""How many keys a backend is asked to keep track of."""

AGAIN = 6
"""How often pages are stored and deleted in turn."""

SOON_S = 5.0
"""How long a report may be behind: it may come from a server that counts now and
then."""


def removed_soon(setup: Setup, wanted: int) -> list[str]:
    """Ask which keys are gone, until there are as many as wanted, for a moment."""
    deadline = setup.until(SOON_S)
    found = list(setup.store.removed(TRACKED))
    while len(found) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
        found += setup.store.removed(TRACKED)
    return found


def flood(
    setup: Setup, sentinel: Sequence[str], beside: Callable[[], object] = list
) -> None:
    """Store other pages until those of the sentinel are evicted."""
    for turn in range(MOST_ROUNDS):
        setup.put(page_hashes(ROUND, turn))
        beside()
        # Ever more rarely: a look may count as a use.
        if not turn & (turn + 1) and not setup.exists(sentinel).any():
            return
    pytest.fail("a small store has not evicted pages that nothing keeps")


def delete(setup: Setup, pages: Sequence[str]) -> None:
    """Delete pages, or skip: a backend may refuse to."""
    if Outcome.REFUSED in setup.delete(pages):
        pytest.skip("it refuses to delete pages")


class ReportTests:
    """Pages in use stay, and reports of removed pages and of room are true."""

    @contract_test(claimed("touch"), proves="touch")
    def test_pages_that_an_engine_uses_stay_while_others_are_evicted(
        self, tight: Harness
    ) -> None:
        pool = tight.any_pool(page_bytes=PAGE_BYTES, name="used")
        used, other = page_hashes(ROUND, "used"), page_hashes(ROUND, "other")
        setup = tight.rig(pool, pages=ROUND)
        setup.stored(used)
        setup.stored(other)
        keys = setup.keys(used)
        flood(setup, other, lambda: setup.store.touch(keys))
        stayed = int(setup.exists(used).sum())
        # Where an order of use is kept by samples, a few may go.
        assert stayed > ROUND // 2, (
            f"{ROUND - stayed} of {ROUND} pages were evicted, although they were "
            "used after all others"
        )

    @contract_test(claimed("touch"))
    def test_use_of_pages_that_are_not_there_counts_for_nothing(
        self, harness: Harness
    ) -> None:
        setup = harness.plain()
        there, never = page_hashes(4, "there"), page_hashes(4, "never")
        setup.stored(there)
        setup.store.touch(setup.keys([*never, *there, *never]))
        setup.store.touch([])
        assert not setup.exists(never).any(), "a page is found that was never stored"
        setup.loaded(there)
        setup.kept(never)

    @contract_test(claimed("removed"), proves="removed")
    def test_removed_pages_are_reported_once_and_others_never(
        self, harness: Harness
    ) -> None:
        setup = harness.plain()
        setup.store.removed(TRACKED)
        stay, go = page_hashes(4, "stay"), page_hashes(4, "go")
        setup.stored(stay)
        setup.stored(go)
        assert removed_soon(setup, 0) == []
        delete(setup, go)
        found = removed_soon(setup, len(setup.keys(go)))
        assert sorted(found) == sorted(setup.keys(go))
        assert removed_soon(setup, 0) == [], "a removed page is reported twice"
        # Stored again, its removal is another one.
        setup.stored(go)
        assert removed_soon(setup, 0) == []
        delete(setup, go)
        found = removed_soon(setup, len(setup.keys(go)))
        assert sorted(found) == sorted(setup.keys(go))

    @contract_test(claimed("removed"), proves="removed")
    def test_a_page_that_is_stored_again_is_not_reported_as_removed(
        self, harness: Harness
    ) -> None:
        setup = harness.plain()
        setup.store.removed(TRACKED)
        again, gone = page_hashes(4, "again"), page_hashes(4, "gone")
        setup.stored([*again, *gone])
        delete(setup, [*again, *gone])
        setup.stored(again)
        found = removed_soon(setup, len(setup.keys(gone)))
        assert sorted(found) == sorted(setup.keys(gone)), (
            f"{len(gone)} pages are gone and {len(again)} were stored again: "
            f"{len(found)} are reported as removed"
        )

    @contract_test(claimed("removed"))
    def test_no_more_pages_are_tracked_than_were_asked_for(
        self, harness: Harness
    ) -> None:
        setup = harness.plain()
        setup.store.removed(setup.objects * 2)
        pages = page_hashes(6)
        for page in pages:
            setup.stored([page])
        delete(setup, pages)
        deadline = setup.until(SOON_S)
        found: list[str] = []
        while not found and time.monotonic() < deadline:
            found += setup.store.removed(setup.objects * 2)
        assert found, "removed pages are not reported"
        assert set(found) <= set(setup.keys(pages[-2:])), (
            "the newest pages are those to keep track of"
        )

    @contract_test(claimed("capacity"), proves="capacity")
    def test_room_that_is_reported_is_that_of_all_pools_of_a_store(
        self, harness: Harness
    ) -> None:
        pools = [harness.any_pool(name=name) for name in ("one", "two")]
        one, two = harness.attach(pools)
        before = one.store.capacity()
        if before is None:
            pytest.skip("it does not report how full it is")
        assert isinstance(before, Capacity), f"capacity() returned {before!r}"
        assert before.used_bytes >= 0
        assert before.limit_bytes >= 0
        pages = page_hashes(16)
        two.stored(pages)
        nbytes = sum(stored.nbytes for stored in two.region.objects) * len(pages)
        deadline = two.until(SOON_S)
        while time.monotonic() < deadline:
            after = one.store.capacity()
            if after is None or after.used_bytes >= nbytes:
                break
            time.sleep(0.02)
        assert after is None or after.used_bytes >= nbytes, (
            f"{nbytes} bytes were stored, and {after.used_bytes} are reported as used"
        )
        if after is None:
            return
        if after.limit_bytes:
            assert after.used_bytes <= after.limit_bytes, f"more than all: {after}"
        delete(two, pages)
        for turn in range(AGAIN):
            # A store may keep the room of deleted pages for those that come next.
            fresh = page_hashes(16, turn)
            two.stored(fresh)
            delete(two, fresh)

        def grown_bytes() -> int:
            level = one.store.capacity()
            return level.used_bytes - after.used_bytes if level else 0

        assert becomes(lambda: grown_bytes() <= nbytes, two.scale.seconds(SOON_S)), (
            f"{AGAIN} times {nbytes} bytes were stored and deleted, and "
            f"{grown_bytes()} more are reported as used"
        )
