"""Promises and expiries over two tiers, with two attachments, kills and a clock.

As `segments/tests/test_promises_machine.py`, one floor up: copies between the tiers are
under way while pages expire, are extended, deleted and cleared.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import ClassVar
from unittest.mock import patch

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from killed_writes import MEMORY, killed
from shelf import Shelf, patient

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.batch import Outcome
from kvdock.pools import Part
from kvdock.retention import RetentionAnswer
from kvdock_segments import SegmentStore

TORTURE = os.environ.get("TESTS_OF_KVDOCK_TORTURE") == "1"
STEPS = 50
PAGE_BYTES = 1024
POOL = PoolSpec(
    name="kv",
    kind="k_only",
    parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
    layers=[0],
    page_tokens=16,
    anchor=True,
)
PAGES = 64
LONGEST = 8
NUMBERS = st.builds(
    lambda prefix, count: list(range(prefix * LONGEST, prefix * LONGEST + count)),
    st.integers(0, PAGES // LONGEST - 1),
    st.integers(1, LONGEST),
)
"""Heads of a few prefixes: the same pages come again and again."""
ENGINE = st.integers(0, 1)
SECONDS = st.sampled_from([None, None, 600, 3600, 86_400])
OK = int(Outcome.OK)
ACCEPTED = int(RetentionAnswer.ACCEPTED)
CORE = patient()


@attrs.define
class Page:
    """What the model knows of a page.

    Args:
        ends: The times at which it may expire: more than one where it is not known
            which copy is served; 0 for never, and none where no copy may be served.
        kept: Until when it is promised; 0 for no promise.
    """

    ends: set[int] = attrs.field(factory=set)
    kept: int = 0


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, np.uint8)


class LifeOfTiers(RuleBasedStateMachine):
    """Two engines that share both tiers."""

    far: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(prefix="kvdock-tiers-", dir=MEMORY)
        objects: dict[str, bytes] = {}
        # One for each engine: a shelf knows the memory of one attachment.
        self.shelves = [Shelf("far", objects=objects) for _ in range(2)]
        self.ahead = 0.0
        self.real = time.time
        self.clock = patch("time.time", self.now)
        self.clock.start()
        self.pages = {number: Page() for number in range(PAGES)}
        self.leaving: set[int] = set()
        self.memory = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(2)]
        self.caches: list[Attachment] = []

    def now(self) -> float:
        return self.real() + self.ahead

    def soon(self, seconds: float) -> int:
        return int(self.now() + seconds)

    def open(self, which: int) -> Attachment:
        given: dict[str, dict[str, object]] = {
            name: {
                "plugin": "file",
                "root": f"{self.folder.name}/{name}",
                "direct": False,
                "quota": "256 MiB",
                "free_space": "1 MiB",
            }
            for name in (["near", "far"] if self.far == "file" else ["near"])
        }
        loaded = Dock.load(only=[*given], settings=given, environ={})
        dock = Dock({"far": self.shelves[which].backend(), **loaded.backends})
        plan = dock.plan([POOL], Shard(), tiers=["near", "far"], settings=given)
        regions = {"kv": Region.of(POOL, Shard(), [self.memory[which]], PAGES)}
        return Attachment.open(
            dock, plan, Namespace(model="m"), regions, given, core=CORE
        )

    @initialize()
    def begin(self) -> None:
        self.caches = [self.open(0), self.open(1)]

    # --- Operations ----------------------------------------------------------

    @rule(which=ENGINE, numbers=NUMBERS)
    def put(self, which: int, numbers: list[int]) -> None:
        self.learn_put(numbers, self.stored(which, numbers, None, None), None, None)

    @rule(which=ENGINE, numbers=NUMBERS, keep_s=SECONDS, expire_s=SECONDS)
    def put_with_times(
        self, which: int, numbers: list[int], keep_s: int | None, expire_s: int | None
    ) -> None:
        answer = self.stored(which, numbers, keep_s, expire_s)
        self.learn_put(numbers, answer, keep_s, expire_s)

    def stored(
        self, which: int, numbers: list[int], keep_s: int | None, expire_s: int | None
    ) -> list[tuple[bool, bool]]:
        """Store pages; return whether each is stored, and its times hold."""
        self.memory[which][numbers] = [content(number) for number in numbers]
        result = self.caches[which].put(
            names(numbers), {"kv": numbers}, keep_s=keep_s, expire_s=expire_s
        )
        stored = result.outcomes["kv"] == OK
        held = np.ones(len(numbers), np.bool_)
        if result.retained is not None:
            held = result.retained == ACCEPTED
        return list(zip(stored.tolist(), held.tolist(), strict=True))

    def learn_put(
        self,
        numbers: list[int],
        answer: list[tuple[bool, bool]],
        keep_s: int | None,
        expire_s: int | None,
    ) -> None:
        self.leaving.difference_update(numbers)
        end = self.soon(expire_s) if expire_s else 0
        until = self.soon(keep_s) if keep_s else 0
        for number, (stored, held) in zip(numbers, answer, strict=True):
            page = self.pages[number]
            if not stored:
                if end:  # of one tier of two
                    page.ends |= {end, end + 1}
                continue
            fresh = not self.may_be_served(number)
            if held and end:
                page.ends = {end, end + 1}
            elif end:
                page.ends |= {end, end + 1, 0}
            elif fresh:
                page.ends = {0}
            if fresh:
                page.kept = 0
            self.promise(page, until if held else 0)

    def promise(self, page: Page, until: int) -> None:
        page.kept = max(page.kept, until)
        ends = [end for end in page.ends if end]
        if ends:
            page.kept = min(page.kept, *ends)

    @rule(which=ENGINE, numbers=NUMBERS, seconds=st.sampled_from([600, 3600, 86_400]))
    def expire(self, which: int, numbers: list[int], seconds: int) -> None:
        end = self.soon(seconds)
        answers = self.caches[which].expire(names(numbers), seconds).tolist()
        self.leaving.difference_update(numbers)
        for number, answer in zip(numbers, answers, strict=True):
            page = self.pages[number]
            if answer == RetentionAnswer.ABSENT:
                assert number not in self.promised()
            elif answer == ACCEPTED:
                page.ends = {end, end + 1}
            elif self.may_be_served(number):
                page.ends |= {end, end + 1}
            self.promise(page, 0)

    @rule(which=ENGINE, numbers=NUMBERS, seconds=st.sampled_from([600, 3600, 86_400]))
    def retain(self, which: int, numbers: list[int], seconds: int) -> None:
        until = self.soon(seconds)
        answers = self.caches[which].retain(names(numbers), seconds).tolist()
        for number, answer in zip(numbers, answers, strict=True):
            if answer == ACCEPTED:
                self.promise(self.pages[number], until)
                self.leaving.discard(number)

    @rule(which=ENGINE, numbers=NUMBERS)
    def get(self, which: int, numbers: list[int]) -> None:
        self.refresh()
        on_time = {number for number in numbers if self.may_be_served(number)}
        promised = self.promised()
        self.memory[which][numbers] = 0
        answers = self.caches[which].get(names(numbers), {"kv": numbers})
        served = set(np.array(numbers)[answers.outcomes["kv"] == OK].tolist())
        for number in served:
            assert np.array_equal(self.memory[which][number], content(number))
        assert served <= on_time, f"served late: {served - on_time}"
        lost = (promised & set(numbers)) - served
        assert not lost, f"the promises of pages {lost} are broken"

    @rule(which=ENGINE, numbers=NUMBERS)
    def delete(self, which: int, numbers: list[int]) -> None:
        assert not self.caches[which].delete(names(numbers)).any()
        self.learn_gone(numbers)

    def learn_gone(self, numbers: Iterable[int]) -> None:
        """Forget pages: a copy under way may show them, until it ends."""
        self.pages.update({number: Page({0}) for number in numbers})
        self.leaving |= {*numbers}
        self.learn_left()

    def learn_left(self) -> None:
        if all(cache.wait_idle(0) for cache in self.caches):
            self.pages.update({number: Page() for number in self.leaving})
            self.leaving.clear()

    @rule(which=ENGINE, sure=st.integers(0, 5))
    def clear(self, which: int, sure: int) -> None:
        if sure:
            return
        cleared = self.caches[which].clear()
        assert set(cleared.values()) == {Outcome.OK}
        self.learn_gone(range(PAGES))

    @rule(seconds=st.sampled_from([30, 700, 4000, 90_000]))
    def jump(self, seconds: int) -> None:
        """Skip more time than a copy has."""
        for cache in (0, 1):
            self.settle(cache)
        self.ahead += seconds

    @rule(which=ENGINE)
    def settle(self, which: int) -> None:
        """Wait for copies."""
        assert self.caches[which].wait_idle(60)
        self.learn_left()
        self.refresh()

    # --- Processes -----------------------------------------------------------

    @rule(which=ENGINE)
    def restart(self, which: int) -> None:
        assert self.caches[which].close()
        self.caches[which] = self.open(which)

    @rule(
        numbers=NUMBERS,
        keep_s=SECONDS,
        expire_s=SECONDS,
        before=st.integers(1, 24),
        seldom=st.integers(0, 3),
    )
    def put_by_a_child_that_is_killed(
        self,
        numbers: list[int],
        keep_s: int | None,
        expire_s: int | None,
        before: int,
        seldom: int,
    ) -> None:
        """Kill a process before one of its writes, or between its copies."""
        if seldom or self.far != "file":
            return
        for cache in (0, 1):
            self.settle(cache)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            with suppress(BaseException), killed(before):
                self.caches = [self.open(0)]
                self.stored(0, numbers, keep_s, expire_s)
                self.caches[0].wait_idle(60)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        end = self.soon(expire_s) if expire_s else 0
        for number in numbers:
            page = self.pages[number]
            page.ends |= {end, end - 1, end + 1} if end else {0}
            self.leaving.discard(number)
            if end:
                self.promise(page, 0)
        self.refresh()

    def refresh(self) -> None:
        """Let each process see what others changed, as it does within 50 ms."""
        for cache in self.caches:
            for placement in cache["kv"].placements:
                if isinstance(placement.handle, SegmentStore):
                    placement.handle._catalog.refresh(missed=True, always=True)

    # --- The laws ------------------------------------------------------------

    def may_be_served(self, number: int) -> bool:
        now = int(self.now()) - 1  # the call takes time
        return any(not end or end > now for end in self.pages[number].ends)

    def promised(self) -> set[int]:
        """Return the pages that are promised and do not expire in this second."""
        now = self.now() + 2
        return {
            number
            for number, page in self.pages.items()
            if page.kept > now and not any(end and end <= now for end in page.ends)
        }

    @invariant()
    def counted(self) -> None:
        steps[0] += 1

    def teardown(self) -> None:
        for cache in self.caches:
            cache.close()
        self.clock.stop()
        self.folder.cleanup()


def names(numbers: list[int]) -> list[str]:
    return [f"{number:064x}" for number in numbers]


steps = [0]


@pytest.mark.parametrize("far", ["file", "shelf"])
def test_promises_and_expiries_hold_over_tiers(far: str) -> None:
    run_state_machine_as_test(
        type("Life", (LifeOfTiers,), {"far": far}),
        settings=settings(
            max_examples=55_000 // STEPS if TORTURE else 4,
            stateful_step_count=STEPS,
            deadline=None,
            phases=[Phase.generate],  # the trace of a failure is short enough
            suppress_health_check=list(HealthCheck),
        ),
    )
    if TORTURE:
        print(f"{steps[0]} steps")  # noqa: T201 - the count is the result
