"""Two names of one file of pages overwrite each other: neither is written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvdock_segments.directory_store import DirectoryStore

OpenDepot = Callable[..., Any]
OK = 0


def data_files(depot: Any) -> list[Path]:
    return sorted(depot.root.glob("*/*/*.dat"))


def link(*, over: Path, to: Path) -> None:
    over.unlink()
    os.link(to, over)
    assert to.stat().st_nlink > 1


def settle(depot: Any, numbers: range, rounds: int = 12) -> bool:
    """Store and load again; return whether every page is right in the end."""
    for _ in range(rounds):
        assert depot.put(numbers).ok.all()
        if depot.get(numbers) == [OK] * len(numbers):
            return True
    return False


def test_two_files_of_pages_that_are_one_are_repaired(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(64))
    depot.store.close()
    first, *others = data_files(depot)
    for other in others:
        link(over=other, to=first)
    again = open_depot()
    assert settle(again, range(64))
    again.store.close()
    assert settle(open_depot(), range(64, 200))
    fresh = open_depot()
    assert fresh.get(range(200)) == [OK] * 200


def test_files_that_become_one_under_an_open_store_are_repaired(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(40))
    first, *others = data_files(depot)
    for other in others:
        link(over=other, to=first)
    assert settle(depot, range(80))
    assert settle(open_depot(), range(80))


def test_a_full_quota_goes_on_with_files_that_are_one(open_depot: OpenDepot) -> None:
    quota = 2 << 20
    depot = open_depot(quota=quota)
    depot.put(range(200))
    depot.store.close()
    first, *others = data_files(depot)
    for other in others:
        link(over=other, to=first)
    again = open_depot(quota=quota)
    for start in range(1000, 1600, 20):
        numbers = range(start, start + 20)
        assert settle(again, numbers)
    assert not [path for path in data_files(again) if path.stat().st_nlink > 1]


def test_a_store_does_not_write_into_a_copy_made_of_links(
    open_depot: OpenDepot, tmp_path: Path
) -> None:
    depot = open_depot(quota=1 << 20)
    depot.put(range(60))
    depot.store.close()
    copies = {}
    for path in data_files(depot):
        copy = tmp_path / path.name
        os.link(path, copy)
        copies[copy] = copy.read_bytes()
    again = open_depot(quota=1 << 20)
    assert again.get(range(60)) == [OK] * 60
    for start in range(1000, 1400, 20):
        assert again.request(range(start, start + 20)).ok.all()
    assert {copy: copy.read_bytes() for copy in copies} == copies


def test_verifying_names_files_that_are_one_and_collecting_keeps_one_of_them(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(64))
    depot.store.close()
    first, second, *_ = data_files(depot)
    link(over=second, to=first)
    namespace = depot.store.place.namespace
    seen = DirectoryStore(depot.root).verify(namespace)
    assert set(seen.damaged_files) == {first, second}
    assert DirectoryStore(depot.root).collect(namespace)
    assert [first.exists(), second.exists()].count(True) == 1
    assert not DirectoryStore(depot.root).verify(namespace).damaged_files
