"""A store that takes more than its quota at the start is brought below it."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvdock.batch import Batch, Operation, Outcome
from kvdock_segments import DirectoryStore

OpenDepot = Callable[..., Any]
LARGE = 8 << 20
SMALL = 1 << 20
OK = int(Outcome.OK)


def file_bytes(root: Path) -> int:
    found = 0
    for path in list(root.rglob("*.*/*")):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def wait_below(depot: Any, quota: int) -> None:
    deadline_s = time.monotonic() + 30
    while file_bytes(depot.root) > quota:
        assert time.monotonic() < deadline_s, "it still takes more than its quota"
        time.sleep(0.02)


def wait_stored(depot: Any, numbers: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not depot.put(numbers).ok.all():
        assert time.monotonic() < deadline_s, "puts are still refused"
        time.sleep(0.02)


def fill(depot: Any, pages: int) -> None:
    for first in range(0, pages, 50):
        depot.put(range(first, first + 50))


def keep(depot: Any, numbers: Any, seconds: float = 3600) -> None:
    until = int(time.time() + seconds)
    batch = Batch(Operation.RETAIN, depot.keys(numbers), keep_until=until)
    assert depot.store.run(batch).ok.all()


def test_what_is_above_a_smaller_quota_goes_coldest_first(
    open_depot: OpenDepot, caplog: pytest.LogCaptureFixture
) -> None:
    depot = open_depot(quota=LARGE)
    fill(depot, 500)
    depot.get(range(32))  # the oldest segment is in use
    depot.store.close()
    less = open_depot(quota=SMALL)
    wait_below(less, SMALL)
    assert "more than its quota" in caplog.text
    assert less.get(range(32)) == [OK] * 32
    assert less.get(range(200, 220)) == [int(Outcome.ABSENT)] * 20
    wait_stored(less, range(1000, 1020))
    fill(less, 300)
    assert file_bytes(less.root) <= SMALL


def test_puts_are_refused_until_a_store_is_below_its_quota(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot(quota=LARGE)
    fill(depot, 500)
    depot.store.close()
    monkeypatch.setattr("kvdock_segments.upkeep.shrink", lambda *_, **__: 0)
    less = open_depot(quota=SMALL)
    before = file_bytes(less.root)
    for number in range(2000, 2010):
        assert less.put([number]).outcomes.tolist() == [int(Outcome.REFUSED)]
    assert less.get(range(40)) == [OK] * 40
    assert file_bytes(less.root) == before
    less.clear()
    wait_stored(less, range(10))


def test_other_pools_make_way_for_a_smaller_quota(open_depot: OpenDepot) -> None:
    other = open_depot(pool="other", quota=LARGE)
    fill(other, 300)
    depot = open_depot(quota=LARGE)
    fill(depot, 100)
    for one in (other, depot):
        one.store.close()
    less = open_depot(quota=SMALL)
    wait_below(less, SMALL)


def test_promised_pages_stay_when_a_quota_becomes_smaller(
    open_depot: OpenDepot,
) -> None:
    """Also those that are scattered over all segments."""
    depot = open_depot(quota=LARGE)
    fill(depot, 500)
    promised = [*range(0, 500, 13)]
    keep(depot, promised)
    depot.store.close()
    less = open_depot(quota=SMALL)
    wait_below(less, SMALL)
    assert less.get(promised) == [OK] * len(promised)
    wait_stored(less, range(1000, 1010))
    for first in range(2000, 3000, 20):
        less.put(range(first, first + 20))
    assert less.get(promised) == [OK] * len(promised)
    assert file_bytes(less.root) <= SMALL
    less.store.close()
    namespace = less.store.place.namespace
    report = DirectoryStore(less.root).verify(namespace)
    assert not report.bad
    assert open_depot(quota=SMALL).get(promised) == [OK] * len(promised)


def test_promises_beyond_a_smaller_quota_hold_until_they_end(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota=LARGE)
    fill(depot, 500)
    keep(depot, range(200), seconds=6)
    depot.store.close()
    less = open_depot(quota=SMALL)
    assert less.put([1000]).outcomes.tolist() == [int(Outcome.REFUSED)]
    assert less.get(range(200)) == [OK] * 200
    wait_below(less, SMALL)
    wait_stored(less, range(1000, 1010))
