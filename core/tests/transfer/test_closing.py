"""Letting go of backends: all of their pools, once, and nothing after that."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs
from shelf import Engine, Shelf, attention, draft, hashes, indexer, patient, until
from stalls import Taken

from kvdock.batch import Batch, Outcome

if TYPE_CHECKING:
    import pytest

    from kvdock.batch import BatchResult
    from kvdock.transfer.result import TransferResult


@attrs.define(eq=False)
class Leisurely(Shelf):
    """Takes its time to release."""

    begun: threading.Event = attrs.field(factory=threading.Event)
    go_on: threading.Event = attrs.field(factory=threading.Event)

    def close(self, pool: str) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        time.sleep(0.05)
        self.released.append(pool)


def test_no_call_begins_once_a_pool_is_being_released() -> None:
    shelf = Leisurely()
    engine = Engine([shelf], core=patient())
    channel = engine.attachment._backends.channels["shelf"]
    run, about_to = channel.io, threading.Event()

    def hesitates(*arguments: Any) -> BatchResult:
        # What looked before the closing began, and goes on in the middle of it.
        about_to.set()
        until(lambda: channel._closing)
        return run(*arguments)

    channel.io = hesitates  # type: ignore[method-assign, assignment]  # a slow thread
    calls: list[Batch] = []
    shelf.trouble = calls.append
    moved: list[TransferResult] = []
    storing = threading.Thread(
        target=lambda: moved.append(
            engine.attachment.put(hashes(1), engine.where([0])),
        )
    )
    storing.start()
    assert about_to.wait(60)
    closing = threading.Thread(target=engine.attachment.close)
    closing.start()
    storing.join(60)
    assert moved[0].outcomes["kv"].tolist() == [Outcome.UNAVAILABLE]
    assert not calls
    shelf.go_on.set()
    closing.join(60)
    assert shelf.released == ["kv"]


def test_two_that_close_at_once_release_every_pool() -> None:
    shelf = Leisurely()
    engine = Engine([shelf], [attention(), draft(), indexer()], core=patient())
    both = [threading.Thread(target=engine.attachment.close) for _ in range(2)]
    both[0].start()
    assert shelf.begun.wait(60)
    both[1].start()
    time.sleep(0.05)
    shelf.go_on.set()
    for one in both:
        one.join(60)
    assert sorted(map(str, shelf.released)) == ["draft", "indexer", "kv"]


class Leaving(Shelf):
    def close(self, pool: str) -> None:
        self.released.append(pool)
        raise SystemExit(1)


def test_a_pool_whose_release_would_end_the_thread_keeps_no_other_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Leaving()
    engine = Engine([shelf], [attention(), draft()], core=patient())
    assert engine.attachment.close()
    assert sorted(map(str, shelf.released)) == ["draft", "kv"]
    assert "closing failed with SystemExit: 1" in caplog.text


def test_a_forked_child_misses_at_once_and_releases_nothing() -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        channel = cache._backends.channels["shelf"]
        executor = channel.executor
        kept = executor.guard.pid, executor._lock
        # As a thread leaves it that is inside while the process forks.
        executor.guard.pid, executor._lock = os.getpid() + 1, Taken()  # type: ignore[assignment]  # no lock
        assert cache.exists(hashes(1)).best == 0
        stored = cache.put(hashes(1), engine.where([0]))
        assert stored.outcomes["kv"].tolist() == [Outcome.UNAVAILABLE]
        assert cache.clear() == {"shelf": Outcome.UNAVAILABLE}
        assert channel.close(time.monotonic() + 1)
        executor.guard.pid, executor._lock = kept
        assert not engine.shelf.released
