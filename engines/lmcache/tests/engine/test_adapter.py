"""The adapter as LMCache's controllers use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed import api
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache_rigs import (
    PATIENT,
    SHAPE,
    FirstLevel,
    Rig,
    keys,
    layout,
    memory_object,
    on_files,
    values,
    wait,
)

from kvdock.errors import AttachError, SettingsError
from kvdock_lmcache.adapter import KvdockL2Adapter, KvdockL2AdapterConfig
from kvdock_lmcache.objects import POOL
from kvdock_s3.server import local_server


class Listener(L2AdapterListener):  # type: ignore[misc]  # LMCache is not typed
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


@pytest.fixture(scope="module")
def server() -> Iterator[Mapping[str, object]]:
    with local_server({}) as (given, _):
        yield given


@pytest.fixture(params=["file", "s3"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    given = on_files(tmp_path / "store")
    if request.param == "s3":
        found = request.getfixturevalue("server")
        own = {**found, "url": f"{found['url']}/{tmp_path.name}"}
        core = {"deadlines": PATIENT}
        given = {"plugin": "s3", **own, "revision": "r", "core": core}
    rig = Rig(given)
    yield rig
    rig.adapter.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(on_files(tmp_path / "store"))
    yield rig
    rig.adapter.close()


def test_objects_come_back_also_after_a_restart(rig: Rig) -> None:
    names = keys(3)
    result = rig.store(names, rig.first.objects([1, 2, 3]))
    assert result.is_successful()
    nbytes = torch.Size(SHAPE).numel() * 2
    assert result.bytes_transferred() == 3 * nbytes
    assert rig.lookup(keys(5)) == [0, 1, 2]
    rig.restart()
    assert rig.lookup(keys(5)) == [0, 1, 2]
    memory = rig.first.objects([0, 0, 0, 9])
    assert rig.load(keys(4), memory) == [0, 1, 2]
    assert values(memory) == [1, 2, 3, 9]


def test_objects_are_loaded_in_any_order_and_only_those_that_are_there(
    rig: Rig,
) -> None:
    rig.store(keys(4), rig.first.objects([1, 2, 3, 4]))
    names = keys(6)
    names = [names[5], names[2], names[0], names[4]]
    memory = rig.first.objects([0] * 4)
    assert rig.load(names, memory) == [1, 2]
    assert values(memory) == [0, 3, 1, 0]


def test_an_object_that_is_there_is_stored_once(rig: Rig) -> None:
    listener = Listener()
    rig.adapter.register_listener(listener)
    objects = rig.first.objects([1, 2])
    nbytes = objects[0].get_size()
    rig.store(keys(1), objects[:1])
    result = rig.store(keys(2), objects)
    assert (result.is_successful(), result.bytes_transferred()) == (True, nbytes)
    assert [size for _, size in listener.stored] == [nbytes] * 2
    assert rig.adapter.get_usage().total_bytes_used == 2 * nbytes
    rig.load(keys(2), rig.first.objects([0, 0]))
    assert listener.accessed == keys(2)


def test_deleted_objects_are_gone_and_listeners_hear_of_those_alone(rig: Rig) -> None:
    listener = Listener()
    rig.adapter.register_listener(listener)
    rig.store(keys(3), rig.first.objects([1, 2, 3]))
    rig.adapter.delete(keys(5)[1:])
    assert listener.deleted == keys(3)[1:]
    assert rig.lookup(keys(3)) == [0]
    one = rig.first.object().get_size()
    assert rig.adapter.get_usage().total_bytes_used == one


def test_a_new_process_finds_nothing_of_what_it_deletes(rig: Rig) -> None:
    """It learns what the objects look like when it stores, loads or looks them up."""
    rig.store(keys(3), rig.first.objects([1, 2, 3]))
    rig.restart()
    rig.adapter.delete(keys(3)[1:])
    assert rig.lookup(keys(3)) == [0]
    rig.restart()
    assert rig.lookup(keys(3)) == [0]
    # What is stored afterwards stays.
    rig.store(keys(3), rig.first.objects([4, 5, 6]))
    assert rig.lookup(keys(3)) == [0, 1, 2]


def test_the_quota_is_the_capacity_that_lmcache_evicts_by(tmp_path: Path) -> None:
    rig = Rig(on_files(tmp_path / "store", quota="64 MiB"))
    rig.store(keys(2), rig.first.objects([1, 2]))
    usage = rig.adapter.get_usage()
    assert rig.adapter.supports_global_eviction
    assert usage.total_capacity_bytes == 64 << 20
    assert usage.usage_fraction == usage.total_bytes_used / (64 << 20) > 0
    rig.adapter.close()


@pytest.mark.parametrize(
    "other",
    [
        {"kv_rank": 0x02000200},
        {"object_group_id": 1},
        {"cache_salt": "tenant"},
        {"model_name": "org/other"},
    ],
)
def test_what_a_key_says_keeps_objects_apart(files: Rig, other: dict[str, Any]) -> None:
    files.store(keys(1), files.first.objects([1]))
    strange = keys(1, **other)
    assert files.lookup(strange, {0: layout()[0], 1: layout()[0]}) == []
    assert files.load(strange, files.first.objects([0])) == []
    files.store(strange, files.first.objects([2]))
    mine, theirs = files.first.objects([0]), files.first.objects([0])
    assert files.load(keys(1), mine) == [0]
    assert files.load(strange, theirs) == [0]
    assert values(mine + theirs) == [1, 2]


def test_salts_and_hashes_cannot_be_mistaken_for_each_other(files: Rig) -> None:
    one = keys(1, chunk_hash=b"ab", cache_salt="c")
    two = keys(1, chunk_hash=b"a", cache_salt="bc")
    files.store(one, files.first.objects([1]))
    assert files.lookup(two) == []


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(SHAPE, torch.float16), ((2, 4, 32, 32), torch.bfloat16)],
)
def test_tensors_of_another_type_or_shape_are_a_miss(
    files: Rig, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Each has as many bytes, and LMCache's key does not tell them apart."""
    files.store(keys(1), files.first.objects([1]))
    files.restart()
    assert files.lookup(keys(1), layout(shape, dtype)) == []
    memory = files.first.object(0, shape, dtype)
    assert files.load(keys(1), [memory]) == []
    assert values([memory]) == [0]
    assert files.lookup(keys(1), {}) == [], "and nothing is assumed"


