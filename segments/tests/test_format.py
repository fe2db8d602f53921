"""Versions of index files, and records that have expired."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock.batch import Outcome
from kvdock_segments import format as layout
from kvdock_segments.directory_store import DirectoryStore
from kvdock_segments.format import (
    HEADER,
    RECORD,
    RECORDS_AT,
    failed_records,
    header_of,
    is_newer,
    parse_header,
    records_of,
    with_checksums,
)
from kvdock_segments.index_file import read_contents, write_records
from kvdock_segments.paths import IndexName

if TYPE_CHECKING:
    import pytest

OpenDepot = Callable[..., Any]
OK, ABSENT = int(Outcome.OK), int(Outcome.ABSENT)


def expire(depot: Any, numbers: range, at: float) -> None:
    """Let the records of pages on disk expire at a time."""
    wanted = {int(low) for low, _ in depot.store._catalog.digests(depot.keys(numbers))}
    for path in (*depot.root.glob("*/kv.*/*.idx"), *depot.root.glob("*/kv.*/*.open")):
        name = IndexName.parse(path.name)
        assert name
        with path.open("r+b", buffering=0) as file:
            size = path.with_name(name.data).stat().st_size
            contents = read_contents(file.fileno(), name, size)
            assert contents
            low = contents.records["key_low"]
            chosen = np.flatnonzero([int(one) in wanted for one in low])
            records = contents.records[chosen]
            records["expire_at"] = int(at)
            write_records(file.fileno(), chosen, with_checksums(records))


def test_an_expired_page_is_never_served_and_can_be_stored_again(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(20))
    depot.store.close()
    expire(depot, range(5), time.time() - 1)
    expire(depot, range(5, 10), time.time() + 3600)
    again = open_depot()
    assert again.there(range(20)) == [False] * 5 + [True] * 15
    assert again.get([0]) == [ABSENT]
    assert again.get(range(5)) == [ABSENT] * 5
    assert again.get(range(20)) == [ABSENT] * 5 + [OK] * 15
    assert again.get([5]) == [OK]
    assert again.put(range(20)).ok.all()
    assert again.get(range(20)) == [OK] * 20
    assert open_depot().get(range(20)) == [OK] * 20


def test_a_page_expires_while_a_store_is_open(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(20))
    depot.store.close()
    expire(depot, range(20), time.time() + 3600)
    again = open_depot()
    assert again.get(range(20)) == [OK] * 20
    now = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: now)
    assert again.get(range(20)) == [ABSENT] * 20
    assert again.get([3]) == [ABSENT]
    assert again.there(range(20)) == [False] * 20


def test_the_bytes_of_a_record_and_of_a_header() -> None:
    assert RECORD.itemsize == HEADER.itemsize == 64
    digests = np.array([[1, 2]], np.uint64)
    [one] = records_of(
        digests,
        np.array([3], np.uint64),
        segment=4,
        slots=np.array([5]),
        stored_ns=np.array([6]),
        times=7,
    )
    words = np.frombuffer(one.tobytes(), "<u8").tolist()
    assert words[:7] == [1, 2, 3, 7, 6, 4, 5 << 48]
    header = header_of(4, 1, 16, 512, 500)
    assert header[:12] == b"KVDOCKSG" + (2).to_bytes(4, "little")
    found = parse_header(header)
    assert found is not None
    assert int(found["object_bytes"][0]) == 500


def test_a_failed_slot_is_no_record() -> None:
    rows = failed_records(4, np.array([5]), np.array([2]), np.array([10**18]))
    header = parse_header(header_of(4, 1, 16, 512, 500))
    assert header is not None
    assert not layout.valid(rows, header, np.array([5])).any()
    assert layout.are_failed(rows, 4, np.array([5])).all()
    assert not layout.are_failed(rows, 4, np.array([6])).any()
    assert not layout.are_failed(rows, 3, np.array([5])).any()


def test_a_later_version_is_a_miss_and_stays(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(20))
    depot.store.close()
    namespace = depot.store.place.namespace
    for path in depot.root.glob("*/kv.*/*.open"):
        with path.open("r+b") as file:
            header = np.frombuffer(file.read(64), HEADER).copy()
            header["version"] = layout.FORMAT_VERSION + 1
            file.seek(0)
            file.write(with_checksums(header, layout._SALT + 3).tobytes())
            assert is_newer(header.tobytes())
    again = open_depot()
    assert again.there(range(20)) == [False] * 20
    assert again.put(range(20)).ok.all()
    again.store.close()
    before = sorted(depot.root.glob("*/kv.*/*"))
    DirectoryStore(depot.root).collect(namespace)
    assert sorted(depot.root.glob("*/kv.*/*")) == before
    report = DirectoryStore(depot.root).verify(namespace)
    assert len(report.unreadable_segments) == 1
    assert RECORDS_AT == 128
