"""The stores and interfaces of `make bench-outside`, small."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import FOLDER

PAGES = 16
PAGE_BYTES = 4096
QUOTA_BYTES = 64 << 20
KEYS = [f"{number:064x}" for number in range(PAGES)]
STORED, LOADED = range(PAGES), range(PAGES, 2 * PAGES)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(FOLDER / "outside")
    # At the end: scripts have the names of libraries.
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return import_module


@pytest.fixture(
    params=["kvdock", "kvdock_backend", "file", "file_checked", "sqlite", "lmdb"]
)
def store(
    request: pytest.FixtureRequest, script: Callable[[str], Any], tmp_path: Path
) -> Iterator[tuple[str, Any, Any]]:
    race = script("side_by_side")
    memory = race.made_memory(PAGES, PAGE_BYTES)
    (opened,) = race.opened(tmp_path, memory, QUOTA_BYTES, [request.param]).values()
    yield request.param, opened, memory
    opened.close()


def test_a_store_gives_back_what_it_was_given(store: tuple[str, Any, Any]) -> None:
    name, opened, memory = store
    assert opened.get(KEYS, LOADED) == 0
    opened.look_up(KEYS)
    opened.put(KEYS, STORED)
    opened.put(KEYS, STORED)
    assert opened.get(KEYS, LOADED) == PAGES
    assert np.array_equal(memory[:PAGES], memory[PAGES:])
    opened.settle()
    opened.drop(KEYS)
    if not name.startswith("kvdock"):  # which makes room by itself
        assert opened.get(KEYS, LOADED) == 0


def test_a_known_page_is_not_written_again(store: tuple[str, Any, Any]) -> None:
    _, opened, memory = store
    opened.look_up(KEYS)
    opened.put(KEYS, STORED)
    first = memory[:PAGES].copy()
    memory[:PAGES] ^= 1
    opened.put(KEYS, STORED)
    assert opened.get(KEYS, LOADED) == PAGES
    assert np.array_equal(memory[PAGES:], first)


@pytest.mark.parametrize(("checked", "found"), [(False, 1), (True, 0)])
def test_only_the_checked_file_notices_a_damaged_page(
    script: Callable[[str], Any], tmp_path: Path, *, checked: bool, found: int
) -> None:
    memory = np.ones((2, PAGE_BYTES), np.uint8)
    files = script("plain_stores").FilePerPage(tmp_path, memory, checked=checked)
    files.put(KEYS[:1], range(1))
    path = tmp_path / KEYS[0]
    path.write_bytes(b"\2" + path.read_bytes()[1:])
    assert files.get(KEYS[:1], range(1, 2)) == found


def test_a_store_with_wrong_bytes_ends_the_run(
    script: Callable[[str], Any], tmp_path: Path
) -> None:
    race, plain = script("side_by_side"), script("plain_stores")
    memory = race.made_memory(PAGES, PAGE_BYTES)
    files = plain.FilePerPage(tmp_path, memory)

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(files, name)

        def get(self, keys: list[str], pages: range) -> int:
            found: int = files.get(keys, pages)
            memory[pages.start] ^= 1
            return found

    (tmp_path / "right").mkdir()
    right = plain.FilePerPage(tmp_path / "right", memory)
    assert race.Race({"right": right}, memory).run(4, 1)
    with pytest.raises(SystemExit, match="wrong bytes"):
        race.Race({"wrong": Wrong()}, memory).run(4, 1)


@pytest.mark.parametrize("name", ["NumpyFiles", "KvdockEntries"])
def test_an_entry_of_mlperf_comes_back_until_it_is_deleted(
    script: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    module = script("mlperf_storage")
    monkeypatch.setattr(module, "PAGE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(module, "STAGED", 4)  # entries of several calls
    more = (QUOTA_BYTES,) if name == "KvdockEntries" else ()
    storage = getattr(module, name)(tmp_path, *more)
    entries = {
        key: np.random.default_rng(number).random((3, number, 64)).astype(np.float16)
        for number, key in ((1, "short"), (90, "long"), (91, "other"))
    }
    for key, entry in entries.items():
        assert storage.write(key, entry).total > 0
    for key, entry in entries.items():
        data, timing = storage.read(key)
        assert np.array_equal(data, entry)
        assert timing.total > 0
    storage.delete("long")
    storage.delete("absent")
    with pytest.raises(KeyError):
        storage.read("long")
    assert storage.read("other")[0].shape == (3, 91, 64)
    storage.clear()
    with pytest.raises(KeyError):
        storage.read("other")
    if name == "KvdockEntries":
        storage.close()


@pytest.mark.parametrize("name", ["SlotFile", "KvdockPages"])
def test_mooncakes_replay_reads_what_it_wrote_before(
    script: Callable[[str], Any], tmp_path: Path, name: str
) -> None:
    module = script("mooncake_storage")
    storage = getattr(module, name)(tmp_path, PAGE_BYTES, 8)
    reads, writes = module.replay(storage, [[1, 2, 3], [1, 2, 4]])
    assert (len(reads), len(writes)) == (2, 4)
    assert min(reads + writes) > 0
    assert storage.exists(4)
    assert storage.delete(4)
    assert not storage.exists(4)
    storage.close()


def test_ratios_are_the_peers_milliseconds_over_kvdocks(
    script: Callable[[str], Any],
) -> None:
    measured = script("run_all").in_turns(
        lambda _: {"read": [3.0, 3.0]}, lambda _: {"read": [1.0, 1.0]}, 2
    )
    assert measured["seconds_over_kvdock"]["read"] == 3
    assert measured["peer"]["read_ms"] == {"p50": 3, "p95": 3}


def test_a_trace_ends_before_the_request_that_has_no_room(
    script: Callable[[str], Any],
) -> None:
    requests = [np.array(one) for one in ([1, 2], [1, 2, 3], [4], [5])]
    assert len(script("run_all").head_of(requests, 4)) == 3
    assert len(script("run_all").head_of(requests, 9)) == 4
