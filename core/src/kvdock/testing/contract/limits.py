"""Full stores and deadlines."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

from kvdock.batch import Operation, Outcome
from kvdock.plugin.manifest import Scope
from kvdock.testing.cases import contract_test, graded, one_sample
from kvdock.testing.contract.late import filled
from kvdock.testing.contract.races import together
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdock.plugin.manifest import Support

PAGE_BYTES = 16384
ROUND = 16
MOST_ROUNDS = 512
"""128 MiB: a small store is full by then."""

KEPT = 4
"""Of how many pages one may be left when a store makes room."""

WIDE = 8
"""How much more than its pages a full store may say that it has room for."""

GRACE_S = 3.0
"""How much later than its deadline a call may end on a busy machine."""


HOUR_S = 3600.0

BUSY = 8
HURRY_S = 0.05

ROOM_S = 10.0
"""How long a full store that evicts may reject new pages."""

LINGER_S = 0.25
"""How long late bytes are waited for."""

LINGER_MOST_S = 1.0
"""The same for a slow store."""


@contextmanager
def ending_clock(looks: int) -> Iterator[None]:
    """Let all time be over for this thread once it has looked at the clock so often."""
    now, thread, seen = time.monotonic, threading.get_ident(), 0

    def monotonic() -> float:
        nonlocal seen
        if threading.get_ident() != thread:
            return now()
        seen += 1
        return now() + (HOUR_S if seen > looks else 0.0)

    with patch("time.monotonic", monotonic):
        yield


def _found(setup: Setup, rounds: Sequence[Sequence[str]]) -> int:
    """Return how many pages are there."""
    return sum(int(setup.exists(pages).sum()) for pages in rounds if pages)


class LimitTests:
    """A full store rejects or evicts; a late call is a miss, and in time."""

    @contract_test(graded("eviction"), proves="eviction")
    def test_a_full_store_loses_nothing_that_it_called_ok(
        self, tight: Harness, case: Support
    ) -> None:
        pool = tight.any_pool(page_bytes=PAGE_BYTES, name="full")
        setup = tight.rig(pool, pages=ROUND)
        taken: list[list[str]] = []
        full, peak = False, 0
        for turn in range(MOST_ROUNDS):
            pages = page_hashes(ROUND, turn)
            outcomes = setup.put(pages)[:, 0].tolist()
            good = [p for p, o in zip(pages, outcomes, strict=True) if not o]
            assert set(outcomes) <= {Outcome.OK, Outcome.REFUSED}, spelled(
                setup.put(pages)
            )
            if good:
                # What was stored last may not be what had to make room.
                setup.loaded(good[-1:])
                kept = int(setup.exists(good).sum())
                assert kept * KEPT >= len(good), (
                    f"{kept} of {len(good)} pages of one put are there right after it"
                )
            taken.append(good)
            if not turn & (turn + 1):
                peak = max(peak, _found(setup, taken))
            # What is looked at may be what stays: not always at the same pages.
            looked = taken[turn // 8]
            lost = not setup.exists(looked).all()
            assert case or not lost, "it evicts, although it declares that it does not"
            if len(good) < len(pages) or lost:
                full = True
                break
        assert full, (
            f"it took {MOST_ROUNDS * ROUND * PAGE_BYTES >> 20} MiB into a small store "
            "and neither rejected nor evicted anything"
        )
        there = _found(setup, taken)
        self._fill_level_is_true(setup, there)
        for good in taken:
            if case:
                setup.get(good)
            elif good:
                setup.loaded(good)
        if case:
            assert there * KEPT >= peak, (
                f"{there} pages are left of a full store that had {peak}: it evicts "
                "more than it needs"
            )
            self._room_is_made(setup)
        else:
            self._room_comes_back(setup, taken)

    def _fill_level_is_true(self, setup: Setup, there: int) -> None:
        """Compare what a full store reports with the pages that it has."""
        reports = setup.backend.manifest.capacity
        level = setup.store.capacity() if reports else None
        if level is None or not level.limit_bytes:
            return
        nbytes = there * PAGE_BYTES
        assert nbytes <= level.limit_bytes < WIDE * nbytes, (
            f"a full store has {nbytes} bytes of pages, and reports that they may take "
            f"{level.limit_bytes}"
        )

    def _room_is_made(self, setup: Setup) -> None:
        deadline = setup.until(ROOM_S)
        newest = page_hashes(ROUND, "newest")
        taken = setup.put(newest)
        # A store may make room in the background, and reject pages meanwhile.
        while (taken != Outcome.OK).any() and time.monotonic() < deadline:
            time.sleep(0.02)
            taken = setup.put(newest)
        assert (taken == Outcome.OK).all(), (
            "it declares that it evicts, and a full store still answers "
            f"{spelled(taken)} after {setup.scale.seconds(ROOM_S):.0f} s"
        )

    def _room_comes_back(self, setup: Setup, taken: list[list[str]]) -> None:
        deleted = setup.delete(taken[0])
        if taken[0] and (deleted == Outcome.OK).all():
            again = setup.put(page_hashes(1, "after"))
            assert (again == Outcome.OK).all(), "deleting pages makes no room"

    @contract_test(one_sample)
    def test_a_call_whose_time_is_over_ends_at_once_and_lies_about_nothing(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = harness.rig(case.pool())
        old, new = page_hashes(4, "old"), page_hashes(4, "new")
        setup.stored(old)
        began = time.monotonic()
        late = began - 0.001
        got = setup.get(old + page_hashes(2, "never"), deadline_s=late)
        put = setup.put(new, deadline_s=late)
        took = time.monotonic() - began
        assert took < harness.scale.seconds(GRACE_S), (
            f"two calls without time left took {took:.1f} s"
        )
        assert (got[4:] != Outcome.OK).all()
        there = setup.exists(new)
        assert (there >= (put == Outcome.OK).all(axis=1)).all(), "OK, but not stored"

    @contract_test(one_sample)
    def test_a_put_whose_time_ends_in_the_middle_keeps_what_it_calls_stored(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = harness.rig(case.pool())
        shared = harness.backend.manifest.sharing is not Scope.NONE
        other = harness.rig(case.pool()) if shared else setup
        for looks in (0, 1, 2, 3, 5, 8):
            pages = page_hashes(8, f"middle {looks}")
            batch = filled(setup, Operation.PUT, pages)
            with ending_clock(looks):
                result = setup.backend.batch_io(setup.store, batch)
            whole = result.ok.reshape(len(pages), -1).min(axis=1).tolist()
            kept = [page for page, ok in zip(pages, whole, strict=True) if ok]
            lost = int((~other.exists_soon(kept)).sum()) if kept else 0
            assert not lost, (
                f"time was over in the middle of a put of {len(pages)} pages: it calls "
                f"{len(kept)} of them stored, and {lost} of these are not found"
            )
            setup.get(pages)

    @contract_test(one_sample)
    def test_a_call_ends_by_its_deadline(self, harness: Harness, case: Sample) -> None:
        setup = harness.rig(case.pool())
        pages = page_hashes(20)
        for give_s in (0.0, 0.005, 0.02):
            began = time.monotonic()
            setup.put(pages, deadline_s=began + give_s)
            setup.get(pages + page_hashes(9, "never"), deadline_s=began + 2 * give_s)
            took = time.monotonic() - began
            assert took < 2 * give_s + harness.scale.seconds(GRACE_S), (
                f"a call that had {give_s} s took {took:.1f} s"
            )

    @contract_test(one_sample)
    def test_a_call_ends_by_its_deadline_beside_others_that_have_time(
        self, harness: Harness, case: Sample
    ) -> None:
        hurried, *busy = harness.rig(case.pool(), pages=72).divided(1 + BUSY)
        pages = page_hashes(8)
        hurried.stored(pages)
        stop, begun = threading.Event(), threading.Semaphore(0)
        took: list[float] = []

        def work(setup: Setup, label: str) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                setup.put(page_hashes(8, f"{label} {turn % 4}"))
                begun.release()
                setup.get(pages)

        def hurry() -> None:
            try:
                for _ in busy:  # it proves nothing beside threads that have not begun
                    begun.acquire(timeout=harness.scale.seconds(GRACE_S))
                for _ in range(3):
                    began = time.monotonic()
                    hurried.get(pages, deadline_s=began + HURRY_S)
                    took.append(time.monotonic() - began)
            finally:
                stop.set()

        jobs = [partial(work, setup, str(at)) for at, setup in enumerate(busy)]
        together(hurry, *jobs)
        limit_s = HURRY_S + harness.scale.seconds(GRACE_S)
        assert max(took) < limit_s, (
            f"a call that had {HURRY_S} s took {max(took):.1f} s next to {BUSY} "
            "threads that had more"
        )

    @contract_test(one_sample, slow=True)
    def test_no_byte_comes_after_the_answer(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = harness.rig(case.pool())
        pages = page_hashes(16)
        setup.stored(pages)
        for give_s in (-0.001, 0.0002, 0.002, 1.0):
            places = setup.places(len(pages))
            deadline = time.monotonic() + give_s
            batch, _rows = setup.batch(Operation.GET, pages, places, deadline)
            setup.call(batch)
            before = setup.seen()
            time.sleep(min(harness.scale.seconds(LINGER_S), LINGER_MOST_S))
            assert setup.seen() == before, (
                f"a call that had {give_s} s went on writing to the engine's memory "
                "after it had answered"
            )

    @contract_test(one_sample)
    def test_a_call_after_a_timeout_gets_its_own_bytes(self, rig: Setup) -> None:
        pages = page_hashes(16)
        rig.stored(pages)
        for turn in range(4):
            # What comes late must not be taken for the next answer.
            rig.get(pages[turn : turn + 4], deadline_s=time.monotonic() - 0.001)
            rig.loaded(pages[8 + turn : 12 + turn])
