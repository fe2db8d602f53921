"""Calls that were abandoned: their memory has another use, and their I/O goes on.

The gate of these tests closes at each of its passages in turn, and at that moment
the memory is used again. Nothing is left to chance: what moves at any other time
than inside of the gate is seen. Real I/O is held back until its call is abandoned.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from kvdock.batch import Batch, MemoryGate, Operation, Outcome
from kvdock.config.core import StagingPolicy
from kvdock.plugin.manifest import Capability, Manifest
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import TransferMode
from kvdock.testing.cases import Case, claimed, contract_test, one_sample
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvdock.arrays import OutcomeArray
    from kvdock.testing.cases import Chooser
    from kvdock.testing.harness import Harness, Setup

PAGES = 3
REUSED = 0x77
"""What the engine puts into memory that it uses again."""

LARGE_BYTES = 768 << 10
"""An object that no bounce buffer in a processor's cache holds whole."""

MOST_STEPS = 24
"""Passages of one call at which its gate is closed in turn."""

MOST_HELD = 6
"""Reads or writes of one call that are held back in turn."""

CLOSE_S = 3.0
"""How long closing a gate may take: a copy in memory, on a busy machine."""

HELD_S = 20.0
"""How long I/O is held back at most, so that no test hangs."""

POSITIONAL = ("pread", "preadv", "pwrite", "pwritev")
"""Functions of `os` that tests hold back."""
_FLAGS = 3
"""Position of the flags of `preadv` and `pwritev`."""


class WatchedGate(MemoryGate):
    """A gate that closes at one passage, and sees what changes between passages.

    One thread is inside at a time, so what changes while none is inside is not
    another thread's copy.

    Args:
        setup: Whose memory it is.
        step: At which passage, in or out, to close and use the memory again.
    """

    def __init__(self, setup: Setup, step: int) -> None:
        super().__init__()
        self._setup = setup
        self._step = step
        self._turn = threading.Lock()
        self._seen = setup.seen()
        self.passages = 0
        self.strayed = False

    def enter(self) -> bool:
        """Pass in, unless it closes just now."""
        self._turn.acquire()
        self.look()
        self._pass()
        entered = super().enter()
        if not entered:
            self._turn.release()
        return entered

    def leave(self) -> None:
        """Pass out, and close just now."""
        super().leave()
        self._seen = self._setup.seen()
        self._pass()
        self._turn.release()

    def look(self) -> None:
        """Look for bytes that changed while no thread was inside."""
        self.strayed |= self._setup.seen() != self._seen

    def _pass(self) -> None:
        if self.passages == self._step:
            self.close(time.monotonic() + CLOSE_S)
            reuse(self._setup)
            self._seen = self._setup.seen()
        self.passages += 1


class HeldIO:
    """Positional reads and writes, held back from the n-th one on.

    Args:
        number: How many pass before that.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self.begun = 0
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits before it moves any byte."""

        def held(*given: Any) -> Any:  # noqa: ANN401 - as the function has them
            if len(given) > _FLAGS and given[_FLAGS] & getattr(os, "RWF_NOWAIT", 0):
                # A disk that takes its time has nothing in the page cache.
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            with self._lock:
                mine = self.begun
                self.begun += 1
            if mine >= self._number:
                self.reached.set()
                self.go_on.wait(HELD_S)
            return call(*given)

        return held


@contextmanager
def held_io(number: int) -> Iterator[HeldIO]:
    """Hold back the I/O of this process from the n-th read or write on."""
    held = HeldIO(number)
    with pytest.MonkeyPatch.context() as patch:
        for name in POSITIONAL:
            patch.setattr(os, name, held.around(getattr(os, name)))
        try:
            yield held
        finally:
            held.go_on.set()


def reuse(setup: Setup) -> None:
    """Use the memory of a pool again, as an engine does."""
    for block in setup.memory.insides:
        block[:] = REUSED


def is_reused(setup: Setup) -> bool:
    """Return whether the memory still holds what the engine put there."""
    return all((block == REUSED).all() for block in setup.memory.insides)


def promised(field: str) -> Chooser:
    """Run where a promise is made, for small objects and for a large one."""

    def choose(manifest: Manifest) -> Iterable[Case]:
        (grade,) = claimed(field)(manifest)
        (plain,) = one_sample(manifest)
        skip = grade.skip or plain.skip
        if not skip and not manifest.zero_copy:
            skip = "it has no zero copy, so the core's own memory is used"
        yield Case(f"small-{grade.id}", plain.value, skip)
        large = attrs.evolve(plain.value, page_bytes=LARGE_BYTES) if not skip else None
        most = manifest.max_object_bytes
        if not skip and 0 < most < LARGE_BYTES:
            skip = f"it takes no objects of {LARGE_BYTES} bytes"
        yield Case(f"large-{grade.id}", large, skip)

    return choose


def rig(harness: Harness, sample: Sample) -> Setup:
    """Attach a pool whose pages a backend reaches itself, or skip."""
    setup = harness.rig(sample.pool(), pages=2 * PAGES)
    if setup.staging is not None:
        pytest.skip("its pages are staged, so the core's own memory is used")
    return setup


