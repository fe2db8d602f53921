"""The fast path of a usual batch does what the general one does, or nothing."""

from __future__ import annotations

import shutil
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvdock.batch import MemoryGate, Operation, Outcome
from kvdock_segments import catalog, directory
from kvdock_segments.format import (
    RECORD,
    key_digest,
    key_digests,
    records_of,
    with_checksums,
)
from kvdock_segments.index import ABSENT, HashTable
from kvdock_segments.io import IORequest, IOResult, plan_arrays, plan_rows

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from conftest import Depot, OpenDepot

    from kvdock.arrays import UInt64Array

same_depot = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
words = st.integers(0, 2**64 - 1)


def pairs_of(pairs: list[tuple[int, int]]) -> UInt64Array:
    return np.array(pairs, np.uint64).reshape(-1, 2)


# Few low bits and few tags, so that buckets overflow and tags collide; and any.
pairs = st.one_of(
    st.tuples(words, words),
    st.tuples(st.integers(0, 1), st.integers(0, 15).map(lambda tag: tag << 32)),
)


@settings(deadline=None)
@given(
    stored=st.lists(pairs, max_size=60, unique=True),
    asked=st.lists(pairs, min_size=1, max_size=30),
    many=st.booleans(),
    gone=st.integers(0, 30),
)
@example(
    stored=[(0, tag << 32) for tag in range(12)],
    asked=[(0, 11 << 32), (0, 3 << 32)],
    many=False,
    gone=4,
)
def test_a_key_is_found_at_home_in_plain_numbers_and_anywhere_alike(
    stored: list[tuple[int, int]],
    asked: list[tuple[int, int]],
    gone: int,
    *,
    many: bool,
) -> None:
    table, known = HashTable(), np.zeros((len(stored), 8), np.uint64)
    known[:, :2] = pairs_of(stored)
    rows = np.arange(len(stored))
    for part in [rows] if many else np.split(rows, rows[1:]):
        table.add(known[part, :2], part, known[:, :2])
    table.remove(known[:gone, :2], rows[:gone])
    known[:gone] = 0
    asked = [*asked, *stored[:20]]
    there = {pair: row for row, pair in enumerate(stored) if row >= gone}
    wanted = [there.get(pair, ABSENT) for pair in asked]
    digests = pairs_of(asked)
    assert table.find_anywhere(digests, known[:, :2]).tolist() == wanted
    assert table.find(digests, known[:, :2]).tolist() == wanted
    if stored and asked:
        found, unsure = table.find_at_home(digests, known[:, :2])
        sure = sorted({*range(len(asked))} - {*unsure.tolist()})
        assert [found[at] for at in sure] == [wanted[at] for at in sure]
    assert [table.find_one(*pair, known) for pair in asked] == wanted


def test_keys_of_a_sparse_table_are_found_at_home() -> None:
    chance = np.random.default_rng(5)
    known = chance.integers(1, 2**63, (100, 2)).astype(np.uint64)
    table = HashTable()
    table.add(known[:50], np.arange(50), known)
    found, unsure = table.find_at_home(known, known)
    assert not len(unsure)
    assert found.tolist() == [*range(50), *[ABSENT] * 50]


@given(
    rows=st.lists(
        st.tuples(words, words, words, st.integers(0, 2**16 - 1)), max_size=6
    ),
    segment=words,
    times=words,
    stored_ns=st.integers(0, 2**63 - 1),
)
def test_records_are_what_their_fields_say(
    rows: list[tuple[int, int, int, int]],
    segment: int,
    times: int,
    stored_ns: int,
) -> None:
    low, high, sums, slots = np.array(rows, np.uint64).reshape(-1, 4).T
    wanted = np.zeros(len(rows), RECORD)
    wanted["key_low"], wanted["key_high"], wanted["checksum"] = low, high, sums
    wanted["expire_at"], wanted["keep_until"] = times % 2**32, times >> 32
    wanted["stored_ns"] = stored_ns
    wanted["segment"] = segment
    wanted["slot"] = slots
    found = records_of(
        np.stack([low, high], axis=1),
        sums,
        segment=segment,
        slots=slots.astype(np.int64),
        stored_ns=np.full(len(rows), stored_ns),
        times=times,
    )
    assert found.tobytes() == with_checksums(wanted).tobytes()


