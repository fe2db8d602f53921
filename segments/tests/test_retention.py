"""Promises that hold whatever makes room, and pages that go at their time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock.batch import Batch, Operation, Outcome
from kvdock_segments import DirectoryStore, WriterLiveness, erasing
from kvdock_segments.format import RECORD, times_of
from kvdock_segments.ledger import Ledger
from kvdock_segments.namespace_files import PROMISES
from kvdock_segments.walk import segments

OpenDepot = Callable[..., Any]
QUOTA = 2 << 20
OK, ABSENT, REFUSED = (
    int(one) for one in (Outcome.OK, Outcome.ABSENT, Outcome.REFUSED)
)


def soon(seconds: float) -> int:
    return int(time.time() + seconds)


def retain(depot: Any, numbers: Any, keep_s: float = 0, expire_s: float = 0) -> Any:
    keys = depot.keys(numbers)
    ends = np.full(len(keys), soon(expire_s), np.int64) if expire_s else None
    batch = Batch(
        Operation.RETAIN,
        keys,
        keep_until=soon(keep_s) if keep_s else 0,
        expire_at=ends,
    )
    return depot.store.run(batch).outcomes.tolist()


def expiring(numbers: Any, seconds: float) -> Any:
    return np.full(len(numbers), soon(seconds), np.int64)


def flood(depot: Any, rounds: int = 30, first: int = 10_000) -> None:
    """Store several times what the quota has room for."""
    for start in range(first, first + 50 * rounds, 50):
        depot.request(range(start, start + 50))


def test_promised_pages_stay_while_others_are_evicted(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    result = depot.put(range(40), keep_until=soon(3600))
    assert result.kept.all()
    depot.put(range(100, 140))
    flood(depot)
    assert all(depot.there(range(40)))
    assert sum(depot.there(range(100, 140))) < 10
    assert depot.get(range(40)) == [OK] * 40


@pytest.mark.parametrize("way", ["evicted", "erased"])
@pytest.mark.usefixtures("never_read_again")
def test_what_another_handle_deleted_is_given_back_once(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A second time it would be taken from a promise that still holds."""
    depot, other = open_depot(quota=QUOTA), open_depot(quota=QUOTA)
    end = expiring(range(4), 10) if way == "erased" else None
    depot.put(range(4), keep_until=soon(10), expire_at=end)
    depot.put(range(4, 8), keep_until=soon(3600))
    ledger = depot.store._catalog.ledger
    other.delete(range(4))
    assert ledger.promised_bytes() == 4 * 8192
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 20)
    if way == "erased":
        depot.store.erase_expired()
    else:
        flood(depot)
    assert ledger.promised_bytes() == 4 * 8192


@pytest.mark.usefixtures("never_read_again")
@pytest.mark.parametrize("alone", [False, True])
def test_an_expiry_holds_for_both_copies_of_a_page(
    open_depot: OpenDepot,
    monkeypatch: pytest.MonkeyPatch,
    *,
    alone: bool,
) -> None:
    depots = open_depot(), open_depot()
    for depot in depots:
        assert not any(depot.there(range(4)))
    for depot in depots:  # at the same moment
        depot.put(range(4))
    if alone:
        for depot in depots:
            depot.store.close()
    depot = open_depot() if alone else depots[0]
    # What another process fills is not changed, and nothing is claimed of it.
    assert retain(depot, range(4), expire_s=60) == [OK if alone else REFUSED] * 4
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 61)
    assert any(open_depot().there(range(4))) is not alone


@pytest.mark.usefixtures("never_read_again")
def test_an_expiry_holds_for_what_another_handle_stored_just_now(
    open_depot: OpenDepot,
) -> None:
    writer, other = open_depot(), open_depot()
    assert not any(other.there(range(4)))
    writer.put(range(4))
    assert retain(other, range(4), expire_s=60) == [REFUSED] * 4
    result = other.put(range(4), expire_at=expiring(range(4), 60))
    assert result.outcomes.tolist() == [REFUSED] * 4


