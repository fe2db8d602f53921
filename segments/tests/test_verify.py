"""Verifying a store finds, names and heals what is wrong."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdock.errors import KvdockError
from kvdock.stores import Verified
from kvdock_segments.directory_store import DirectoryStore
from kvdock_segments.format import RECORDS_AT

OpenDepot = Callable[..., Any]


def checked(depot: Any, *, heal: bool = False) -> Verified:
    return DirectoryStore(depot.root).verify(depot.store.place.namespace, heal=heal)


def spoil(depot: Any, number: int) -> None:
    spot = depot.where(number)
    with spot.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff\xfe\xfd", spot.offset + 100)


def an_index(depot: Any) -> Path:
    root: Path = depot.root
    return min(path for path in root.glob("*/kv.*/*") if path.suffix != ".dat")


@pytest.mark.parametrize("living", [True, False], ids=["beside-a-writer", "alone"])
def test_a_bad_page_is_forgotten_and_stored_by_the_next_write(
    open_depot: OpenDepot, *, living: bool
) -> None:
    depot = open_depot()
    depot.put(range(20))
    if not living:
        depot.store.close()
    spoil(depot, 7)
    seen = checked(depot)
    assert (seen.good, len(seen.bad), seen.forgotten, seen.ok) == (19, 1, 0, False)
    assert [spot.where for spot in checked(depot).bad] == [depot.where(7).where]
    assert checked(depot, heal=True).forgotten == 1
    assert checked(depot).ok
    again = depot if living else open_depot()
    assert again.put(range(20)).ok.all()
    assert again.get(range(20)) == [0] * 20
    assert (checked(again).good, checked(again).ok) == (20, True)


def test_a_torn_record_is_a_page_that_is_lost(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(20))
    depot.store.close()
    with an_index(depot).open("r+b") as file:
        os.pwrite(file.fileno(), b"zzzz", RECORDS_AT + 64 * 5 + 3)
    seen = checked(depot)
    assert (seen.good, seen.bad, seen.corrupt_records, seen.ok) == (19, (), 1, False)
    assert checked(depot, heal=True).forgotten == 1
    assert checked(depot).ok
    again = open_depot()
    assert again.put(range(20)).ok.all()
    assert again.get(range(20)) == [0] * 20


def test_a_page_beyond_the_end_of_its_file_is_lost(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(6))
    depot.store.close()
    os.truncate(depot.where(0).path, 3 * 8192)
    assert (checked(depot).good, checked(depot).corrupt_records) == (3, 3)


@pytest.mark.parametrize("damage", ["torn", "another-version", "no-pages", "empty"])
def test_a_segment_that_cannot_be_read_is_named(
    open_depot: OpenDepot, damage: str
) -> None:
    depot = open_depot()
    depot.put(range(100))
    depot.store.close()
    index = an_index(depot)
    match damage:
        case "torn":
            index.write_bytes(b"XXXXXXXX" + index.read_bytes()[8:])
        case "another-version":
            index.write_bytes(index.read_bytes()[:8] + b"\x63" + index.read_bytes()[9:])
        case "no-pages":
            depot.where(0)
            index.with_name(index.name.partition(".")[0] + ".dat").unlink()
        case _:
            os.truncate(index, 0)
    seen = checked(depot)
    assert seen.unreadable_segments == (index,)
    assert not seen.ok
    assert 0 < seen.good < 100


def test_a_file_that_must_not_be_opened_is_not_reported_as_lost(
    open_depot: OpenDepot, read_only: Callable[[], None]
) -> None:
    depot = open_depot()
    depot.put(range(6))
    depot.store.close()
    read_only()
    with pytest.raises(KvdockError, match="cannot be healed: Read-only file system"):
        checked(depot, heal=True)
    assert checked(depot).good == 6