@given(st.lists(st.text(max_size=40), min_size=1), words)
def test_a_key_has_one_digest_alone_and_among_others(
    keys: list[str], seed: int
) -> None:
    assert key_digests(keys, seed).tolist() == [
        list(key_digest(key, seed)) for key in keys
    ]


@example(slots=[0, 1, 2], row=[65536, 65536, 65536], write=False)
@given(
    slots=st.lists(st.integers(0, 400), min_size=1, max_size=120, unique=True),
    row=st.lists(
        st.sampled_from([0, 40, 4096, 65536, 300_000]), min_size=1, max_size=3
    ),
    write=st.booleans(),
)
def test_a_usual_request_is_planned_as_any_other(
    slots: list[int], row: list[int], *, write: bool
) -> None:
    count, size = len(slots), sum(row)
    request = IORequest(
        write=write,
        files=(7,),
        file_of=np.zeros(count, np.int64),
        offsets=np.array(slots) * size,
        addresses=np.arange(count * len(row)).reshape(count, -1),
        sizes=np.broadcast_to(np.array(row), (count, len(row))),
        deadline_s=5.0,
    )
    result = IOResult.of(count)
    found = plan_rows(request, result)
    if found is None:
        assert not 0 < size <= 512 << 10
        return
    wanted, tasks = plan_arrays(request, result)
    plan = found[0]
    assert found[1] == tasks
    for name in ("write", "files", "offsets", "addresses", "sizes", "pieces", "runs"):
        assert getattr(plan, name) == getattr(wanted, name), name
    assert plan.order.tolist() == wanted.order.tolist()
    assert plan.totals.tolist() == wanted.totals.tolist()


def load(depot: Depot, way: str, numbers: list[int], page_bytes: int, gate: str) -> Any:
    """Load pages one way; return outcomes, bytes and memory, or None."""
    memory = np.zeros((len(numbers), page_bytes), np.uint8)
    guard = MemoryGate() if gate != "none" else None
    if guard is not None and gate == "closed":
        guard.close(0.0)
    batch = depot.batch(Operation.GET, numbers, memory, gate=guard)
    result = getattr(depot.store._reader, way)(batch)
    if result is None:
        return None
    right = result.ok
    assert not (gate == "closed" and memory.any())
    return result.outcomes.tolist(), result.nbytes.tolist(), memory[right].tobytes()


def damage(root: Path, at: int) -> None:
    for file in sorted(root.rglob("*.dat")):
        with file.open("r+b") as pages:
            pages.seek(at)
            pages.write(b"damaged")


@same_depot
@given(
    asked=st.one_of(
        st.lists(st.integers(0, 9), min_size=1, max_size=20),
        st.lists(st.integers(0, 50), min_size=1, max_size=20),
    ),
    page_bytes=st.sampled_from([8192, 8192, 8192, 4096]),
    damaged=st.sampled_from([None, 0, 3 * 8192 + 5]),
    gate=st.sampled_from(["none", "none", "open", "closed"]),
)
@example(asked=[2, 4, 3], page_bytes=8192, damaged=None, gate="closed")
@example(asked=[2, 35, 29], page_bytes=8192, damaged=None, gate="none")
@example(asked=[2], page_bytes=8192, damaged=None, gate="closed")
@example(asked=[2, 4, 3], page_bytes=8192, damaged=None, gate="open")
@example(asked=[0], page_bytes=8192, damaged=0, gate="none")
@example(asked=[2, 4, 3], page_bytes=8192, damaged=3 * 8192 + 5, gate="none")
def test_a_usual_load_is_what_the_general_one_would_be(
    open_depot: OpenDepot,
    tmp_path: Path,
    asked: list[int],
    page_bytes: int,
    damaged: int | None,
    gate: str,
) -> None:
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    depot = open_depot()
    for numbers in (range(30), range(30, 40)):  # in several segments
        depot.put(numbers)
    if damaged is not None:
        damage(depot.root, damaged)
    way = "get_one" if len(asked) == 1 else "get_together"
    fast = load(depot, way, asked, page_bytes, gate)
    general = load(depot, "get_any", asked, page_bytes, gate)
    assert fast is None or fast == general
    right = page_bytes == depot.page_bytes and max(asked) < 40
    usual = right and damaged is None and gate != "closed"
    assert (fast is not None) >= usual
    depot.store.close()