@pytest.mark.parametrize("setting", ["revision", "lora", "page_format", "salt"])
def test_what_lmcache_does_not_know_is_told_by_the_settings(
    files: Rig, setting: str
) -> None:
    files.store(keys(1), files.first.objects([1]))
    files.settings[setting] = "another"
    files.restart()
    assert files.lookup(keys(1)) == []


def test_a_lookup_without_a_layout_means_the_objects_seen_last(files: Rig) -> None:
    files.store(keys(1), files.first.objects([1]))
    placeholder = {0: api.MemoryLayoutDesc(shapes=[], dtypes=[])}
    assert files.lookup(keys(1), placeholder) == [0]


def test_wrong_bytes_are_a_miss(files: Rig, tmp_path: Path) -> None:
    files.store(keys(1), files.first.objects([1]))
    files.adapter.close()
    stored = max(
        (one for one in tmp_path.rglob("*") if one.is_file()),
        key=lambda one: one.stat().st_size,
    )
    data = stored.read_bytes()
    at = data.index(b"\x01" * 4096) + 1000
    stored.write_bytes(data[:at] + b"\x02" + data[at + 1 :])
    files.restart()
    memory = files.first.objects([0])
    assert files.load(keys(1), memory) == []


@pytest.mark.parametrize("start", [(2 << 20) + 64, 4 << 20, (4 << 20) - 4096])
def test_an_object_elsewhere_fails_its_task_and_no_other(
    files: Rig, start: int
) -> None:
    """Off the grid, behind the first level, and half behind it."""
    memory = torch.zeros(5 << 20, dtype=torch.uint8)
    files.adapter.close()
    files.first = FirstLevel(memory[: 4 << 20])
    files.__attrs_post_init__()
    raw = memory[start : start + 16384]
    strange = memory_object(raw, 0, SHAPE, torch.bfloat16)
    mine = files.first.objects([5])
    assert not files.store(keys(2), [strange, *mine]).is_successful()
    assert files.lookup(keys(2)) == [1]
    assert files.load(keys(2), [strange, *mine]) == [1]


