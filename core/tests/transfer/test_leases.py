from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shelf import Engine, Shelf, attention, draft, hashes, patient, states

from kvdock.transfer.leases import PageLeases
from kvdock.transfer.result import NO_PAGE


def test_ending_twice_does_not_end_the_lease_of_another_call() -> None:
    book = PageLeases(2)
    _, first = book.take(np.array([0]))
    first.end()
    _, second = book.take(np.array([0]))
    first.end()
    assert book.in_use([0]).all()
    second.end()


def test_who_waits_for_pages_is_woken_when_the_last_is_free() -> None:
    book = PageLeases(2)
    _, lease = book.take(np.array([0]))
    _, other = book.take(np.array([1]))
    assert not book.wait([0, 1], 0.01)
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(book.wait([0, 1], 10)))
    thread.start()
    lease.end()
    other.end()
    thread.join()
    assert woken == [True]


@given(st.lists(st.lists(st.integers(0, 7), max_size=6), max_size=8), st.randoms())
def test_whatever_the_order_no_page_is_lost_or_shared(
    requests: list[list[int]], random: object
) -> None:
    book = PageLeases(8)
    held: dict[int, int] = {}
    leases = []
    for number, pages in enumerate(requests):
        free, lease = book.take(np.array(pages, np.int64))
        for page, got in zip(pages, free.tolist(), strict=True):
            assert got == (page not in held)
            held.setdefault(page, number)
        leases.append(lease)
        assert book.leased_pages == len(held)
    random.shuffle(leases)  # type: ignore[attr-defined]  # hypothesis types it as object
    for lease in leases:
        lease.end()
    assert book.leased_pages == 0


pages = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@given(leased=pages, asked=pages)
def test_all_pages_are_leased_where_each_one_would_be(
    leased: list[int], asked: list[int]
) -> None:
    books = [PageLeases(8), PageLeases(8)]
    for book in books:
        book.take(np.array(leased[:2]))
    together, apart = books
    lease = together.take_all(np.array(asked))
    free, _ = apart.take(np.array(asked))
    assert (lease is not None) == free.all()
    if lease is not None:
        assert together.in_use(range(8)).tolist() == apart.in_use(range(8)).tolist()
        lease.end()
    assert together.leased_pages == len({*leased[:2]})


def test_a_signal_while_a_lease_is_given_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    book = PageLeases(4)
    monkeypatch.setattr("kvdock.transfer.leases.Lease", ring)
    with pytest.raises(KeyboardInterrupt):
        book.take(np.arange(2))
    with pytest.raises(KeyboardInterrupt):
        book.take_all(np.arange(2))
    assert not book.leased_pages


page = st.one_of(st.integers(0, 7), st.just(NO_PAGE))

indices = st.one_of(
    st.permutations(range(6)), st.lists(page, min_size=1, max_size=6).map(list)
)

steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "exists"]), indices),
    min_size=1,
    max_size=5,
)


def played(asked: list[tuple[str, list[int]]], staging: str, trailers: str) -> Any:
    """Return what an engine sees of these calls."""
    core = patient(calls={"staging": staging, "batch_pages": 5}, integrity=trailers)
    engine = Engine([Shelf()], [attention(), draft(), states()], core)
    seen: list[Any] = []
    with engine.attachment as cache:
        for verb, pages in asked:
            names = hashes(len(pages))
            if verb == "exists":
                seen.append(cache.exists(names).restorable.tolist())
                continue
            for row, memory in enumerate(engine.memory.values()):
                memory[:] = row + 7 if verb == "put" else 0
            found = getattr(cache, verb)(names, engine.where(pages))
            outcomes = {name: codes.tolist() for name, codes in found.outcomes.items()}
            moved = [memory.tobytes() for memory in engine.memory.values()]
            seen.append((found.pages, outcomes, dict(found.nbytes), moved))
        assert not sum(cache.leases(name).leased_pages for name in engine.memory)
    return seen


@settings(deadline=None, max_examples=25)
@given(
    asked=steps,
    staging=st.sampled_from(["routed", "always"]),
    trailers=st.sampled_from(["off", "always"]),
)
def test_an_engine_sees_the_same_by_either_path(
    asked: list[tuple[str, list[int]]], staging: str, trailers: str
) -> None:
    usual = played(asked, staging, trailers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageLeases, "take_all", lambda *_, **__: None)
        assert played(asked, staging, trailers) == usual


def test_the_usual_batch_is_leased_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def general(*_: object, **__: object) -> None:
        raise AssertionError("the general path was taken")

    engine = Engine([Shelf()], [attention()], patient())
    with engine.attachment as cache:
        monkeypatch.setattr(PageLeases, "take", general)
        names = hashes(4)
        assert cache.put(names, {"kv": np.arange(4)}).pages == 4
        assert cache.get(names, {"kv": np.arange(4)}).pages == 4