def test_stored_pages_can_be_promised_later(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    depot.put(range(60))
    assert retain(depot, [*range(40), 77], keep_s=3600) == [OK] * 40 + [ABSENT]
    # One that has a longer promise keeps it.
    assert retain(depot, range(40), keep_s=10) == [OK] * 40
    flood(depot)
    assert all(depot.there(range(40)))
    assert sum(depot.there(range(40, 60))) < 10


def test_the_budget_is_given_to_the_head_of_a_prefix(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA, retained_share=0.25)
    kept = depot.put(range(100), keep_until=soon(3600)).kept.tolist()
    room = kept.index(False)
    assert 40 < room < 70
    assert not any(kept[room:])
    depot.put(range(200, 220))
    assert retain(depot, range(200, 220), keep_s=60) == [REFUSED] * 20
    flood(depot)
    assert all(depot.there(range(room)))
    assert sum(depot.there(range(room, 100))) < 10


@pytest.mark.slow
@pytest.mark.usefixtures("never_read_again")
def test_erasing_goes_on_where_another_process_has_deleted_a_segment(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot, other = open_depot(), open_depot()
    depot.put(range(4), expire_at=expiring(range(4), 10))
    other.clear()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 20)
    assert depot.store.erase_expired() == 0
    depot.put(range(4))
    assert depot.get(range(4)) == [OK] * 4


@pytest.mark.usefixtures("never_read_again")
def test_who_asks_for_nothing_is_told_what_holds_now(open_depot: OpenDepot) -> None:
    """Also what another process changed within the pause between two looks."""
    depot, other = open_depot(), open_depot()
    depot.put(range(4))
    other.get(range(4))
    asks = Batch(Operation.RETAIN, other.keys([0, 1, 2, 9]))
    end = soon(3600)
    assert retain(depot, [0], expire_s=3600) == [OK]
    assert retain(depot, [1], keep_s=3600) == [OK]
    told = other.store.run(asks)
    assert told.outcomes.tolist() == [OK, OK, OK, ABSENT]
    assert end <= told.expire_at[0] <= soon(3600)
    assert not told.expire_at[1:].any()
    assert told.kept.tolist() == [False, True, False, False]
    depot.delete([0, 1])
    assert other.store.run(asks).outcomes.tolist() == [ABSENT, ABSENT, OK, ABSENT]


def test_a_promise_that_has_ended_makes_room_for_another(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA, retained_share=0.25)
    assert depot.put(range(50), keep_until=soon(1)).kept.all()
    deadline_s = time.monotonic() + 60
    while retain(depot, range(50), keep_s=3600) != [OK] * 50:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def test_promises_hold_after_a_restart_with_less_room(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    assert depot.put(range(90), keep_until=soon(3600)).kept.all()
    depot.store.close()
    less = open_depot(quota=QUOTA // 4)
    assert all(less.there(range(90)))
    less.put(range(500, 600))
    assert retain(less, range(500, 520), keep_s=60).count(OK) == 0
    flood(less, 5)
    assert all(less.there(range(90)))
    assert less.get(range(90)) == [OK] * 90


def test_other_pools_delete_no_segment_with_promised_pages(
    open_depot: OpenDepot,
) -> None:
    # Full segments of the other pool, of which one page is promised.
    limits = {"quota": QUOTA, "segment_bytes": 64 << 10}
    other = open_depot(pool="other", **limits)
    other.put(range(100))
    assert retain(other, [3], keep_s=3600) == [OK]
    mine = open_depot(**limits)
    flood(mine)
    assert other.there([3]) == [True]
    assert other.get([3]) == [OK]
    assert mine.store.counts["segments_deleted"] > 0, "nothing had to be deleted"


def test_garbage_collection_leaves_promised_pages(open_depot: OpenDepot) -> None:
    depot = open_depot(segment_bytes=64 << 10)
    depot.put(range(100))
    assert retain(depot, [3], keep_s=3600) == [OK]
    depot.store.close()
    namespace = depot.store.place.namespace
    assert DirectoryStore(depot.root).collect(namespace, to_bytes=0) > 0
    assert open_depot().get([3, 90]) == [OK, ABSENT]


def test_linked_files_cost_no_promised_page(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA, segment_bytes=64 << 10)
    depot.put(range(20))
    assert retain(depot, [3], keep_s=3600) == [OK]
    depot.store.close()
    for path in list(depot.root.rglob("*.*/*")):
        os.link(path, depot.root.parent / path.name)
    again = open_depot(quota=QUOTA, segment_bytes=64 << 10)
    flood(again)
    assert again.get([3]) == [OK]


def test_what_another_process_fills_gets_no_promise(open_depot: OpenDepot) -> None:
    writer = open_depot()
    writer.put(range(10))
    reader = open_depot()
    assert retain(reader, range(10), keep_s=60) == [REFUSED] * 10
    assert retain(writer, range(10), keep_s=60) == [OK] * 10
    assert reader.get(range(10)) == [OK] * 10


def test_nothing_is_promised_without_locks(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA, liveness=WriterLiveness.TIMEOUT)
    result = depot.put(range(10), keep_until=soon(60))
    assert result.ok.all()
    assert not result.kept.any()


def test_a_page_is_not_served_from_its_time_on(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(10), expire_at=expiring(range(10), 3600))
    depot.put(range(10, 20))
    assert all(depot.there(range(20)))
    assert retain(depot, range(5, 15), expire_s=1) == [OK] * 10
    deadline_s = time.monotonic() + 30
    while any(depot.there(range(5, 15))):
        assert time.monotonic() < deadline_s
    for size in (1, 10):
        some = range(5, 5 + size)
        assert depot.get(some) == [ABSENT] * size
    assert depot.get([*range(5), *range(15, 20)]) == [OK] * 10
    # Stored again it is a new page.
    assert depot.put(range(5, 15)).ok.all()
    assert all(depot.there(range(20)))


def test_a_page_that_is_stored_again_with_a_time_has_that_time(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(4))
    past = np.full(4, soon(-10), np.int64)
    assert depot.put(range(4), expire_at=past).ok.all()
    assert not any(depot.there(range(4)))


def test_a_loaded_page_says_when_it_expires(open_depot: OpenDepot) -> None:
    depot = open_depot()
    ends = expiring(range(6), 3600)
    depot.put(range(6), expire_at=ends)
    depot.put(range(6, 8))
    for numbers in ([0], range(6), [0, 6, 1, 99]):
        memory = np.zeros((len(numbers), depot.page_bytes), np.uint8)
        batch = depot.batch(Operation.GET, numbers, memory)
        wanted = [int(ends[0]) if one < 6 else 0 for one in numbers]
        assert depot.store.run(batch).expire_at.tolist() == wanted


def raw_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*.dat")))


@pytest.fixture
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock_segments.retention.GRACE_S", 0)


@pytest.mark.usefixtures("_hurried")
@pytest.mark.parametrize("restart", [False, True])
def test_bytes_of_expired_pages_are_gone_soon(
    open_depot: OpenDepot, *, restart: bool
) -> None:
    depot = open_depot(erase_within_s=0.2)
    depot.put(range(20), expire_at=expiring(range(20), 1))
    depot.put(range(20, 40))
    page = depot.pages([7]).tobytes()
    assert page in raw_bytes(depot.root)
    if restart:
        depot.store.close()
        depot = open_depot(erase_within_s=0.2)
    deadline_s = time.monotonic() + 30
    while page in raw_bytes(depot.root):
        assert time.monotonic() < deadline_s
        depot.there([7])
        time.sleep(0.05)
    while depot.store.counts["pages_expired"] < 20:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    raw = raw_bytes(depot.root)
    assert not any(depot.pages([n]).tobytes() in raw for n in range(20))
    assert depot.get(range(20, 40)) == [OK] * 20
    report = DirectoryStore(depot.root).verify(depot.store.place.namespace)
    assert report.good == 20
    assert not report.bad
    # The slots are used again.
    assert depot.put(range(20)).ok.all()
    assert depot.get(range(40)) == [OK] * 40


@pytest.mark.usefixtures("_hurried")
@pytest.mark.slow
def test_what_is_stored_meanwhile_is_not_erased(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA, erase_within_s=0.2)
    deadline_s = time.monotonic() + 3
    turn = 0
    while time.monotonic() < deadline_s:
        turn += 1
        old, new = range(40), range(1000 * turn, 1000 * turn + 40)
        depot.put(old, expire_at=expiring(old, 0.5))
        depot.put(new)
        assert depot.get(new) == [OK] * 40
    report = DirectoryStore(depot.root).verify(depot.store.place.namespace)
    assert not report.bad


def test_pages_of_a_store_with_a_maximal_age_go_by_it(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(10))
    depot.put(range(10, 12), expire_at=expiring(range(2), 3600))
    depot.store.close()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        young = open_depot(max_age_s=1.0)
        if not any(young.there(range(10))):
            break
        young.store.close()
    assert young.there([0, 10, 11]) == [False, True, True]


def budget_of(depot: Any) -> Ledger:
    fd = os.open(depot.root / depot.store.place.namespace, os.O_RDONLY)
    return Ledger(fd, WriterLiveness.LOCKS)


def test_a_damaged_count_is_taken_from_the_records(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    assert depot.put(range(50), keep_until=soon(3600)).kept.all()
    budget = budget_of(depot)
    before = budget.promised_bytes()
    assert before == 50 * 8192
    file = depot.root / depot.store.place.namespace / PROMISES
    for damage in (b"x" * 40, file.read_bytes()[:-3], os.urandom(96)):
        file.write_bytes(damage)
        assert budget.promised_bytes() == before
    os.close(budget.namespace_fd)


def test_clearing_ends_all_promises(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    depot.put(range(100), keep_until=soon(3600))
    depot.clear()
    assert depot.put(range(200, 300), keep_until=soon(3600)).kept.all()


def test_a_promise_that_is_extended_is_counted_once(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA, retained_share=0.25)
    assert depot.put(range(50), keep_until=soon(60)).kept.all()
    budget = budget_of(depot)
    for seconds in range(100, 2000, 100):
        assert retain(depot, range(50), keep_s=seconds) == [OK] * 50
        assert budget.promised_bytes() == 50 * 8192
    assert retain(depot, [7, 7, 8, 7], keep_s=3000) == [OK] * 4
    assert budget.promised_bytes() == 50 * 8192
    # The rest of the budget is still there, and no more than that.
    depot.put(range(100, 114))
    assert retain(depot, [*range(50), *range(100, 112)], keep_s=4000) == [OK] * 62
    assert budget.promised_bytes() == 62 * 8192
    assert retain(depot, [113, 113, 113], keep_s=60) == [OK] * 3
    assert budget.promised_bytes() == 63 * 8192
    assert not depot.put(range(200, 220), keep_until=soon(60)).kept.all()
    os.close(budget.namespace_fd)


def test_what_expires_before_its_promise_gives_the_rest_back(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota=QUOTA, retained_share=0.25)
    assert depot.put(range(50), keep_until=soon(86_400)).kept.all()
    budget = budget_of(depot)
    assert retain(depot, range(25), expire_s=1) == [OK] * 25
    deadline_s = time.monotonic() + 30  # a promise is counted a few seconds longer
    while budget.promised_bytes() > 25 * 8192:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert depot.put(range(100, 120), keep_until=soon(60)).kept.all()
    os.close(budget.namespace_fd)


def test_what_is_erased_gives_its_promise_back(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    assert depot.put(range(50), keep_until=soon(86_400)).kept.all()
    budget = budget_of(depot)
    assert depot.store.erase(depot.keys(range(30)), time.monotonic() + 60).all()
    assert budget.promised_bytes() == 20 * 8192
    os.close(budget.namespace_fd)


def test_another_process_soon_sees_an_expiry(open_depot: OpenDepot) -> None:
    depot, other = open_depot(), open_depot()
    depot.put(range(20))
    for folder in other.store._catalog.folders.values():
        os.utime(folder.fd, (1, 1))  # or it is read again because it is young
    assert other.get(range(20)) == [OK] * 20
    # It is filling the segment, so no name changes.
    assert retain(depot, range(10), expire_s=-1) == [OK] * 10
    deadline_s = time.monotonic() + 10  # it reads the folder now and then
    while other.get(range(20)) != [ABSENT] * 10 + [OK] * 10:
        assert time.monotonic() < deadline_s
    assert other.there(range(20)) == [False] * 10 + [True] * 10


@pytest.mark.usefixtures("_hurried")
def test_a_store_that_is_opened_and_idle_erases_what_has_expired(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(erase_within_s=0.2)
    depot.put(range(10), expire_at=expiring(range(10), 1))
    depot.store.close()
    again = open_depot(erase_within_s=0.2)
    deadline_s = time.monotonic() + 30
    while again.store.counts["pages_expired"] < 10:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_of_two_records_the_one_that_is_still_served_counts(
    open_depot: OpenDepot,
) -> None:
    """Also after a kill, whichever of their segments is read last."""
    depot = open_depot(quota=0)
    others = range(100, 140)
    depot.put([*range(10), *others], expire_at=expiring(range(50), 1))
    deadline_s = time.monotonic() + 30
    while any(depot.there(range(10))):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    second = open_depot(quota=0)  # it fills a segment of its own
    assert second.put(range(10), keep_until=soon(3600)).kept.all()
    assert second.get(range(10)) == [OK] * 10
    for one in (depot, second):
        one.store.close()
    for _ in range(3):
        third = open_depot(quota=0)
        assert third.get(range(10)) == [OK] * 10
        third.store.close()


def test_many_promises_fit_into_one_page(open_depot: OpenDepot) -> None:
    depot = open_depot()
    budget = budget_of(depot)
    for seconds in np.geomspace(10, 3e8, 600).astype(int).tolist():
        until = np.full(3, soon(seconds), np.int64)
        blank = np.zeros(3, RECORD)
        assert budget.promise(1, blank, until, 1 << 40).all()
    file = depot.root / depot.store.place.namespace / PROMISES
    assert file.stat().st_size <= 4096
    # None is counted for less time than was promised; the first have just ended.
    assert 1700 < budget.promised_bytes() <= 1800
    os.close(budget.namespace_fd)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_promises_stay_within_the_budget_and_hold(
    open_depot: OpenDepot, seed: int
) -> None:
    """Any order of puts, promises, loads, evictions and restarts."""
    chance = np.random.default_rng(seed)
    limits = {"quota": QUOTA, "segment_bytes": 128 << 10, "retained_share": 0.4}
    depot = open_depot(**limits)
    promised: dict[int, int] = {}
    for _ in range(60):
        numbers = chance.choice(600, 24, replace=False).tolist()
        until = soon(float(chance.integers(600, 6000)))
        match chance.integers(5):
            case 0:
                kept = depot.put(numbers, keep_until=until).kept.tolist()
                new = [n for n, is_kept in zip(numbers, kept, strict=True) if is_kept]
            case 1:
                batch = Batch(Operation.RETAIN, depot.keys(numbers), keep_until=until)
                ok = depot.store.run(batch).ok.tolist()
                new = [n for n, is_kept in zip(numbers, ok, strict=True) if is_kept]
            case 2:
                depot.store.close()
                depot = open_depot(**limits)
                new = []
            case _:
                depot.request(numbers)
                new = []
        promised |= {n: max(until, promised.get(n, 0)) for n in new}
        assert len(promised) * 8192 <= 0.4 * QUOTA
        assert all(depot.there([*promised])), "an accepted promise is broken"
    assert promised
    assert depot.get([*promised]) == [OK] * len(promised)


_KILLED = """
import sys, time
sys.path.insert(0, sys.argv[2])
import crash_worker, numpy as np
from kvdock.batch import Batch, Operation
import attrs
store = crash_worker.open_store(crash_worker.Path(sys.argv[1]))
chance = np.random.default_rng(int(sys.argv[3]))
while True:
    numbers = chance.choice(crash_worker.KEYS, 24, replace=False)
    until = int(time.time()) + 3600
    memory = crash_worker.pages_of(numbers)
    batch = crash_worker.batch(Operation.PUT, numbers, memory)
    if chance.integers(2):
        batch = attrs.evolve(batch, keep_until=until)
        kept = store.run(batch).kept
        print(*numbers[kept].tolist(), flush=True)
    else:
        store.run(batch)
        ask = Batch(Operation.RETAIN, batch.keys, keep_until=until)
        print(*numbers[store.run(ask).ok].tolist(), flush=True)
"""


def _acknowledged(root: Path, seed: int, lines: int) -> list[int]:
    """Return the promises that a process printed before it was killed."""
    command = [sys.executable, "-c", _KILLED, str(root), str(Path(__file__).parent)]
    with subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split(b"\n")[:-1]
    return [int(word) for line in (*found, *rest) for word in line.split()]


def _killed_in_turn(open_depot: OpenDepot, root: Path, kills: int) -> None:
    limits = {"quota": 6 << 20, "namespace": "c0" * 32}
    promised: set[int] = set()
    for seed in range(kills):
        promised.update(_acknowledged(root, seed, 3 + seed % 5))
        depot = open_depot(root, **limits)
        # Other pages, several times the quota: what is not promised goes.
        flood(depot, 20, 10_000 * (seed + 1))
        assert all(depot.there(sorted(promised))), "a promise is broken by a kill"
        assert len(promised) * 8192 <= 3 << 20
        depot.store.close()
    assert promised


@pytest.mark.slow
def test_promises_survive_kills(open_depot: OpenDepot, tmp_path: Path) -> None:
    _killed_in_turn(open_depot, tmp_path / "killed", 2)


@pytest.mark.slow
def test_promises_survive_many_kills(open_depot: OpenDepot, tmp_path: Path) -> None:
    _killed_in_turn(open_depot, tmp_path / "killed", 50)


def test_times_of_a_record_do_not_touch_each_other() -> None:
    late = np.array([2**32 - 1, 0, 5])
    word = times_of(late, np.array([0, 2**32 - 1, 7]))
    assert (word >> np.uint64(32)).tolist() == late.tolist()
    assert (word & np.uint64(2**32 - 1)).tolist() == [0, 2**32 - 1, 7]


@pytest.mark.usefixtures("_hurried")
def test_a_store_that_is_idle_after_a_put_erases_what_has_expired(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(erase_within_s=0.2)
    depot.put(range(10), expire_at=expiring(range(10), 1))
    deadline_s = time.monotonic() + 30
    while depot.store.counts["pages_expired"] < 10:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def recounted(depot: Any) -> int:
    """Return the bytes that are promised now by what all records say."""
    found = 0
    for segment in segments(depot.root, depot.store.place.namespace):
        contents = segment.contents
        until = contents.records["keep_until"]
        found += contents.slot_bytes * int(np.count_nonzero(until > int(time.time())))
    return found


def test_promises_of_evicted_pages_do_not_count_when_the_clock_is_set_back(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot(quota=QUOTA)
    budget, now = budget_of(depot), time.time
    assert depot.put(range(90), keep_until=soon(3600)).kept.all()
    assert budget.promised_bytes() == recounted(depot) == 90 * 8192
    monkeypatch.setattr("time.time", lambda: now() + 7200)
    flood(depot, 10)
    assert not any(depot.there(range(90)))
    monkeypatch.setattr("time.time", now)
    assert budget.promised_bytes() == recounted(depot) == 0
    # What is still there is promised again, and counts.
    assert depot.put(range(200, 250), keep_until=soon(3600)).kept.all()
    monkeypatch.setattr("time.time", lambda: now() + 7200)
    assert depot.put(range(300, 310), keep_until=soon(60)).kept.all()
    monkeypatch.setattr("time.time", now)
    assert budget.promised_bytes() == recounted(depot) == 60 * 8192
    os.close(budget.namespace_fd)


def test_promises_of_deleted_pages_and_segments_are_given_back(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"quota": QUOTA, "segment_bytes": 64 << 10}
    other, depot = open_depot(pool="other", **limits), open_depot(**limits)
    budget, now = budget_of(depot), time.time
    assert other.put(range(60), keep_until=soon(3600)).kept.all()
    assert depot.put(range(60), keep_until=soon(3600)).kept.all()
    depot.delete(range(20))
    assert budget.promised_bytes() == recounted(depot) == 100 * 8192
    monkeypatch.setattr("time.time", lambda: now() + 7200)
    flood(depot, 10)  # whole segments of the other pool go
    assert depot.store.counts["segments_deleted"] > 0
    monkeypatch.setattr("time.time", now)
    assert budget.promised_bytes() == recounted(depot) < 60 * 8192
    os.close(budget.namespace_fd)


_KILLED_BETWEEN = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
import attrs, crash_worker, numpy as np
from kvdock.batch import Operation
from kvdock_segments.segment import Segment
Segment.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store = crash_worker.open_store(crash_worker.Path(sys.argv[1]))
numbers = np.arange(50)
memory = crash_worker.pages_of(numbers)
batch = crash_worker.batch(Operation.PUT, numbers, memory)
store.run(attrs.evolve(batch, keep_until=int(time.time()) + 3600))
"""
"""Is killed after a promise was counted, and before a record has it."""


def test_what_a_killed_process_counted_is_not_counted_after_a_start(
    open_depot: OpenDepot, tmp_path: Path
) -> None:
    root = tmp_path / "killed"
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _KILLED_BETWEEN, str(root), here]
    ended = subprocess.run(command, check=False)
    assert ended.returncode == -signal.SIGKILL
    depot = open_depot(root, namespace="c0" * 32, quota=6 << 20)
    assert depot.store.capacity().promised_bytes == recounted(depot) == 0
    assert depot.put(range(50), keep_until=soon(3600)).kept.all()
    # Not where another one has it open, which may be counting first just now.
    again = open_depot(root, namespace="c0" * 32, quota=6 << 20)
    assert again.store.capacity().promised_bytes == recounted(depot) == 50 * 8192


@pytest.mark.parametrize("way", ["evict", "delete"])
@pytest.mark.parametrize("punched", [True, False])
def test_bytes_of_pages_that_go_before_their_time_are_gone(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, *, way: str, punched: bool
) -> None:
    if not punched:
        monkeypatch.setattr(erasing, "_punched", lambda *_: False)
    depot = open_depot(quota=QUOTA, erase_within_s=60.0)
    depot.put(range(60), expire_at=expiring(range(60), 3600))
    depot.put(range(60, 70))
    assert depot.pages([7]).tobytes() in raw_bytes(depot.root)
    if way == "delete":
        depot.delete(range(60))
    else:
        for first in range(1000, 2000, 50):
            depot.request(range(first, first + 50))
            gone = [one for one, ok in enumerate(depot.there(range(60))) if not ok]
            raw = raw_bytes(depot.root)
            assert not any(depot.pages([one]).tobytes() in raw for one in gone)
    assert not any(depot.there(range(60)))
    raw = raw_bytes(depot.root)
    assert not any(depot.pages([number]).tobytes() in raw for number in range(60))
    report = DirectoryStore(depot.root).verify(depot.store.place.namespace)
    assert not report.bad


def test_what_is_stored_after_the_clock_was_set_back_is_served_until_its_time(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot, now = open_depot(quota=QUOTA), time.time
    depot.put(range(10), expire_at=expiring(range(10), 3600))
    depot.put(range(30, 40))
    monkeypatch.setattr("time.time", lambda: now() + 7200)
    assert not any(depot.there(range(10)))
    monkeypatch.setattr("time.time", now)
    later = range(20, 30)
    assert depot.put(
        later, keep_until=soon(1800), expire_at=expiring(later, 3600)
    ).kept.all()
    assert retain(depot, range(30, 40), expire_s=3600) == [OK] * 10
    # What has expired once stays so.
    assert depot.there(range(40)) == [False] * 20 + [True] * 20
    depot.store.erase_expired()
    assert depot.get(range(20, 40)) == [OK] * 20
    assert depot.get(range(10)) == [ABSENT] * 10