def test_tasks_of_many_threads_each_have_their_own_result(files: Rig) -> None:
    rounds = 20
    objects = [files.first.objects([at + 1]) for at in range(rounds)]
    results: dict[int, Any] = {}
    lock = threading.Lock()

    def submit(at: int) -> None:
        number = files.adapter.submit_store_task(keys(1, first=at), objects[at])
        with lock:
            results[number] = at

    threads = [threading.Thread(target=submit, args=(at,)) for at in range(rounds)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    ended: dict[int, Any] = {}
    while len(ended) < rounds:
        wait(files.adapter.get_store_event_fd())
        ended |= files.adapter.pop_completed_store_tasks()
    assert ended.keys() == results.keys()
    assert all(one.is_successful() for one in ended.values())
    assert files.lookup(keys(rounds)) == [*range(rounds)]


def test_signals_are_three_descriptors_that_end_with_the_adapter(files: Rig) -> None:
    adapter = files.adapter
    signals = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(signals) == 3
    assert adapter.query_load_result(99) is None
    assert adapter.pop_completed_store_tasks() == {}
    adapter.submit_unlock(keys(1))
    assert adapter.report_status()["is_healthy"]


def test_a_load_that_hangs_ends_at_its_deadline_and_leaves_the_memory_alone(
    files: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.settings["core"] = {"deadlines": {**PATIENT, "get": "200 ms"}}
    files.restart()
    files.store(keys(1), files.first.objects([1]))
    (cache,) = files.adapter._attached.values()
    store: Any = cache[POOL].handle
    release, late = threading.Event(), threading.Event()
    run = type(store).run

    def hang(self: Any, batch: Any) -> Any:
        release.wait(60)
        try:
            return run(self, batch)
        finally:
            late.set()

    monkeypatch.setattr(type(store), "run", hang)
    memory = files.first.objects([0])
    assert files.load(keys(1), memory) == []
    memory[0].raw_data[:] = 7  # LMCache has given it another use
    release.set()
    assert late.wait(60)
    assert values(memory) == [7]


def test_memory_on_a_device_and_wrong_settings_are_refused_by_name(
    tmp_path: Path,
) -> None:
    config = KvdockL2AdapterConfig.from_dict(on_files(tmp_path / "store"))
    with pytest.raises(AttachError, match="no memory on the host"):
        KvdockL2Adapter(config)
    with pytest.raises(SettingsError, match="revision"):
        KvdockL2AdapterConfig.from_dict({"plugin": "file", "root": str(tmp_path)})
    assert "revision" in KvdockL2AdapterConfig.help()


def test_a_first_level_smaller_than_an_object_takes_nothing(tmp_path: Path) -> None:
    rig = Rig(on_files(tmp_path / "store"), FirstLevel(torch.zeros(8192).byte()))
    assert rig.lookup(keys(1)) == []
    assert not rig.adapter._attached
    rig.adapter.close()


@pytest.mark.skipif(
    not hasattr(api, "MemoryTags"), reason="this LMCache asks for no tags"
)
def test_tags_say_whether_other_hosts_share_the_store(rig: Rig) -> None:
    near = rig.settings["plugin"] == "file"
    where = api.MemoryResidency
    assert rig.adapter.get_memory_tags().residency is (
        where.LOCAL if near else where.REMOTE
    )
