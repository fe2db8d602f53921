"""Background tasks run their calls where they are, and survive late ones."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from shelf import (
    Engine,
    Heard,
    Shelf,
    attention,
    hashes,
    hasty,
    indexer,
    patient,
    until,
)

from kvdock.batch import Batch, Operation, Outcome
from kvdock.events import BatchEnded, Event, PagesAnswered, requested_by, stored_for
from kvdock.pays import LoadLimit, limited_by
from kvdock.plugin.hookspecs import hookimpl
from kvdock.resilience import background_executor
from kvdock.transfer.manager import TransferManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdock.transfer.futures import TransferFuture


class Holding:
    """Holds the loads of some pages until `release`; notes who makes each call."""

    def __init__(self, *held: str) -> None:
        self.held = held
        self.release = threading.Event()
        self.callers: list[str] = []
        self.inside = 0

    def __call__(self, batch: Batch) -> None:
        if batch.operation is not Operation.GET:
            return
        self.callers.append(threading.current_thread().name)
        if any(key.split("/")[1].startswith(self.held) for key in batch.keys):
            self.inside += 1
            assert self.release.wait(60)


def test_a_background_load_calls_the_backend_on_the_thread_that_runs_the_task() -> None:
    engine = Engine([Shelf()], (attention(),), patient())
    with TransferManager(engine.attachment) as manager:
        names = engine.store(2, blank=True)
        engine.shelf.trouble = note = Holding()
        assert manager.read("kv", names, range(2)).wait(60)
        assert [name.rpartition("-")[0] for name in note.callers] == ["kvdock-read"]
        # A call that a caller waits for needs a thread of its own.
        assert engine.attachment.get(names, engine.where(range(2))).pages == 2
        assert note.callers[1].startswith("kvdock-shelf")


def test_a_load_that_hangs_is_counted_at_its_deadline_and_its_thread_replaced() -> None:
    core = hasty("get", transfers={"readers": 1})
    heard = Heard(BatchEnded)
    engine = Engine([Shelf()], (attention(),), core, observers=[heard])
    with TransferManager(engine.attachment) as manager:
        names = engine.store(2, blank=True)
        heard.events.clear()
        engine.shelf.trouble = holding = Holding(names[0])
        late = manager.read("kv", names[:1], [3])
        until(lambda: holding.inside == 1)
        until(lambda: late.ended)
        assert late.outcomes.tolist() == [Outcome.TIMEOUT]
        assert not late.done  # its call may still write into the page
        until(lambda: bool(heard.events))
        assert heard.events[0].outcomes == {Outcome.TIMEOUT: 1}
        assert engine.attachment["kv"].channel.abandoned_calls == 1
        # The only reader is lost to the call; another one serves the queue.
        other = manager.read("kv", names[1:], [4])
        assert other.wait(60)
        assert not other.outcomes.any()
        assert engine.holds("kv", names[1], 4)
        holding.release.set()
        assert late.wait(60)
        assert manager.drain(60)
        assert late.outcomes.tolist() == [Outcome.TIMEOUT]
        assert len(heard.events) == 2, "a settled call is recorded once"


class Recorder:
    """Notes what it is told of pages."""

    observes_pages = True

    def __init__(self) -> None:
        self.told: list[PagesAnswered] = []
        self.then: Callable[[PagesAnswered], object] = lambda _: None

    @hookimpl
    def kvdock_observe(self, event: Event) -> None:
        if isinstance(event, PagesAnswered) and event.operation is Operation.GET:
            self.told.append(event)
            self.then(event)


def test_a_load_that_hangs_is_recorded_for_its_request() -> None:
    recorder = Recorder()
    engine = Engine([Shelf()], (attention(),), patient(), observers=[recorder])
    with TransferManager(engine.attachment) as manager:
        names = engine.store(1, blank=True)
        engine.shelf.trouble = holding = Holding(*names)
        with requested_by("request"):
            load = manager.read("kv", names, [1], timeout_s=0.05)
        until(lambda: load.ended)
        holding.release.set()
        assert [one.request for one in recorder.told] == ["request"]


class Cancelled(BaseException):
    """What an observer may raise that is no Exception."""


def test_an_observer_that_raises_what_ends_threads_ends_a_load_with_errors() -> None:
    recorder = Recorder()

    def cancel(_: PagesAnswered) -> None:
        raise Cancelled

    core = patient(transfers={"readers": 1})
    engine = Engine([Shelf()], (attention(),), core, observers=[recorder])
    with TransferManager(engine.attachment) as manager:
        names = engine.store(1, blank=True)
        recorder.then = cancel
        load = manager.read("kv", names, [1], timeout_s=60)
        until(lambda: load.ended, 5)
        assert load.outcomes.tolist() == [Outcome.ERROR]
        recorder.then = lambda _: None
        assert manager.read("kv", names, [1]).wait(60)
        assert engine.holds("kv", names[0], 1)


def test_an_observer_of_a_load_that_leaves_the_queue_may_ask_for_another() -> None:
    recorder = Recorder()
    asked: list[TransferFuture] = []

    def ask(_: PagesAnswered) -> None:
        if not asked:
            asked.append(manager.read("kv", names[:1], [2], timeout_s=60))

    core = patient(transfers={"readers": 1, "queue": 1})
    engine = Engine([Shelf()], (attention(),), core, observers=[recorder])
    with TransferManager(engine.attachment) as manager:
        names = engine.store(3, blank=True)
        engine.shelf.trouble = holding = Holding(names[0])
        manager.read("kv", names[:1], [0], timeout_s=60)
        until(lambda: holding.inside == 1)
        late = manager.read("kv", names[1:2], [1], timeout_s=0.01)
        until(lambda: time.monotonic() > late.deadline_s)
        recorder.then = ask
        asking = threading.Thread(
            target=manager.read, args=("kv", names[2:], [3]), daemon=True
        )
        asking.start()
        asking.join(5)
        holding.release.set()
        assert not asking.is_alive()
        assert late.ended
        assert asked[0].wait(60)


def test_an_earlier_deadline_is_watched_although_a_later_one_came_first() -> None:
    engine = Engine([Shelf()], (attention(),), patient(transfers={"readers": 2}))
    with TransferManager(engine.attachment) as manager:
        names = engine.store(2, blank=True)
        engine.shelf.trouble = holding = Holding(*names)
        slow = manager.read("kv", names[:1], [3], timeout_s=600)
        until(lambda: holding.inside == 1)
        hasty_one = manager.read("kv", names[1:], [4], timeout_s=0.2)
        until(lambda: hasty_one.ended)
        assert not slow.ended
        holding.release.set()
        assert slow.wait(60)
        assert not slow.outcomes.any()


def test_lost_threads_are_bounded_and_end_with_their_calls() -> None:
    before = set(threading.enumerate())
    core = hasty(
        "get", "close", calls={"max_abandoned_calls": 2}, breaker={"failures": 100}
    )
    engine = Engine([Shelf()], (attention(),), core)
    manager = TransferManager(engine.attachment)
    names = engine.store(6, blank=True)
    engine.shelf.trouble = holding = Holding(*names)
    futures = [manager.read("kv", [name], [at]) for at, name in enumerate(names)]
    until(lambda: all(one.ended for one in futures))
    assert holding.inside <= 2
    assert engine.attachment["kv"].channel.abandoned_calls <= 2
    assert {int(one.outcomes[0]) for one in futures} <= {
        Outcome.TIMEOUT,
        Outcome.UNAVAILABLE,
    }
    assert not manager.close()
    holding.release.set()
    until(lambda: not set(threading.enumerate()) - before)
    assert engine.shelf.released == ["kv"]


def test_a_staged_load_never_touches_the_pages_after_its_deadline() -> None:
    core = hasty("get", calls={"staging": "always"})
    engine = Engine([Shelf()], (attention(),), core)
    with TransferManager(engine.attachment) as manager:
        names = engine.store(1, blank=True)
        engine.shelf.trouble = holding = Holding(names[0])
        future = manager.read("kv", names, [5])
        until(lambda: future.ended)
        # The engine has its page back while the call still runs.
        assert future.wait(60)
        before = np.array(engine.rows("kv", [5]))
        holding.release.set()
        assert manager.drain(60)
        assert (engine.rows("kv", [5]) == before).all()


class Loads:
    """Loads that wait for a reader which is held; then how many pages each call had."""

    def __init__(self, readers: int = 1, observers: tuple[object, ...] = ()) -> None:
        core = patient(transfers={"readers": readers})
        pools = (attention(), indexer())
        self.engine = Engine([Shelf()], pools, core, observers=[*observers])
        self.manager = TransferManager(self.engine.attachment)
        self.names = self.engine.store(24, blank=True)
        self.holding = self.engine.shelf.trouble = Holding(*self.names[:readers])
        self.held = [self.read(at) for at in range(readers)]
        until(lambda: self.holding.inside == readers)

    def read(
        self, *pages: int, pool: str = "kv", timeout_s: float | None = None
    ) -> TransferFuture:
        names = [self.names[at] for at in pages]
        return self.manager.read(pool, names, [*pages], timeout_s=timeout_s)

    def go_on(self, *loads: TransferFuture) -> list[int]:
        """Let all of them end; return the pages of each call that was made."""
        sizes: list[int] = []

        def note(batch: Batch) -> None:
            sizes.append(len({key.split("/")[1] for key in batch.keys}))

        self.engine.shelf.trouble = note
        self.holding.release.set()
        assert all(one.wait(60) for one in (*self.held, *loads))
        return sizes


@pytest.fixture
def held_loads() -> Iterator[Callable[..., Loads]]:
    """Return what makes loads that wait, and closes what they need at the end."""
    with ExitStack() as opened:

        def make(*args: Any) -> Loads:
            made = Loads(*args)
            opened.enter_context(made.manager)
            return made

        yield make


def test_small_loads_that_wait_go_in_one_call_and_end_each_for_itself(
    held_loads: Callable[..., Loads],
) -> None:
    waiting = held_loads()
    one, two = waiting.read(1, 2), waiting.read(3)
    three = waiting.manager.read("kv", hashes(30)[28:], [4, 5])
    four = waiting.read(6, 7)
    assert waiting.go_on(one, two, three, four) == [7]
    assert [len(load.outcomes) for load in (one, two, three, four)] == [2, 1, 2, 2]
    assert three.outcomes.tolist() == [Outcome.ABSENT] * 2
    for load, pages in ((one, (1, 2)), (two, (3,)), (four, (6, 7))):
        assert not load.outcomes.any()
        for page in pages:
            assert waiting.engine.holds("kv", waiting.names[page], page)


def test_loads_that_wait_are_shared_by_the_readers(
    held_loads: Callable[..., Loads],
) -> None:
    waiting = held_loads(2)
    assert sorted(waiting.go_on(*map(waiting.read, range(2, 8)))) == [1, 2, 3]


def test_loads_of_other_pools_and_tenants_are_other_calls(
    held_loads: Callable[..., Loads],
) -> None:
    waiting = held_loads()
    loads = [waiting.read(1), waiting.read(1, pool="indexer"), waiting.read(2)]
    with stored_for(7):
        loads.append(waiting.read(3))
    assert waiting.go_on(*loads) == [1, 1, 1, 1]
    assert waiting.engine.holds("indexer", waiting.names[1], 1)
    for page in (1, 2, 3):
        assert waiting.engine.holds("kv", waiting.names[page], page)


def test_loads_go_together_up_to_a_size(
    held_loads: Callable[..., Loads], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = held_loads()
    page_bytes = waiting.engine.attachment["kv"].page_bytes
    monkeypatch.setattr(background_executor, "MOST_AT_ONCE", 2 * page_bytes)
    assert waiting.go_on(*map(waiting.read, range(1, 6))) == [2, 2, 1]


def test_a_load_with_less_time_does_not_shorten_that_of_others(
    held_loads: Callable[..., Loads],
) -> None:
    waiting = held_loads()
    loads = [waiting.read(at, timeout_s=(9000.0, 50.0)[at == 2]) for at in (1, 2, 3)]
    assert waiting.go_on(*loads) == [1, 1, 1]


def test_loads_that_are_cut_or_recorded_for_a_request_go_alone(
    held_loads: Callable[..., Loads],
) -> None:
    recorded = held_loads(1, (Recorder(),))
    assert recorded.go_on(*map(recorded.read, (1, 2))) == [1, 1]
    waiting = held_loads()
    with limited_by(LoadLimit(np.array([600.0, 0.0]))):
        loads = [*map(waiting.read, (1, 2))]
    assert waiting.go_on(*loads) == [1, 1]


def test_a_load_whose_time_is_over_leaves_the_others_it_waited_with(
    held_loads: Callable[..., Loads],
) -> None:
    waiting = held_loads()
    late, good = waiting.read(1), waiting.read(2)
    late.reject(Outcome.TIMEOUT)
    assert waiting.go_on(late, good) == [1]
    assert late.outcomes.tolist() == [Outcome.TIMEOUT]
    assert not good.outcomes.any()
    assert waiting.engine.holds("kv", waiting.names[2], 2)
