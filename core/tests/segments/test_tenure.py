"""Who may write a segment, with locks of the kernel and without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdock.segments import Tenure, tenure

OpenDepot = Callable[..., Any]
QUOTA = 2 << 20


@pytest.fixture(params=list(Tenure))
def kept_by(request: pytest.FixtureRequest) -> Tenure:
    return Tenure(request.param)


def index_files(depot: Any) -> list[str]:
    return sorted(
        path.name for path in depot.root.glob("*/*/*") if path.suffix != ".dat"
    )


def test_two_writers_never_share_a_segment(
    open_depot: OpenDepot, kept_by: Tenure
) -> None:
    depots = [open_depot(tenure=kept_by, quota_bytes=QUOTA) for _ in range(2)]
    for start in range(0, 600, 10):
        for number, depot in enumerate(depots):
            first = 10_000 * number + start
            numbers = range(first, first + 10)
            assert depot.put(numbers).ok.all()
            assert depot.get(numbers) == [0] * 10
    for depot in depots:
        assert "get_corrupt" not in depot.store.counts
        assert "get_short" not in depot.store.counts


def test_a_segment_of_a_closed_store_is_filled_up(
    open_depot: OpenDepot, kept_by: Tenure
) -> None:
    for start in range(0, 40, 10):
        depot = open_depot(tenure=kept_by)
        depot.put(range(start, start + 10))
        depot.store.close()
    assert len(index_files(depot)) <= 2
    assert open_depot(tenure=kept_by).get(range(40)) == [0] * 40


def test_without_locks_a_silent_writer_loses_its_segment_and_goes_on(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = open_depot(tenure=Tenure.SILENCE)
    slow.put(range(10))
    other = open_depot(tenure=Tenure.SILENCE)
    other.put(range(10, 20))
    assert len(index_files(slow)) == 2  # it is not silent for long enough
    monkeypatch.setattr(tenure, "SILENCE_S", 0.0)
    taker = open_depot(tenure=Tenure.SILENCE)
    taker.there([99])
    for start in range(100, 160, 10):
        taker.put(range(start, start + 10))
    assert taker.store.counts["segments_adopted"] >= 1
    assert slow.put(range(20, 30)).ok.all()
    everything = [*range(30), *range(100, 160)]
    fresh = open_depot(tenure=Tenure.SILENCE)
    assert fresh.get(everything) == [0] * len(everything)
    assert "get_corrupt" not in fresh.store.counts


def test_without_locks_half_made_segments_are_swept_when_they_are_old(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot(tenure=Tenure.SILENCE)
    depot.put(range(3))
    folder = depot.where(0).path.parent
    half: Path = folder / "00000000000000aa.00000001.new"
    half.write_bytes(b"half made")
    open_depot(tenure=Tenure.SILENCE)
    assert half.exists()
    monkeypatch.setattr(tenure, "ABANDONED_S", -1.0)
    open_depot(tenure=Tenure.SILENCE)
    assert not half.exists()


def test_without_locks_nothing_can_be_pinned(open_depot: OpenDepot) -> None:
    depot = open_depot(tenure=Tenure.SILENCE)
    depot.put([1])
    assert depot.store.pin(depot.keys([1])) == [False]
