from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from shelf import (
    Engine,
    hashes,
    patient,
)

from kvdock.errors import KvdockError, RegionError
from kvdock.transfer.result import NO_PAGE


@pytest.mark.parametrize("deadline", ["soon", float("nan")])
def test_what_is_no_deadline_is_refused_and_holds_no_page(deadline: Any) -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        for move in (cache["kv"].get, cache["kv"].put):
            with pytest.raises(KvdockError, match="a deadline is a number"):
                move(hashes(2), [0, 1], deadline)
        with pytest.raises(KvdockError, match="a deadline is a number"):
            cache["kv"].exists(hashes(2), deadline)
        assert not cache.leases("kv").in_use([0, 1]).any()


def test_bad_input_is_refused_by_name() -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        with pytest.raises(RegionError, match="'kw', which is not"):
            cache.put(hashes(1), {"kw": [0]})
        with pytest.raises(RegionError, match="outside of its 24 pages"):
            cache.get(hashes(1), {"kv": [24]})
        with pytest.raises(RegionError, match="for 2 hashes"):
            cache.get(hashes(2), {"kv": [NO_PAGE]})
        with pytest.raises(RegionError, match="page indices must have one dimension"):
            cache.get(hashes(2), {"kv": [[0], [1, 2]]})
        with pytest.raises(KvdockError, match="letters and digits"):
            cache.exists(["../x"])
        with pytest.raises(KvdockError, match="'kw' is not attached"):
            cache.leases("kw")


@pytest.mark.parametrize("pages", [[0.5, 1.5], [True, False], ["0", "1"], [None, None]])
def test_only_whole_numbers_are_page_indices(pages: Any) -> None:
    with Engine(core=patient()).attachment as cache:
        for call in (cache.put, cache.get):
            with pytest.raises(RegionError, match="whole numbers"):
                call(hashes(2), {"kv": pages})
        for move in (cache["kv"].put, cache["kv"].get):
            with pytest.raises(RegionError, match="whole numbers"):
                move(hashes(2), pages, time.monotonic() + 5)


@pytest.mark.parametrize("page", [2**63, 2**64 - 2, 2**64 - 1])
def test_an_index_beyond_int64_is_outside_and_not_no_page(page: int) -> None:
    given = {"kv": np.array([0, page], np.uint64)}
    with Engine(core=patient()).attachment as cache:
        for call in (cache.put, cache.get):
            with pytest.raises(RegionError, match=f"page index {page} is outside"):
                call(hashes(2), given)
        for move in (cache["kv"].put, cache["kv"].get):
            with pytest.raises(RegionError, match=f"page index {page} is outside"):
                move(hashes(2), given["kv"], time.monotonic() + 5)
        for ask in (cache.leases("kv").in_use, lambda p: cache.leases("kv").wait(p, 0)):
            for wrong in (given["kv"], [0, -1], [0, 24], [0.5], [True]):
                with pytest.raises(RegionError, match="page ind"):
                    ask(wrong)


def test_indices_in_memory_that_cannot_be_read_are_rejected() -> None:
    class OnADevice:  # as a tensor in a GPU's memory
        def __array__(self, *_: object, **__: object) -> None:
            raise TypeError("can't convert device memory")

    with (
        Engine(core=patient()).attachment as cache,
        pytest.raises(RegionError, match="page indices must have one dimension"),
    ):
        cache.put(hashes(2), {"kv": cast("Any", OnADevice())})


def test_a_generator_of_hashes_is_rejected_before_anything_is_stored() -> None:
    with Engine(core=patient()).attachment as cache:
        pages = {"kv": [0, 1]}
        calls: list[Callable[[Any], object]] = [
            cache.exists,
            lambda given: cache.put(given, pages),
            lambda given: cache.get(given, pages),
            lambda given: cache["kv"].exists(given, time.monotonic() + 5),
            lambda given: cache["kv"].put(given, [0, 1], time.monotonic() + 5),
            lambda given: cache["kv"].get(given, [0, 1], time.monotonic() + 5),
        ]
        for call in calls:
            with pytest.raises(KvdockError, match="page hashes are a row"):
                call(name for name in hashes(2))
        assert cache.exists(hashes(2)).best == 0
