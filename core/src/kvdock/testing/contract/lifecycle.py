"""Attach, release, fork: what a plugin leaves behind in the engine."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvdock.batch import Batch, Operation, Outcome
from kvdock.plugin.manifest import Manifest, Scope, Support
from kvdock.testing.cases import Case, contract_test, graded, one_sample
from kvdock.testing.harness import becomes
from kvdock.testing.open_files import open_files
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvdock.testing.harness import Harness, Setup

PAGES = page_hashes(4)
BESIDE = 20
"""Rounds of a child whose parent goes on."""

SETTLE_S = 5.0
"""How long threads may take to end after a release."""

CHILD_S = 20.0
"""How long a forked child may take before it counts as hung."""


def used_once(harness: Harness, sample: Sample) -> None:
    """Attach, store, load and release."""
    setup = harness.rig(sample.pool())
    setup.put(PAGES)
    setup.get(PAGES)
    setup.release()


def threads() -> int:
    """Return the number of threads, those of C libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def registration(manifest: Manifest) -> Iterable[Case]:
    """Run with the grade of memory registration, where bytes move directly."""
    (case,) = graded("memory_registration")(manifest)
    skip = case.skip
    if not skip and not manifest.zero_copy:
        skip = "it has no zero copy, so the core's own memory is used"
    yield Case(case.id, case.value, skip)