@same_depot
@given(
    batches=st.lists(
        st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=6
    )
)
def test_a_usual_put_stores_what_the_general_one_would_store(
    open_depot: OpenDepot, tmp_path: Path, batches: list[list[int]]
) -> None:
    seen: list[Any] = []
    for way in ("put_fresh", "put_any"):
        root = tmp_path / way
        shutil.rmtree(root, ignore_errors=True)
        depot = open_depot(root)
        writer = depot.store._writer
        outcomes = []
        for numbers in batches:
            memory = depot.pages(numbers)
            batch = depot.batch(Operation.PUT, numbers, memory)
            found, _ = getattr(writer, way)(batch) or writer.put_any(batch)
            outcomes.append(found.tolist())
        there = depot.there(range(61))
        index = depot.store._catalog.index
        kept = index.records["check"] != 0
        order = np.argsort(-index.used_ns[kept], kind="stable")
        keys = index.records["key_low"][kept][order].tolist()
        seen.append((outcomes, there, keys, depot.get(sorted({*chain(*batches)}))))
        depot.store.close()
    assert seen[0] == seen[1]


def test_the_usual_batch_takes_the_fast_path(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()

    def general(*_: object) -> None:
        raise AssertionError("the general path was taken")

    monkeypatch.setattr(depot.store._reader, "get_any", general)
    monkeypatch.setattr(depot.store._writer, "put_any", general)
    assert depot.put(range(20)).ok.all()
    assert depot.put([20]).ok.all()
    assert depot.get(range(20)) == [Outcome.OK] * 20
    assert depot.get([20]) == [Outcome.OK]


def test_own_renames_do_not_make_a_process_read_its_folder_again(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_LONGEST_S", 0.0)
    monkeypatch.setattr(directory, "_SCAN_AFTER_S", 60.0)
    depot = open_depot(quota_bytes=4 << 20)
    for turn in range(12):
        assert depot.request(range(50 * turn, 50 * turn + 50)).ok.all()
    (folder,) = depot.store._catalog.folders.values()
    scans: list[int] = []
    scan = folder.scan

    def counted() -> bool:
        scans.append(1)
        return scan()

    monkeypatch.setattr(folder, "scan", counted)
    recycled = depot.store.counts["segments_recycled"]
    for turn in range(12, 42):
        assert depot.put(range(50 * turn, 50 * turn + 50)).ok.all()
        depot.store._catalog.index.clock.end_run()
    recycled = depot.store.counts["segments_recycled"] - recycled
    assert recycled > 20
    # The first finds out that no other process changes this folder.
    assert len(scans) <= 1


def test_another_process_is_seen_soon_after_a_rename_of_our_own(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota_bytes=4 << 20)
    other = open_depot()
    for turn in range(15):
        # Both change the folder within one tick of its clock.
        assert depot.request(range(50 * turn, 50 * turn + 50)).ok.all()
        assert other.put([10_000 + turn]).ok.all()
        end_s = time.monotonic() + 10
        while depot.there([10_000 + turn]) != [True]:
            assert time.monotonic() < end_s
