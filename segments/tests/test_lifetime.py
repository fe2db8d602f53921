"""What a store holds on to, and what it notices while it is open."""

from __future__ import annotations

import gc
import logging
import os
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from index_files import write_index_files

from kvdock.batch import Outcome
from kvdock.capacity import Capacity
from kvdock.errors import KvdockError
from kvdock.testing.open_files import open_files
from kvdock_segments import StoreLocation
from kvdock_segments.format import index_bytes

OpenDepot = Callable[..., Any]
OK, REFUSED = int(Outcome.OK), int(Outcome.REFUSED)
SLOTS, PAGE_BYTES = 16, 512
LIMITS = {
    "quota": 12 * (SLOTS * PAGE_BYTES + index_bytes(SLOTS)),
    "segment_bytes": SLOTS * PAGE_BYTES,
    "page_bytes": PAGE_BYTES,
}


def test_a_closed_store_frees_its_index_at_once(
    open_depot: OpenDepot, tmp_path: Path
) -> None:
    depot = open_depot(page_bytes=64)
    namespace = depot.store.place.namespace
    depot.store.close()
    place = StoreLocation(
        root=tmp_path / "full", namespace=namespace, pool="kv", object_bytes=(64,)
    )
    write_index_files(
        place, 100_000, lambda first, count: depot.keys(range(first, first + count))
    )
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        store = open_depot(place.root, page_bytes=64).store
        held = tracemalloc.get_traced_memory()[0]
        assert held > 100_000 * 64
        store.close()
        assert tracemalloc.get_traced_memory()[0] < held / 4
    finally:
        tracemalloc.stop()
        gc.enable()


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_root_that_is_renamed_in_use_is_begun_anew(
    open_depot: OpenDepot,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    replaced: bool,
) -> None:
    depot = open_depot()
    assert depot.put(range(20)).ok.all()
    root: Path = depot.root
    root.rename(root.with_name("elsewhere"))
    if replaced:
        root.mkdir(mode=0o700)
    later(monkeypatch, 2)
    with caplog.at_level(logging.WARNING):
        assert depot.there(range(20)) == [False] * 20
    assert "renamed or replaced" in caplog.text
    assert depot.put(range(100, 120)).ok.all()
    assert depot.get(range(100, 120)) == [OK] * 20
    assert depot.store.counts["reopened"] == 1
    # The next start finds what was stored since, and the old one what was before.
    assert open_depot(root).get(range(100, 120)) == [OK] * 20
    assert open_depot(root.with_name("elsewhere")).get(range(20)) == [OK] * 20


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leave this process so many descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest free numbers, wherever they lie between those in use.
    taken = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while len(taken) < count:
            taken.append(os.dup(taken[0]))
        highest = os.dup(taken[0])
        taken.append(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


def test_a_store_without_descriptors_says_so_and_leaves_none_open(
    open_depot: OpenDepot,
) -> None:
    open_depot().put(range(20))
    opened = []
    for count in range(8):
        before = open_files()
        with descriptors_left(count):
            try:
                open_depot().store.close()
            except KvdockError as error:
                opened.append(str(error))
            else:
                opened.append("")
        assert not open_files() - before
    assert "Too many open files" in opened[0]
    assert not opened[-1]


def test_a_store_that_waits_for_room_reports_what_there_is(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_depot(quota=8 << 20)
    assert kv.put(range(20)).ok.all()
    full = kv.store.capacity()
    make = os.mkdir

    def refuse(path: Any, *more: Any, **words: Any) -> None:
        if str(path).startswith("draft."):
            raise OSError(28, "No space left on device", path)
        make(path, *more, **words)

    monkeypatch.setattr(os, "mkdir", refuse)
    draft = open_depot(pool="draft", quota=8 << 20)
    assert set(draft.put(range(5)).outcomes.tolist()) == {REFUSED}
    waiting = draft.store.capacity()
    assert (waiting.used_bytes, waiting.limit_bytes) == (
        full.used_bytes,
        full.limit_bytes,
    )
    found = draft.store.usage()
    assert found.namespace_bytes == full.used_bytes
    assert found.quota_bytes == 8 << 20
    assert found.free_bytes > 0


def test_a_full_disk_has_a_limit_that_is_known(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Any, *_: Any, **_words: Any) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    waiting = open_depot(tmp_path / "new", free_space=1 << 60)
    assert waiting.store.capacity() == Capacity(0, 1)


def test_a_process_that_never_looks_pages_up_stores_all_of_them(
    open_depot: OpenDepot,
) -> None:
    """A prefill-only node: each call counts as a prefix of its own."""
    depot = open_depot(**LIMITS)
    stored = 0
    for first in range(0, 3000, 8):
        stored += int(depot.put(range(first, first + 8)).ok.sum())
    assert stored == 3000
    assert depot.there(range(2900, 3000)) == [True] * 100


def test_of_one_call_that_is_longer_than_the_store_the_head_stays(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(**LIMITS)
    stored = depot.put(range(1000, 1300)).ok.tolist()
    assert stored[0]
    assert not stored[-1]
    assert depot.restorable(range(1000, 1300)) == sum(stored)