class LifecycleTests:
    """A released plugin leaves the engine's process as it was."""

    @contract_test(one_sample)
    def test_a_released_pool_can_be_attached_again(
        self, harness: Harness, case: Sample
    ) -> None:
        harness.rig(case.pool()).release()
        setup = harness.rig(case.pool())
        setup.stored(PAGES)
        setup.release()
        again = harness.rig(case.pool())
        if harness.backend.manifest.sharing is not Scope.NONE:
            again.loaded_soon(PAGES)
        again.kept(PAGES)

    @contract_test(one_sample)
    def test_releasing_one_pool_leaves_the_others_alone(
        self, harness: Harness, case: Sample
    ) -> None:
        kind = case.kind
        one, two = harness.attach(
            [harness.sample(kind, name=name).pool() for name in ("one", "two")]
        )
        one.stored(PAGES)
        two.stored(PAGES)
        one.release()
        two.loaded(PAGES)
        two.stored(page_hashes(3, "more"))

    @contract_test(one_sample)
    def test_signal_handlers_stay_the_hosts(
        self, harness: Harness, case: Sample
    ) -> None:
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        setup = harness.rig(case.pool())
        setup.put(PAGES)
        during = {number: signal.getsignal(number) for number in signal.valid_signals()}
        setup.release()
        after = {number: signal.getsignal(number) for number in signal.valid_signals()}
        changed = [n for n in before if before[n] is not during[n]]
        changed += [n for n in before if before[n] is not after[n]]
        for number in changed:
            signal.signal(number, before[number])
        names = [signal.Signals(number).name for number in sorted(set(changed))]
        assert not names, f"handlers replaced: {names}"

    @contract_test(one_sample)
    def test_memory_that_is_held_after_a_call_is_free_after_the_release(
        self, rig: Setup
    ) -> None:
        rig.put(PAGES)
        rig.get(PAGES)
        rig.get(page_hashes(3, "absent"))
        rig.get(PAGES, deadline_s=time.monotonic())
        rig.release()
        assert becomes(lambda: all(hold.released for hold in rig.holds), SETTLE_S), (
            "it still holds an engine's pages after their pool was released"
        )

    @contract_test(one_sample)
    def test_no_descriptor_or_thread_is_left_behind(
        self, harness: Harness, case: Sample
    ) -> None:
        # The first round is for what a library keeps until the process ends.
        used_once(harness, case)
        gc.collect()
        files, count = open_files(), threads()
        for _ in range(3):
            used_once(harness, case)
        gc.collect()
        assert becomes(lambda: threads() <= count, SETTLE_S), (
            f"threads left: {[t.name for t in threading.enumerate()]}"
        )
        assert becomes(lambda: len(open_files()) <= len(files), SETTLE_S), (
            f"left open: {sorted(open_files() - files)}"
        )

    @contract_test(one_sample)
    def test_no_reference_to_the_callers_memory_is_kept(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = harness.rig(case.pool())
        setup.stored(PAGES)
        places = setup.places(len(PAGES))
        batch, rows = setup.batch(Operation.GET, PAGES, places)
        watched = weakref.ref(batch)
        setup.call(batch)
        del batch, rows
        gc.collect()
        assert watched() is None, "a batch is kept after its call"
        mine = [
            *setup.memory.blocks,
            *([] if setup.staging is None else [setup.staging]),
        ]
        blocks = [weakref.ref(block) for block in mine]
        del mine
        setup.release()
        harness.forget(setup)
        del setup
        gc.collect()
        assert all(block() is None for block in blocks), (
            "the pool's memory is kept after the release"
        )

    @contract_test(registration)
    def test_memory_is_taken_as_registration_is_declared(
        self, harness: Harness, case: Support
    ) -> None:
        setup = harness.plain()

        setup.stored(PAGES[:1])
        nbytes = int(setup.region.object_bytes[0])
        # Where nothing is registered, what it brings itself is near enough.
        elsewhere = np.zeros(nbytes, np.uint8) if case else setup.bring(nbytes)
        elsewhere[:] = 7
        key = setup.keys(PAGES[:1])[:1]
        other = setup.keys(["f" * 64])[:1]
        deadline = setup.until()
        at, size = [[elsewhere.ctypes.data]], [[nbytes]]
        got = setup.call(Batch(Operation.GET, key, at, size, deadline)).outcomes[0]
        put = setup.call(Batch(Operation.PUT, other, at, size, deadline)).outcomes[0]
        if case:
            assert Outcome(int(got)) is Outcome.REFUSED, (
                "it wrote to memory that was never registered"
            )
            assert Outcome(int(put)) is Outcome.REFUSED, (
                "it read memory that was never registered"
            )
            assert (elsewhere == 7).all()
        else:
            assert (got, put) == (Outcome.OK, Outcome.OK), (
                "it rejects memory although it declares that it registers none"
            )

    @contract_test(graded("fork_safe"), proves="fork_safe")
    def test_a_forked_child_meets_what_is_declared(
        self, harness: Harness, case: Support
    ) -> None:
        setup = harness.plain()

        setup.stored(PAGES)
        with forked(lambda: _child(setup, safe=bool(case))) as answer:
            word = answer()
        assert word == "fine", f"in a forked child: {word}"
        setup.loaded(PAGES)
        setup.kept(page_hashes(2, "after"))

    @contract_test(graded("fork_safe"), proves="fork_safe")
    def test_a_forked_child_beside_its_parent_meets_what_is_declared(
        self, harness: Harness, case: Support
    ) -> None:
        # Pages of their own: what a backend allocates may be memory that both share.
        setup, theirs = harness.plain().divided(2)
        setup.stored(PAGES)

        def child() -> None:
            for _ in range(BESIDE):
                _child(theirs, safe=bool(case))

        # A connection that both use mixes up their answers.
        with forked(child) as answer:
            word = answer(lambda: setup.loaded(PAGES))
        assert word == "fine", f"in a forked child beside its parent: {word}"


def _child(setup: Setup, *, safe: bool) -> None:
    """Use an inherited handle; wrong bytes and hanging are never allowed."""
    try:
        outcomes = setup.get(PAGES)
    except AssertionError:
        raise
    except Exception:  # noqa: BLE001 - refusing by an error is allowed if declared
        assert not safe, "declared fork safe, but it raised"
        return
    if safe:
        assert (outcomes == Outcome.OK).all(), f"answered {outcomes.tolist()}"
        setup.stored(page_hashes(2, "child"))


@contextlib.contextmanager
def forked(job: Callable[[], None]) -> Iterator[Callable[..., str]]:
    """Run a job in a forked child; its word is "fine" or what went wrong.

    Yields:
        What waits for the word, and meanwhile calls what it is given.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Python warns about forking with threads: that is what is tried here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        word = "died"
        try:
            job()
            word = "fine"
        except BaseException as error:  # noqa: BLE001 - sent to the parent
            word = f"{type(error).__name__}: {error}"
        finally:
            os.write(write_end, word.encode()[:4000])
            os._exit(0)
    os.close(write_end)

    def answer(beside: Callable[[], object] = lambda: time.sleep(0.005)) -> str:
        deadline = time.monotonic() + CHILD_S
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                said = os.read(read_end, 4096).decode()
                return said or f"it died with status {status}"
            beside()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"it hung for {CHILD_S:.0f} s"

    try:
        yield answer
    finally:
        os.close(read_end)
