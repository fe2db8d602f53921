"""Concurrent threads, handles and processes, one of which is killed."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvdock.batch import Outcome
from kvdock.plugin.manifest import Scope
from kvdock.testing.cases import claimed, contract_test, one_sample, reaching
from kvdock.testing.harness import Harness, spelled
from kvdock.testing.samples import Sample, page_hashes
from kvdock.testing.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.testing.harness import Setup

ROUNDS = 12
TOGETHER_S = 1.0
"""How long two processes write the same pages."""

AFTER_A_KILL_S = 20.0
"""How long what a killed writer had begun may keep pages from being stored."""

PAGES = page_hashes(6)


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs in threads that begin at once; raise what the first raised."""
    gate = threading.Barrier(len(jobs))
    raised: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        gate.wait()
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    often, usual = 1e-5, sys.getswitchinterval()
    # So that plugins in Python, too, are interrupted between any two steps.
    sys.setswitchinterval(often)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    if raised:
        raise raised[0]


def seed_of(setup: Setup, page: str) -> int:
    """Return which of two contents a page has; fail unless it is one of them whole."""
    try:
        setup.loaded([page], seed=0)
    except AssertionError:
        setup.loaded([page], seed=1)
        return 1
    return 0


class RaceTests:
    """Concurrent calls never return wrong bytes."""

    @contract_test(one_sample)
    def test_threads_share_a_handle(self, harness: Harness, case: Sample) -> None:
        setup = harness.rig(case.pool(), pages=48)
        twins = setup.divided(3)

        def work(twin: Setup, label: int) -> None:
            for turn in range(harness.scale.count(ROUNDS, least=3)):
                own = page_hashes(4, f"{label} {turn}")
                twin.stored(own)
                twin.put(PAGES)
                twin.loaded(own)
                twin.get(PAGES)
                twin.exists(PAGES + own)

        together(*(partial(work, twin, at) for at, twin in enumerate(twins)))

    @contract_test(one_sample)
    def test_a_page_that_is_forgotten_while_it_is_read_is_right_or_missing(
        self, harness: Harness, case: Sample
    ) -> None:
        reader, writer = harness.rig(case.pool(), pages=24).divided(2)
        stop = threading.Event()

        def write() -> None:
            try:
                for _ in range(harness.scale.count(2 * ROUNDS, least=4)):
                    writer.put(PAGES)
                    writer.delete(PAGES[::2])
                    # Something else takes the freed place.
                    writer.put(page_hashes(3, "other"))
                    writer.delete(page_hashes(3, "other") + PAGES[1::2])
            finally:
                stop.set()

        def read() -> None:
            while not stop.is_set():
                reader.get(PAGES)

        together(write, read)

    @contract_test(reaching("clear_reach", Scope.NAMESPACE), slow=True)
    def test_a_clear_beside_other_calls_breaks_none_of_them(
        self, harness: Harness, case: Scope
    ) -> None:
        pool = harness.any_pool()
        if case is Scope.NAMESPACE:
            # The more a clear has to leave alone, the longer it looks.
            others = harness.scale.count(400, least=40)
            harness.rig(pool, model="model-b", pages=others).stored(page_hashes(others))
        rounds = harness.scale.count(4 * ROUNDS, least=4)
        setup = harness.rig(pool, pages=48)
        cleaner, *writers = setup.divided(3)

        def write(writer: Setup, label: str) -> None:
            for turn in range(rounds):
                pages = page_hashes(16, f"{label} {turn}")
                writer.put(pages)
                writer.get(pages)

        def clear() -> None:
            for _ in range(rounds):
                assert cleaner.clear() is Outcome.OK, "a clear failed during a put"

        together(
            clear,
            *(partial(write, twin, str(at)) for at, twin in enumerate(writers)),
        )
        assert cleaner.clear() is Outcome.OK
        for at in range(len(writers)):
            last = page_hashes(16, f"{at} {rounds - 1}")
            assert not setup.exists(last).any(), (
                "stored during a clear, left by the next"
            )
        setup.kept(PAGES)

    @contract_test(claimed("eviction"), slow=True)
    def test_a_page_that_is_evicted_while_it_is_read_is_right_or_missing(
        self, tight: Harness
    ) -> None:
        pool = tight.any_pool(page_bytes=16384, name="tight")
        reader, writer = tight.rig(pool, pages=32).divided(2)
        stop = threading.Event()
        written = [page_hashes(8, "first")]

        def write() -> None:
            try:
                for turn in range(tight.scale.count(8 * ROUNDS, least=16)):
                    written.append(page_hashes(8, turn))
                    writer.put(written[-1])
            finally:
                stop.set()

        def read() -> None:
            while not stop.is_set():
                # From the newest to those that go next, wherever that is.
                for pages in written[:-33:-1]:
                    reader.get(pages)

        together(write, read)

    @contract_test(reaching("sharing", Scope.PROCESS), proves="sharing")
    def test_two_handles_find_each_others_pages(self, harness: Harness) -> None:
        pool = harness.any_pool()
        one, two = harness.rig(pool), harness.rig(pool)
        one.stored(PAGES[:3])
        two.loaded_soon(PAGES[:3])
        two.stored(PAGES[3:])
        one.loaded_soon(PAGES)
        one.release()
        two.loaded(PAGES)
        two.kept(page_hashes(3, "after the release"))

    @contract_test(one_sample)
    def test_attachments_that_come_and_go_leave_the_calls_of_others_alone(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = harness.rig(case.pool())
        stop = threading.Event()

        def work() -> None:
            turn = 0
            while not stop.is_set():
                setup.kept(page_hashes(4, f"working {turn % 16}"))
                turn += 1

        def come_and_go() -> None:
            try:
                for turn in range(harness.scale.count(ROUNDS, least=3)):
                    brief = harness.rig(case.pool(), model=f"model-{turn % 3}")
                    brief.put(PAGES)
                    brief.release()
                    harness.forget(brief)
            finally:
                stop.set()

        together(work, come_and_go)

    @contract_test(reaching("sharing", Scope.PROCESS))
    def test_a_page_that_was_missing_is_found_once_another_handle_stored_it(
        self, harness: Harness
    ) -> None:
        pool = harness.any_pool()
        one, two = harness.rig(pool), harness.rig(pool)
        assert not two.exists(PAGES).any()
        assert (two.get(PAGES) == Outcome.ABSENT).all()
        one.stored(PAGES)
        two.loaded_soon(PAGES)

    @contract_test(one_sample)
    def test_of_two_that_store_a_key_at_once_one_is_kept(
        self, harness: Harness, case: Sample
    ) -> None:
        twins = harness.rig(case.pool(), pages=12).divided(2)
        # Engines compute the same pages, and not always the same bits of them.
        for turn in range(harness.scale.count(ROUNDS, least=4)):
            pages = page_hashes(2, f"both {turn}")
            together(
                *(partial(one.stored, pages, seed=at) for at, one in enumerate(twins))
            )
            for page in pages:
                kept = {seed_of(one, page) for one in twins}
                assert len(kept) == 1, "two threads load different bytes of one page"

    @contract_test(reaching("sharing", Scope.HOST), proves="sharing", slow=True)
    def test_two_processes_find_each_others_pages(self, harness: Harness) -> None:
        sample = harness.any_sample()
        setup = harness.rig(sample.pool())
        worker = Worker.start(harness)
        try:
            worker.attach(sample)
            worker.ask("put", hashes=PAGES[:3])
            setup.loaded_soon(PAGES[:3])
            setup.stored(PAGES[3:])
            worker.ask("get_soon", hashes=PAGES)
        finally:
            worker.end()

    @contract_test(reaching("sharing", Scope.HOST), slow=True)
    def test_processes_that_store_the_same_pages_do_not_tear_them(
        self, harness: Harness
    ) -> None:
        sample = harness.any_sample()
        setup = harness.rig(sample.pool())
        worker = Worker.start(harness)
        worker.attach(sample)
        worker.ask("write_for_ever", hashes=PAGES)
        try:
            # By the clock: the other process has to get its turns.
            end = time.monotonic() + TOGETHER_S
            while time.monotonic() < end:
                for _ in range(3):
                    setup.get(PAGES)
                setup.put(PAGES)
                setup.delete(PAGES[:2])
        finally:
            # In the middle of a write, as likely as not.
            worker.kill()
        # What it had begun may stand in the way for a while. Meanwhile pages
        # may be missing; a wrong one fails inside of `get`.
        end = setup.until(AFTER_A_KILL_S)
        whole = False
        while not whole and time.monotonic() < end:
            taken = setup.put(PAGES)
            found = setup.get(PAGES)
            whole = bool((taken == Outcome.OK).all() and (found == Outcome.OK).all())
            if not whole:
                time.sleep(0.02)
        waited_s = harness.scale.seconds(AFTER_A_KILL_S)
        assert whole, (
            "the pages of a killed writer cannot be stored and loaded within "
            f"{waited_s:.0f} s: at last put was answered {spelled(taken)}, and get "
            f"{spelled(found)}"
        )

    @contract_test(
        reaching("durability", Scope.PROCESS), proves="durability", slow=True
    )
    def test_pages_outlive_the_process_that_stored_them(self, harness: Harness) -> None:
        sample, worker = self._stored_elsewhere(harness)
        worker.end()
        setup = harness.rig(sample.pool())
        assert setup.exists(PAGES).all(), "not found after the writer had ended"
        setup.loaded(PAGES)

    @contract_test(reaching("durability", Scope.PROCESS), slow=True)
    def test_pages_outlive_a_process_that_is_killed(self, harness: Harness) -> None:
        sample, worker = self._stored_elsewhere(harness)
        worker.ask("write_for_ever", hashes=page_hashes(6, "more"))
        # No release comes before it: what is OK is kept, and the rest in one piece.
        worker.kill()
        setup = harness.rig(sample.pool())
        assert setup.exists_soon(PAGES).all(), "not found after the writer was killed"
        setup.loaded(PAGES)
        setup.get(page_hashes(6, "more"))

    @staticmethod
    def _stored_elsewhere(harness: Harness) -> tuple[Sample, Worker]:
        """Let another process store the pages."""
        sample = harness.any_sample()
        worker = Worker.start(harness)
        worker.attach(sample)
        stored = worker.ask("put", hashes=PAGES)
        if not stored.startswith("OK"):
            worker.kill()
            pytest.fail(f"another process could not store: {stored}")
        return sample, worker
