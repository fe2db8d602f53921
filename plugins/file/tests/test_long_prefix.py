"""A prefix that is longer than the quota keeps its head, through an attachment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvdock import Attachment, Dock, Namespace, Outcome, PoolSpec, Region, Shard
from kvdock.pools import Part

PAGE_BYTES = 8192
PAGES = 1000
OpenStore = Callable[..., Attachment]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Attach a target pool, and a draft pool if asked for, with a quota in pages."""
    with ExitStack() as opened:

        def open_one(room: int, *, draft: bool = False) -> Attachment:
            shape = (PAGE_BYTES // 16,)
            pools = [
                PoolSpec(
                    name="kv", kind="k_only", parts=[Part("k", "u8", shape)],
                    layers=[0], page_tokens=16, anchor=True,
                )
            ]  # fmt: skip
            if draft:
                pools.append(
                    PoolSpec(
                        name="draft", kind="k_only", parts=[Part("k", "u8", shape)],
                        layers=[0], page_tokens=16, draft=True, indices_from="kv",
                    )
                )  # fmt: skip
            # Each page has a record of 72 bytes, each of some 16 segments 128 more.
            quota = len(pools) * (room * (PAGE_BYTES + 72) + 16 * 128)
            settings = {"root": tmp_path / "store", "quota": quota, "free_space": 0}
            dock = Dock.load(require=["file"])
            plan = dock.plan(pools, Shard(), prefer=["file"])
            regions = {
                pool.name: Region.of(
                    pool, Shard(), [np.ones((PAGES, PAGE_BYTES), np.uint8)], PAGES
                )
                for pool in pools
            }
            return opened.enter_context(
                Attachment.open(
                    dock, plan, Namespace(model="m"), regions, {"file": settings}
                )
            )

        yield open_one


def hashes(count: int, first: int = 0) -> list[str]:
    return [f"{page:032x}" for page in range(first, first + count)]


@pytest.mark.parametrize("draft", [False, True])
def test_calls_that_store_more_than_fits_keep_the_head(
    open_store: OpenStore, *, draft: bool
) -> None:
    store = open_store(240, draft=draft)
    prefix = hashes(280)
    store.exists(prefix[:1])  # a process that looks nothing up is another case
    for at in range(0, 280, 32):
        part = prefix[at : at + 32]
        store.put(part, {"kv": np.arange(at, at + len(part))})
    best = store.exists(prefix).best
    assert best >= 0.9 * 240
    assert store.get(prefix[:best], {"kv": np.arange(best)}).pages == best


@pytest.mark.parametrize("draft", [False, True])
def test_one_call_that_stores_more_than_fits_keeps_the_head(
    open_store: OpenStore, *, draft: bool
) -> None:
    store = open_store(128, draft=draft)
    prefix = hashes(1000)
    moved = store.put(prefix, {"kv": np.arange(1000)})
    best = store.exists(prefix).best
    assert best >= 0.9 * 128
    outcomes = moved.outcomes["kv"]
    assert (outcomes[:best] == Outcome.OK).all()
    assert (outcomes == Outcome.OK).sum() <= 2 * 128
    if not draft:
        assert moved.pages == best
        assert set(outcomes[best:].tolist()) == {int(Outcome.REFUSED)}


def test_a_request_in_between_does_not_cost_the_head(open_store: OpenStore) -> None:
    store = open_store(240)
    prefix = hashes(280)
    for at in range(0, 280, 32):
        part = prefix[at : at + 32]
        assert not store.exists(hashes(3, 10**6 + at)).best
        store.exists(prefix[: at + len(part)])
        store.exists(hashes(3, 2 * 10**6 + at))
        store.put(part, {"kv": np.arange(at, at + len(part))})
    assert store.exists(prefix).best >= 0.9 * 240


def test_what_comes_later_takes_the_tail_first(open_store: OpenStore) -> None:
    store = open_store(240)
    first, second = hashes(200), hashes(100, 1000)
    for prefix in (first, second):
        store.exists(prefix)
        for at in range(0, len(prefix), 32):
            part = prefix[at : at + 32]
            store.put(part, {"kv": np.arange(len(part))})
    assert store.exists(second).best == 100
    assert store.exists(first).best >= 0.9 * (240 - 100)