def filled(setup: Setup, operation: Operation, hashes: list[str]) -> Batch:
    """Return a batch over memory that is filled for a put and blank for a get."""
    places = setup.places(len(hashes))
    setup.memory.blank(*setup.own)
    if operation is Operation.PUT:
        for place, page in zip(places, hashes, strict=True):
            setup.memory.write(int(place), page)
    return setup.batch(operation, hashes, places)[0]


def run_gated(
    setup: Setup, batch: Batch, step: int
) -> tuple[WatchedGate, OutcomeArray]:
    """Run a batch whose gate closes at a step; return the gate and the outcomes."""
    gate = WatchedGate(setup, step)
    outcomes = setup.call(attrs.evolve(batch, gate=gate)).outcomes
    gate.look()
    return gate, outcomes


def abandoned(setup: Setup, batch: Batch, number: int) -> bool:
    """Abandon a call during its n-th read or write; return whether it had as many."""
    gate = MemoryGate()
    batch = attrs.evolve(batch, gate=gate)
    with held_io(number) as held:
        caller = threading.Thread(target=setup.call, args=(batch,))
        caller.start()
        try:
            while caller.is_alive() and not held.reached.wait(0.002):
                pass
            reached = held.reached.is_set()
            if reached:
                assert gate.close(setup.until(CLOSE_S)), (
                    "the gate is not left while a read or write takes its time: an "
                    "abandoned call would keep its engine waiting"
                )
                reuse(setup)
        finally:
            held.go_on.set()
            caller.join()
    return reached


def check_kept(setup: Setup, hashes: list[str]) -> None:
    """Assert that pages of an abandoned put are right or missing, and heal."""
    setup.get(hashes)
    setup.kept(hashes)


class LateTests:
    """Memory of an abandoned call is left alone as declared."""

    @contract_test(one_sample)
    def test_an_engine_that_reuses_pages_at_once_is_staged_unless_both_are_promised(
        self, harness: Harness, case: Sample
    ) -> None:
        (route,) = harness.routes([case.pool()], staging=StagingPolicy.SAFE)
        assert route.backend, route.reason
        (usual,) = harness.routes([case.pool()])
        manifest = harness.backend.manifest
        if not (manifest.gated_get and manifest.gated_put):
            assert route.mode is TransferMode.STAGED, route.reason
        elif usual.mode is TransferMode.ZERO_COPY:
            said = [
                harness.backend.check_capability(
                    capability,
                    case.pool(),
                    Shard(),
                    harness.backend.settings(harness.settings),
                )
                for capability in (Capability.GATED_GET, Capability.GATED_PUT)
            ]
            gated = all(one is None or bool(one) for one in said)
            wanted = TransferMode.GATED if gated else TransferMode.STAGED
            assert route.mode is wanted, route.reason

    @contract_test(promised("gated_get"), proves="gated_get")
    def test_an_abandoned_get_leaves_memory_alone(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = rig(harness, case)
        hashes = page_hashes(PAGES)
        setup.stored(hashes)
        for step in [*range(MOST_STEPS), -1]:
            gate, outcomes = run_gated(
                setup, filled(setup, Operation.GET, hashes), step
            )
            if gate.closed:
                assert is_reused(setup), "bytes of a get came after it was abandoned"
            assert not gate.strayed, (
                "bytes of a get came outside of its gate: an abandoned call would "
                "write into a page of another use"
            )
            if gate.closed:
                continue
            assert (outcomes == Outcome.OK).all(), "an open gate, and pages are missing"
            assert gate.passages, "pages were loaded without a passage of their gate"
            break
        setup.loaded(hashes)

    @contract_test(promised("gated_put"), proves="gated_put")
    def test_an_abandoned_put_keeps_nothing_of_what_came_later(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = rig(harness, case)
        for step in [*range(MOST_STEPS), -1]:
            hashes = page_hashes(PAGES, f"step {step}")
            gate, outcomes = run_gated(
                setup, filled(setup, Operation.PUT, hashes), step
            )
            # Only their own bytes, or nothing: `get` sees to that.
            setup.get(hashes)
            if not gate.closed:
                assert (outcomes == Outcome.OK).all(), "an open gate, and nothing kept"
                assert gate.passages, (
                    "pages were stored without a passage of their gate"
                )
                setup.loaded(hashes)
                break
            check_kept(setup, hashes)

    @contract_test(promised("gated_get"), proves="gated_get")
    def test_a_read_that_ends_after_its_call_was_abandoned_fills_no_page(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = rig(harness, case)
        hashes = page_hashes(PAGES)
        setup.stored(hashes)
        for number in range(MOST_HELD):
            if not abandoned(setup, filled(setup, Operation.GET, hashes), number):
                _demand_io(number)
                break
            assert is_reused(setup), "a read that was held back filled a page"
        setup.loaded(hashes)

    @contract_test(promised("gated_put"), proves="gated_put")
    def test_a_write_that_ends_after_its_call_was_abandoned_is_never_served(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = rig(harness, case)
        for number in range(MOST_HELD):
            hashes = page_hashes(PAGES, f"write {number}")
            if not abandoned(setup, filled(setup, Operation.PUT, hashes), number):
                _demand_io(number)
                break
            check_kept(setup, hashes)


def _demand_io(number: int) -> None:
    """Skip where no read or write could be held back."""
    if not number:
        pytest.skip("its I/O passes through none of os." + ", os.".join(POSITIONAL))
