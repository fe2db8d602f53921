"""The quick way of a usual batch does what the thorough one does, or nothing."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvdock import native
from kvdock.batch import Batch, MemoryGate, Operation, Outcome
from kvdock_segments import IORequest, IOResult, PosixIOEngine, catalog, directory
from kvdock_segments.call_arrays import MOST_PAGES, CallArrays
from kvdock_segments.format import RECORD, records_of, with_checksums
from kvdock_segments.index import ABSENT, Index
from kvdock_segments.index_file import read_contents
from kvdock_segments.paths import IndexName

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Depot, OpenDepot

    from kvdock.arrays import UInt64Array

few_depots = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
words = st.integers(0, 2**64 - 1)


@pytest.fixture
def compiled() -> native.Library:
    found = native.library()
    if found is None:
        pytest.skip("no C compiler was there when kvdock was installed")
    return found


@contextmanager
def without_library() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        yield


def pairs_of(pairs: list[tuple[int, int]]) -> UInt64Array:
    return np.array(pairs, np.uint64).reshape(-1, 2)


# Few low bits and few tags, so that buckets overflow and tags collide; and any.
pairs = st.one_of(
    st.tuples(words, words),
    st.tuples(st.integers(0, 1), st.integers(0, 15).map(lambda tag: tag << 32 | 1)),
)
CROWD = [(0, tag << 32) for tag in range(30)]  # of four buckets


@settings(deadline=None)
@given(
    stored=st.lists(pairs, max_size=60, unique=True),
    asked=st.lists(pairs, max_size=30),
    gone=st.integers(0, 30),
    many=st.booleans(),
)
@example(
    stored=[(0, tag << 32) for tag in range(12)],
    asked=[(0, 11 << 32), (0, 3 << 32)],
    gone=4,
    many=False,
)
@example(stored=[], asked=[(0, 0)], gone=0, many=True)
@example(stored=CROWD, asked=[(0, 40 << 32), (1, 0)], gone=0, many=True)
@example(stored=CROWD, asked=[(0, 40 << 32)], gone=9, many=False)
# Of the same bucket and tag.
@example(stored=[(5, 7 << 32)], asked=[(5, 7 << 32 | 1)], gone=0, many=True)
@example(stored=[(5, 7 << 32)], asked=[(69, 7 << 32)], gone=0, many=True)
def test_a_key_is_found_in_compiled_code_and_in_python_alike(
    stored: list[tuple[int, int]],
    asked: list[tuple[int, int]],
    gone: int,
    *,
    many: bool,
) -> None:
    index = Index()
    rows = index.open_rows(len(stored) + 1)
    records = np.zeros(len(stored), RECORD)
    records["key_low"], records["key_high"] = pairs_of(stored).T
    records["check"] = 1
    places = np.arange(len(stored))
    for part in [places] if many else np.split(places, places[1:]):
        index.put(part + rows.first, records[part], 1)
    index.forget(np.arange(min(gone, len(stored))))
    asked = [*asked, *stored]
    there = {pair: row for row, pair in enumerate(stored) if row >= gone}
    wanted = [there.get(pair, ABSENT) for pair in asked]
    digests = pairs_of(asked)
    assert index.table.find(digests, index.words[:, :2]).tolist() == wanted
    assert index.find(digests).tolist() == wanted
    # In columns of another order, as a view of a table may be.
    assert index.find(np.asfortranarray(digests)).tolist() == wanted


record_rows = st.lists(
    st.tuples(words, words, words, st.integers(0, 2**16 - 1)), max_size=6
)


@given(
    rows=record_rows, segment=words, times=words, stored_ns=st.integers(0, 2**63 - 1)
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=record_rows,
    first=st.integers(0, 4),
    segment=words,
    tenant=st.integers(0, 2**32 - 1),
)
def test_records_are_the_same_in_compiled_code(
    compiled: native.Library,
    rows: list[tuple[int, int, int, int]],
    first: int,
    segment: int,
    tenant: int,
) -> None:
    low, high, sums, slots = np.array(rows, np.uint64).reshape(-1, 4).T
    digests, count = np.stack([low, high], axis=1), len(rows)
    stored_ns = np.arange(count) + 7
    wanted = records_of(
        digests,
        sums,
        segment=segment,
        slots=slots.astype(np.int64),
        stored_ns=stored_ns,
        tenant=tenant,
    )
    call = CallArrays(compiled)
    call.slots[:count] = slots
    call.movement.sums[:count] = sums
    call.stored_ns[first : first + count] = stored_ns
    batch = np.concatenate([np.zeros((first, 2), np.uint64), digests])
    where = native.address_of(batch)
    compiled.record(call.address, where, first, count, segment, tenant)
    assert call.records[:count].tobytes() == wanted.tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    present=st.lists(pairs, max_size=40, unique=True),
    fresh=st.lists(pairs, min_size=1, max_size=60, unique=True),
    gone=st.integers(0, 20),
    first=st.integers(0, 3),
)
@example(
    present=[(0, tag << 32) for tag in range(12)],
    fresh=[(0, tag << 32) for tag in range(20, 40)],
    gone=4,
    first=0,
)
def test_records_are_inserted_in_compiled_code_as_in_python(
    compiled: native.Library,
    present: list[tuple[int, int]],
    fresh: list[tuple[int, int]],
    gone: int,
    first: int,
) -> None:
    fresh = [pair for pair in fresh if pair not in present]
    count, every = len(fresh), [*present, *fresh]
    slots = np.arange(count)[::-1].copy()
    seen = []
    for way in ("compiled", "python"):
        index = Index()
        old, new = index.open_rows(len(present) + 1), index.open_rows(count + 1)
        records = np.zeros(len(every), RECORD)
        records["key_low"], records["key_high"] = pairs_of(every).T
        records["check"] = 1
        index.put(np.arange(len(present)), records[: len(present)], 1)
        index.forget(np.arange(min(gone, len(present))))
        added, used_ns = records[len(present) :], np.arange(count) + 5
        if way == "compiled":
            call = CallArrays(compiled)
            call.slots[:count], call.records[:count] = slots, added
            call.used_ns[first : first + count] = used_ns
            index.insert(compiled, call, first, count, new)
        else:
            index.put(slots + new.first, added, used_ns, absent_at=index.version)
        found = index.table.find(pairs_of(every), index.words[:, :2]).tolist()
        numbers = index.live_in[[old.number, new.number]].tolist()
        state = index.records.tobytes(), index.used_ns.tolist()
        seen.append((found, numbers, state, index.table.used, index.version))
    assert seen[0] == seen[1]


@attrs.frozen
class Step:
    """One batch of a trial.

    Args:
        numbers: Pages that it names; some may repeat.
        gate: "open", "closed" or "" for none.
        late: Whether its deadline has passed.
        narrow: Whether it asks for pages of half the size.
        expire_s: When its pages expire, seconds from now; 0 for never.
    """

    operation: Operation | Literal["damage"]
    numbers: list[int]
    gate: str = ""
    late: bool = False
    narrow: bool = False
    expire_s: int = 0


@st.composite
def steps(draw: st.DrawFn) -> Step:
    start = draw(st.integers(0, 80))
    numbers = draw(
        st.one_of(
            st.integers(1, 60).map(lambda count: [*range(start, start + count)]),
            st.lists(st.integers(0, 100), min_size=1, max_size=30),
            st.lists(st.integers(0, 100), min_size=1, max_size=60, unique=True),
        )
    )
    kinds: list[Any] = [Operation.PUT, Operation.GET, Operation.PUT, "damage"]
    return Step(
        draw(
            st.sampled_from([*kinds, Operation.GET, Operation.EXISTS, Operation.DELETE])
        ),
        numbers,
        gate=draw(st.sampled_from(["", "", "", "open", "closed"])),
        late=draw(st.sampled_from([False] * 9 + [True])),
        narrow=draw(st.sampled_from([False] * 9 + [True])),
        expire_s=draw(st.sampled_from([0] * 8 + [-5, 3600])),
    )


def damage(root: Path, at: int) -> None:
    for file in sorted(root.rglob("*.dat")):
        with file.open("r+b") as pages:
            pages.seek(at)
            pages.write(b"damaged")


def run(depot: Depot, step: Step) -> Any:
    """Run one step; return outcomes, bytes, and the memory of what was loaded."""
    if step.operation == "damage":
        return damage(depot.root, 8192 * (step.numbers[0] % 40) + 5)
    if step.operation in (Operation.EXISTS, Operation.DELETE):
        named = Batch(step.operation, depot.keys(step.numbers))
        return depot.store.run(named).outcomes.tolist()
    put = step.operation is Operation.PUT
    memory = depot.pages(step.numbers)
    if not put:
        memory = np.zeros_like(memory)
    if step.narrow:
        memory = np.ascontiguousarray(memory[:, :4096])
    gate = MemoryGate() if step.gate else None
    if gate is not None and step.gate == "closed":
        gate.close(0.0)
    more: dict[str, Any] = {}
    if put and step.expire_s:
        ends = int(time.time()) + step.expire_s
        more["expire_at"] = np.full(len(memory), ends)
    deadline_s = time.monotonic() + (-1 if step.late else 600)
    before = memory.copy()
    batch = depot.batch(
        step.operation, step.numbers, memory, gate=gate, deadline_s=deadline_s, **more
    )
    answer = depot.store.run(batch)
    assert not (step.gate == "closed" and (memory != before).any())
    good = answer.ok
    ends_known = answer.expire_at is not None
    return (
        answer.outcomes.tolist(),
        answer.nbytes.tolist(),
        ends_known,
        b"" if put else memory[good].tobytes(),
    )


def in_order(words_: UInt64Array, times: Any) -> Any:
    """Return records by how late a time of theirs is, without the time itself."""
    order = np.argsort(times, kind="stable")
    return words_[order][:, [0, 1, 2, 6]].tolist()


def state_of(depot: Depot) -> Any:
    """Return what the index has, and what the index files on disk have."""
    index = depot.store._catalog.index
    live = np.flatnonzero(index.records["check"])
    held = index.words[live]
    rows = dict(zip(map(tuple, held[:, :2].tolist()), live.tolist(), strict=True))
    by_use = in_order(held, index.used_ns[live])
    on_disk = []
    for path in sorted(depot.root.rglob("*")):
        name = IndexName.parse(path.name)
        if name:
            with path.open("rb") as file:
                size = path.with_name(name.data).stat().st_size
                contents = read_contents(file.fileno(), name, size)
            assert contents
            assert not len(contents.corrupt_slots)
            read = contents.records[contents.records["check"] != 0]
            plain = read.view(np.uint64).reshape(-1, 8)
            on_disk.append(in_order(plain, np.zeros(len(plain))))
    counts = {
        name: count
        for name, count in depot.store.counts.items()
        if not name.startswith("reopen")
    }
    numbers = index.live_in.tolist()
    return rows, by_use, sorted(on_disk), numbers, index.table.used, counts


class ForeignEngine(PosixIOEngine):
    """Has arrays of its own, as engines over other libraries do."""

    def move(self, request: IORequest) -> IOResult:
        return super().move(attrs.evolve(request, movement=None))


@few_depots
@given(
    trial=st.lists(steps(), min_size=1, max_size=8),
    engine=st.sampled_from(["usual", "direct", "foreign"]),
)
@example(
    trial=[
        Step(Operation.PUT, [*range(60)]),
        Step(Operation.GET, [*range(59, -1, -1)]),
        Step(Operation.GET, [3]),
        Step(Operation.PUT, [70], gate="open"),
        Step(Operation.GET, [70, 1, 33], gate="open"),
        Step(Operation.GET, [70, 1, 33], gate="closed"),
        Step(Operation.PUT, [71, 72], gate="closed"),
        Step(Operation.PUT, [71, 72], late=True),
        Step(Operation.GET, [1, 2], late=True),
        Step(Operation.GET, [2, 1, 2]),
        Step(Operation.PUT, [80, 81, 80]),
        Step(Operation.GET, [5, 6], narrow=True),
    ],
    engine="usual",
)
@example(
    trial=[Step(Operation.PUT, [*range(60)]), Step(Operation.GET, [*range(60)])],
    engine="foreign",
)
@example(
    trial=[
        Step(Operation.PUT, [*range(20)], expire_s=3600),
        Step(Operation.PUT, [*range(20, 40)], expire_s=-5),
        Step(Operation.GET, [*range(20)]),
        Step(Operation.GET, [*range(30)]),
        Step(Operation.PUT, [*range(20, 50)]),
        Step(Operation.PUT, [*range(50, 60)]),
        Step(Operation.GET, [*range(20, 60)]),
    ],
    engine="usual",
)
@example(
    trial=[
        Step(Operation.PUT, [*range(10)]),
        Step("damage", [0]),
        Step(Operation.GET, [0]),
        Step(Operation.GET, [*range(10)]),
        Step(Operation.PUT, [*range(10)]),
        Step(Operation.GET, [*range(10)]),
    ],
    engine="direct",
)
def test_batches_end_alike_in_compiled_code_and_in_python(
    open_depot: OpenDepot, tmp_path: Path, trial: list[Step], engine: str
) -> None:
    seen: list[Any] = []
    for way in ("compiled", "python"):
        shutil.rmtree(tmp_path / way, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            if way == "python":
                patch.setattr(native, "library", lambda: None)
            # As if each step were long after the one before.
            patch.setattr(catalog, "_LONGEST_S", 0.0)
            numbers = iter(range(1, 1000))
            patch.setattr("secrets.randbits", lambda _: next(numbers))  # noqa: B023
            kind = ForeignEngine if engine == "foreign" else PosixIOEngine
            moves = kind(2, direct=engine == "direct")
            depot = open_depot(tmp_path / way, engine=moves)
            results = [run(depot, step) for step in trial]
            seen.append((results, state_of(depot)))
            depot.store.close()
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1]


@pytest.mark.usefixtures("compiled")
def test_the_usual_batch_takes_the_quick_way(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot(segment_bytes=16 << 10)  # of two pages at first

    def thorough(*_: object) -> None:
        raise AssertionError("the thorough way was taken")

    monkeypatch.setattr(depot.store._reader, "get", thorough)
    monkeypatch.setattr(depot.store._writer, "put", thorough)
    assert depot.put(range(MOST_PAGES)).ok.all()
    assert depot.put([MOST_PAGES]).ok.all()
    assert depot.get(range(MOST_PAGES)) == [Outcome.OK] * MOST_PAGES
    assert depot.get([MOST_PAGES]) == [Outcome.OK]
    gate = MemoryGate()
    assert depot.put([MOST_PAGES + 1], gate=gate).ok.all()
    assert depot.get([3, MOST_PAGES + 1], gate=gate) == [Outcome.OK] * 2
    every = [*range(MOST_PAGES)]
    assert depot.get(every[::-1]) == [Outcome.OK] * MOST_PAGES


def test_own_renames_do_not_make_a_process_read_its_folder_again(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_LONGEST_S", 0.0)
    monkeypatch.setattr(directory, "_SCAN_AFTER_S", 60.0)
    depot = open_depot(quota=4 << 20)
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
    depot = open_depot(quota=4 << 20)
    other = open_depot()
    for turn in range(15):
        # Both change the folder within one tick of its clock.
        assert depot.request(range(50 * turn, 50 * turn + 50)).ok.all()
        assert other.put([10_000 + turn]).ok.all()
        end_s = time.monotonic() + 10
        while depot.there([10_000 + turn]) != [True]:
            assert time.monotonic() < end_s
