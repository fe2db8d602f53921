"""Promises, expiries and budgets over two processes, kills and clocks that jump.

A model knows of each page when it expires and until when it is promised. After each
step the records on disk are held against it, and the ledger against a recount.
"""

import hashlib
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest.mock import patch

import attrs
import numpy as np
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

from kvdock.batch import Batch, Operation, Outcome
from kvdock_segments import SegmentStore
from kvdock_segments.format import RECORD, key_digests, key_seed
from kvdock_segments.walk import segments

TORTURE = os.environ.get("TESTS_OF_KVDOCK_TORTURE") == "1"
STEPS = 50
NAMESPACE = hashlib.sha256(b"{}").hexdigest()
PAGE_BYTES = SLOT_BYTES = 2048
SEGMENT_BYTES = 16 << 10
QUOTA = 16 * SEGMENT_BYTES
PAGES = 96
SHARE = 0.4
OK = int(Outcome.OK)
LONGEST = 12
NUMBERS = st.builds(
    lambda prefix, count: list(range(prefix * LONGEST, prefix * LONGEST + count)),
    st.integers(0, PAGES // LONGEST - 1),
    st.integers(1, LONGEST),
)
"""Heads of a few prefixes: the same pages come again and again."""
STORE = st.integers(0, 1)
SECONDS = st.sampled_from([0, 600, 3600, 86_400])
ENDS = st.sampled_from([None, None, None, 0, 600, 3600, 86_400])


@attrs.define
class Page:
    """What the model knows of a page that was stored.

    Args:
        ends: The times at which it may expire: more than one after a kill; 0 for never.
        kept: Until when it is promised; 0 for no promise.
    """

    ends: set[int] = attrs.field(factory=lambda: {0})
    kept: int = 0


class LifeOfPromises(RuleBasedStateMachine):
    """Two stores on one root."""

    open_depot: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(prefix="kvdock-promises-", dir=MEMORY)
        self.root = Path(self.folder.name) / "store"
        self.ahead = 0.0
        self.real = time.time
        self.clock = patch("time.time", self.now)
        self.clock.start()
        self.pages: dict[int, Page] = {}
        self.past: dict[int, set[int]] = {}  # ends of records that were replaced
        self.exact = True  # no process was killed since one had the store alone
        self.set_back = False
        self.depots: list[Any] = []
        self.records = np.zeros(0, RECORD)

    def now(self) -> float:
        return self.real() + self.ahead

    def soon(self, seconds: float) -> int:
        return int(self.now() + seconds)

    def open(self) -> Any:
        return type(self).open_depot(
            self.root,
            page_bytes=PAGE_BYTES,
            quota=QUOTA,
            segment_bytes=SEGMENT_BYTES,
            retained_share=SHARE,
        )

    @initialize()
    def begin(self) -> None:
        self.depots = [self.open(), self.open()]

    # --- Operations ----------------------------------------------------------

    @rule(
        which=STORE,
        numbers=NUMBERS,
        keep_s=SECONDS,
        expire_s=ENDS,
    )
    def put(
        self, which: int, numbers: list[int], keep_s: int, expire_s: int | None
    ) -> None:
        self.learn_put(self.stored(which, numbers, keep_s, expire_s))

    def stored(
        self, which: int, numbers: list[int], keep_s: int, expire_s: int | None
    ) -> tuple[Any, ...]:
        until = self.soon(keep_s) if keep_s else 0
        end = None if expire_s is None else self.soon(expire_s)
        ends = None if end is None else np.full(len(numbers), end, np.int64)
        before = self.on_disk()
        result = self.depots[which].put(numbers, keep_until=until, expire_at=ends)
        kept = [False] * len(numbers) if result.kept is None else result.kept.tolist()
        return numbers, result.ok.tolist(), kept, until, end, before

    def learn_put(self, answer: tuple[Any, ...]) -> None:
        numbers, stored, kept, until, end, before = answer
        for number, ok, is_kept in zip(numbers, stored, kept, strict=True):
            page = self.pages.get(number)
            if not ok:
                if page is not None and end is not None:
                    page.ends |= {end}  # of one record of two
                    self.clip(page, 0)
                continue
            if page is None or number not in before:
                page = self.renewed(number)
            if end is not None:
                page.ends = {end}
            self.clip(page, until if is_kept else 0)

    def renewed(self, number: int, ends: set[int] | None = None) -> Page:
        """Forget a page for a new one; its record may come to life with the clock."""
        page = self.pages.get(number)
        self.past.setdefault(number, set()).update(page.ends - {0} if page else ())
        self.pages[number] = Page(ends or {0})
        return self.pages[number]

    def clip(self, page: Page, until: int) -> None:
        """Learn a promise, which no page has beyond its end."""
        page.kept = max(page.kept, until)
        ends = [end for end in page.ends if end]
        if ends:
            page.kept = min(page.kept, *ends)

    @rule(
        which=STORE,
        numbers=NUMBERS,
        keep_s=SECONDS,
        expire_s=ENDS,
    )
    def retain(
        self, which: int, numbers: list[int], keep_s: int, expire_s: int | None
    ) -> None:
        depot = self.depots[which]
        until = self.soon(keep_s) if keep_s else 0
        end = None if expire_s is None else self.soon(expire_s)
        ends = None if end is None else np.full(len(numbers), end, np.int64)
        batch = Batch(
            Operation.RETAIN, depot.keys(numbers), keep_until=until, expire_at=ends
        )
        result = depot.store.run(batch)
        for number, outcome in zip(numbers, result.outcomes.tolist(), strict=True):
            page = self.pages.get(number)
            if page is None:
                assert outcome != OK
            elif outcome == OK:
                page.ends = page.ends if end is None else {end}
                self.clip(page, until)
            elif end is not None:
                # The expiry may hold where the promise has no room.
                page.ends = page.ends | {end}
                self.clip(page, 0)

    @rule(which=STORE, numbers=NUMBERS)
    def store_again_what_has_expired(self, which: int, numbers: list[int]) -> None:
        """Store pages whose expired records lie in a segment of another process."""
        self.put(which, numbers, 0, 600)
        self.jump(4000)
        self.look()
        self.put(1 - which, numbers, 86_400, None)

    @rule(which=STORE, numbers=NUMBERS, first=st.integers(1, 1000))
    def evict_after_a_promise(self, which: int, numbers: list[int], first: int) -> None:
        """Store much once a promise has ended: its pages make room."""
        self.put(which, numbers, 600, None)
        self.jump(4000)
        self.flood(which, first, 8)

    @rule(which=STORE, numbers=NUMBERS)
    def get(self, which: int, numbers: list[int]) -> None:
        on_time = {number for number in numbers if self.may_be_served(number)}
        answers = self.depots[which].get(numbers)  # proves the bytes
        served = {n for n, one in zip(numbers, answers, strict=True) if one == OK}
        assert served <= on_time, f"served late: {served - on_time}"

    @rule(which=STORE, numbers=NUMBERS)
    def delete(self, which: int, numbers: list[int]) -> None:
        self.depots[which].delete(numbers)
        self.refresh()
        for number in numbers:
            self.pages.pop(number, None)
            self.past.pop(number, None)

    @rule(which=STORE, sure=st.integers(0, 9))
    def clear(self, which: int, sure: int) -> None:
        if not sure:
            assert self.depots[which].clear().ok.all()
            self.pages.clear()
            self.past.clear()

    @rule(which=STORE, first=st.integers(1, 1000), calls=st.integers(1, 8))
    def flood(self, which: int, first: int, calls: int) -> None:
        for call in range(calls):
            start = 1000 * first + 30 * call
            self.depots[which].put(range(start, start + 30))

    @rule(which=STORE)
    def erase(self, which: int) -> None:
        self.depots[which].store.erase_expired()

    @rule(seconds=st.sampled_from([30, 4000, 90_000, -4000, -90_000]))
    def jump(self, seconds: int) -> None:
        self.ahead += seconds
        self.set_back |= seconds < 0
        self.forget_ended()
        self.refresh()

    # --- Processes -----------------------------------------------------------

    @rule(which=STORE, killed=st.booleans())
    def restart(self, which: int, killed: bool) -> None:  # noqa: FBT001 - a strategy
        depot = self.depots[which]
        if killed:
            _kill(depot.store)
        else:
            depot.store.close()
        self.depots[which] = self.open()
        self.refresh()
        self.finds_what_is_promised(self.depots[which])

    @rule()
    def restart_both(self) -> None:
        for depot in self.depots:
            depot.store.close()
        self.depots = [self.open(), self.open()]
        self.exact = True
        self.finds_what_is_promised(self.depots[0])

    @rule(
        which=STORE,
        numbers=NUMBERS,
        keep_s=SECONDS,
        expire_s=ENDS,
        before=st.integers(1, 12),
        seldom=st.integers(0, 3),
    )
    def put_by_a_child_that_is_killed(
        self,
        which: int,
        numbers: list[int],
        keep_s: int,
        expire_s: int | None,
        before: int,
        seldom: int,
    ) -> None:
        """Kill a process before one of its writes: its call was not acknowledged."""
        if seldom:
            return
        was_there = self.on_disk()
        answer = self.in_child(before, which, numbers, keep_s, expire_s)
        if answer is not None:
            self.learn_put(answer)
            return
        self.exact = False
        self.look()
        end = 0 if expire_s is None else self.soon(expire_s)
        there = self.on_disk()
        for number in numbers:
            page = self.pages.get(number)
            if number in there and (page is None or number not in was_there):
                page = self.renewed(number, {end, end + 1} if end else {0})
            elif page is not None and end:
                page.ends |= {end, end + 1}
                self.clip(page, 0)

    def in_child(self, before: int, *call: Any) -> tuple[Any, ...] | None:
        """Run a put in a child; None if it was killed before one of its writes."""
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            with suppress(BaseException):
                with killed(before):
                    answer = self.stored(*call)
                os.write(writes, pickle.dumps(answer))
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return pickle.loads(said) if said else None  # noqa: S301 - our own child's

    def refresh(self) -> None:
        """Let each process see what others changed, as it does within 50 ms."""
        for depot in self.depots:
            depot.store._catalog.refresh(missed=True, always=True)

    # --- The laws ------------------------------------------------------------

    def may_be_served(self, number: int) -> bool:
        page = self.pages.get(number)
        now = int(self.now()) - 1  # the call takes time
        ends = self.past.get(number, set()) | (page.ends if page else set())
        return any(not end or end > now for end in ends)

    def forget_ended(self) -> None:
        """Promises that have ended do not come back with the clock."""
        now = int(self.now())
        for page in self.pages.values():
            if page.kept <= now + 2:
                page.kept = 0

    def look(self) -> None:
        """Read the records of all segments on disk."""
        some = [np.zeros(0, RECORD)]
        some += [
            one.contents.records[one.live] for one in segments(self.root, NAMESPACE)
        ]
        self.records = np.concatenate(some)

    def on_disk(self) -> set[int]:
        """Return the pages that had a record at the last look, and are served."""
        ends, known = self.records["expire_at"], _digests()
        live = self.records[(ends == 0) | (ends > int(self.now()))]
        pairs = zip(live["key_low"].tolist(), live["key_high"].tolist(), strict=True)
        return {known[pair] for pair in pairs if pair in known}

    @invariant()
    def laws(self) -> None:
        if self.depots:
            self.look()
            self.promises_hold()
            self.the_ledger_is_what_a_recount_finds()
            steps[0] += 1

    def promised(self) -> set[int]:
        """Return the pages that are promised and do not expire in this second."""
        self.forget_ended()
        now = self.now() + 1
        return {
            number
            for number, page in self.pages.items()
            if page.kept and not any(end and end <= now for end in page.ends)
        }

    def promises_hold(self) -> None:
        lost = self.promised() - self.on_disk()
        assert not lost, f"the promises of pages {lost} are broken"

    def finds_what_is_promised(self, depot: Any) -> None:
        """Ask a store that was opened just now, in whichever order it read segments."""
        numbers = sorted(self.promised())
        answers = zip(numbers, depot.there(numbers), strict=True)
        missed = {number for number, found in answers if not found}
        assert not missed, f"promised pages {missed} are not found"

    def the_ledger_is_what_a_recount_finds(self) -> None:
        ledger = self.depots[0].store._catalog.ledger
        # Those that have ended too: a clock that is set back brings them to life.
        with patch("time.time", lambda: 0):
            counted = ledger.promised_bytes()
        found = SLOT_BYTES * int(np.count_nonzero(self.records["keep_until"]))
        if self.exact:
            assert counted == found
        assert counted >= found, "less is counted than is promised"
        living = ledger.promised_bytes()
        if not self.set_back:
            assert living <= SHARE * QUOTA, "more is promised than may be"

    def teardown(self) -> None:
        for depot in self.depots:
            depot.store.close()
        self.clock.stop()
        self.folder.cleanup()


def _digests() -> dict[tuple[int, int], int]:
    if not _KNOWN:
        keys = [f"{NAMESPACE}/{number:032x}.kv" for number in range(PAGES)]
        pairs = key_digests(keys, key_seed(NAMESPACE)).tolist()
        _KNOWN.update({(*pair,): number for number, pair in enumerate(pairs)})
    return _KNOWN


steps = [0]
_KNOWN: dict[tuple[int, int], int] = {}


def _kill(store: SegmentStore) -> None:
    """Close what a process has open as its end would, without a word on disk."""
    store._upkeep.close()
    store._catalog.close_after_fork()
    os.close(store._namespace_fd)
    store._namespace_fd = -1
    store._engine.close()


def test_promises_and_expiries_hold_over_processes_kills_and_clocks(
    open_depot: Callable[..., Any],
) -> None:
    run_state_machine_as_test(
        type("Life", (LifeOfPromises,), {"open_depot": staticmethod(open_depot)}),
        settings=settings(
            max_examples=110_000 // STEPS if TORTURE else 8,
            stateful_step_count=STEPS,
            deadline=None,
            phases=[Phase.generate],  # the trace of a failure is short enough
            suppress_health_check=list(HealthCheck),
        ),
    )
    if TORTURE:
        print(f"{steps[0]} steps")  # noqa: T201 - the count is the result
