"""Pages that were stored, or are gone, as an engine reports them to others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from shelf import Engine, Shelf, attention, hashes, patient, states, until

from kvdock.batch import Batch, BatchResult, Outcome
from kvdock.events import PageEvent, PageHomes
from kvdock.resilience import background
from kvdock.transfer import page_events

if TYPE_CHECKING:
    import pytest


@attrs.define(eq=False)
class Evicting(Shelf):
    """A shelf that reports what is gone."""

    tracked: set[str] = attrs.field(factory=set)
    limits: list[int] = attrs.field(factory=list)
    fails: bool = False
    go_on: threading.Event = attrs.field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.go_on.set()

    def removed(self, pool: str, limit: int) -> Sequence[str]:
        self.limits.append(limit)
        self.go_on.wait(60)
        if self.fails:
            raise RuntimeError("no idea")
        self.tracked |= set(self.objects)
        gone = {key for key in self.tracked if f".{pool}" in key} - set(self.objects)
        self.tracked -= gone
        return sorted(gone)


def reporting(shelf: Shelf, **more: object) -> Engine:
    core = patient(page_events=100, **more)
    return Engine([shelf], (attention(head_group=1), states()), core)


def taken(engine: Engine, expected: int) -> list[PageEvent]:
    """Take events until there are so many."""
    found: list[PageEvent] = []

    def enough() -> bool:
        found.extend(engine.attachment.take_page_events())
        return len(found) >= expected

    until(enough)
    return found


def test_pages_that_are_stored_are_reported_once_by_pool() -> None:
    engine = reporting(Shelf())
    with engine.attachment as cache:
        names = tuple(engine.store(3))
        events = cache.take_page_events()
        assert set(events) == {
            PageEvent(pool="kv", stored=True, hashes=names, backend="shelf"),
            PageEvent(pool="mamba", stored=True, hashes=names, backend="shelf"),
        }
        assert cache.take_page_events() == ()


def test_a_page_that_is_stored_in_part_is_not_reported() -> None:
    engine = reporting(Shelf())

    def keep_every_second(batch: Batch) -> BatchResult:
        codes = [Outcome.OK, Outcome.REFUSED] * (len(batch) // 2)
        return BatchResult.of(batch, codes)

    with engine.attachment as cache:
        engine.shelf.trouble = keep_every_second
        engine.fill(hashes(2), [0, 1])
        # A page of kv has two objects, one of mamba has one.
        cache["kv"].put(hashes(2), [0, 1])
        cache["mamba"].put(hashes(2), [0, 1])
        assert cache.take_page_events() == (
            PageEvent(
                pool="mamba", stored=True, hashes=tuple(hashes(1)), backend="shelf"
            ),
        )


def test_what_a_backend_has_evicted_is_reported_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_events, "_POLL_S", 0)
    shelf = Evicting()
    engine = reporting(shelf)
    with engine.attachment as cache:
        assert shelf.limits == [100, 100]  # it keeps track from the start
        names = engine.store(2)
        assert len(taken(engine, 2)) == 2
        assert cache.wait_idle(60)
        # One of the two objects of a page is enough to lose it.
        gone = [key for key in shelf.objects if f"/{names[1]}.kv" in key]
        assert len(gone) == 2
        del shelf.objects[gone[0]]
        assert taken(engine, 1) == [
            PageEvent(pool="kv", stored=False, hashes=(names[1],), backend="shelf")
        ]


def test_a_corrupt_page_is_reported_as_gone() -> None:
    engine = reporting(Shelf())
    with engine.attachment as cache:
        names = engine.store(2)
        cache.take_page_events()
        key = next(one for one in engine.shelf.objects if f"/{names[1]}.mamba" in one)
        engine.shelf.objects[key] = bytes(len(engine.shelf.objects[key]))
        cache.get(names, engine.where(range(2)))
        assert cache.take_page_events() == (
            PageEvent(pool="mamba", stored=False, hashes=(names[1],), backend="shelf"),
        )


def test_taking_events_never_waits_for_a_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_events, "_POLL_S", 0)
    shelf = Evicting()
    engine = reporting(shelf)
    with engine.attachment as cache:
        shelf.go_on.clear()
        for _ in range(5):
            assert cache.take_page_events() == ()
        until(lambda: len(shelf.limits) == 3)
        engine.store(1)
        assert len(cache.take_page_events()) == 2
        shelf.fails = True
        shelf.go_on.set()
        assert cache.wait_idle(60)
        assert "asked what it has removed: RuntimeError" in caplog.text


def test_without_the_setting_nothing_is_kept() -> None:
    shelf = Evicting()
    engine = Engine([shelf], core=patient())
    with engine.attachment as cache:
        engine.store(1)
        assert cache.take_page_events() == ()
        assert not shelf.limits


def test_events_that_are_not_taken_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = page_events.PageEvents(4)
    for at in range(5):
        events.add("kv", hashes(2, first=2 * at), stored=True, backend="disk")
    kept = events.take(())
    assert [event.hashes for event in kept] == [
        tuple(hashes(2, first=6)),
        tuple(hashes(2, first=8)),
    ]
    assert "events of 2 pages are lost" in caplog.text


def homes(limit: int = 8) -> Callable[..., list[tuple[bool, bool, list[str]]]]:
    kept = PageHomes(limit)

    def moved(backend: str, *hashes: str, stored: bool) -> Any:
        event = PageEvent(pool="kv", stored=stored, hashes=hashes, backend=backend)
        return list(kept.moved(event, {"far"}))

    return moved


def test_a_page_is_announced_by_its_first_tier_and_removed_by_its_last() -> None:
    moved = homes()
    assert moved("near", "a", "b", stored=True) == [(True, False, ["a", "b"])]
    assert moved("far", "a", stored=True) == []
    # It is farther away now: routers may count announcements.
    assert moved("near", "a", "b", stored=False) == [
        (False, False, ["a", "b"]),
        (True, True, ["a"]),
    ]
    assert moved("far", "a", stored=False) == [(False, True, ["a"])]
    assert moved("far", "a", stored=False) == []


def test_a_page_that_is_stored_again_is_announced_again_without_being_doubled() -> None:
    moved = homes()
    moved("near", "a", stored=True)
    assert moved("near", "a", stored=True) == [
        (False, False, ["a"]),
        (True, False, ["a"]),
    ]


def test_the_oldest_pages_are_announced_as_removed_where_there_are_too_many() -> None:
    moved = homes(limit=2)
    moved("near", "a", "b", stored=True)
    assert moved("near", "c", stored=True) == [
        (False, False, ["a"]),
        (True, False, ["c"]),
    ]


@attrs.define(eq=False)
class Young(Shelf):
    """A shelf that writes down what is used."""

    used: list[tuple[str, Sequence[str]]] = attrs.field(factory=list)
    go_on: threading.Event = attrs.field(factory=threading.Event)
    fails: bool = False

    def __attrs_post_init__(self) -> None:
        self.go_on.set()

    def touch(self, pool: str, keys: Sequence[str]) -> None:
        self.used.append((pool, keys))
        self.go_on.wait(60)
        if self.fails:
            raise RuntimeError("no such notion")


def test_used_pages_are_passed_on_in_the_background_in_the_order_of_the_prefix() -> (
    None
):
    shelf = Young()
    engine = Engine([shelf], (attention(), states()))
    with engine.attachment as cache:
        assert cache["mamba"].touch(hashes(3))
        assert cache.wait_idle(60)
        assert shelf.used == [("mamba", cache["mamba"].keys(hashes(3)))]


def test_a_backend_gets_no_more_keys_at_once_than_it_takes() -> None:
    shelf = Young(max_batch_keys=4)
    engine = Engine([shelf])
    with engine.attachment as cache:
        assert cache["kv"].touch(hashes(10))
        assert cache.wait_idle(60)
        assert [len(keys) for _, keys in shelf.used] == [4, 4, 2]


def test_a_backend_without_use_in_its_order_is_not_called() -> None:
    with Engine([Shelf()]).attachment as cache:
        assert not cache["kv"].touch(hashes(1))


def test_notes_that_wait_are_bounded_and_go_on_once_the_backend_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "_TOUCHED_PAGES", 8)
    shelf = Young()
    shelf.go_on.clear()
    engine = Engine([shelf])
    with engine.attachment as cache:
        assert cache["kv"].touch(hashes(1))
        until(lambda: len(shelf.used) == 1)
        assert cache["kv"].touch(hashes(5))
        assert not cache["kv"].touch(hashes(4))
        assert cache["kv"].touch(hashes(3))
        assert len(shelf.used) == 1
        shelf.go_on.set()
        until(lambda: len(shelf.used) == 3)
        assert cache.wait_idle(60)
        assert cache["kv"].touch(hashes(8))


def test_a_backend_that_fails_is_logged_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Young(fails=True)
    with Engine([shelf], core=patient()).attachment as cache:
        for _ in range(2):
            assert cache["kv"].touch(hashes(1))
            assert cache.wait_idle(60)
        assert len(shelf.used) == 2
        assert "noting which pages are used: RuntimeError" in caplog.text
        assert set(cache.breakers()["shelf"].values()) == {"closed"}
