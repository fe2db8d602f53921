"""The fast path of a usual batch does what the general one does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shelf import Engine, Shelf, attention, draft, hashes, patient, states

from kvdock.transfer.leases import PageLeases
from kvdock.transfer.result import NO_PAGE

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
