"""What a storage class says and does, and what becomes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hicache_standins as standins
import numpy as np
import pytest

from kvdock import AttachConfig, Batch, MemoryGate, Operation, Outcome
from kvdock.config import structure
from kvdock.errors import AttachError, SettingsError
from kvdock_hicache import plugin
from kvdock_hicache.plugin import kvdock_probe
from kvdock_hicache.settings import Form, HiCacheSettings
from kvdock_hicache.storage import FoundClass
from kvdock_hicache.store import HiCacheStore

NBYTES = 96


@pytest.fixture
def space(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    standins.SPACES.pop(str(tmp_path), None)


def settings(cls: str, space: str, **more: object) -> HiCacheSettings:
    extra: dict[str, object] = {"space": space}
    extra.update({k: more.pop(k) for k in ("fails", "room") if k in more})
    given = {"storage_class": cls, "extra_config": extra, "memory": "1 MiB", **more}
    return structure(HiCacheSettings, given, where="tests")


def opened(space: str, cls: type = standins.Shelf, **more: object) -> HiCacheStore:
    own = settings(f"hicache_standins:{cls.__name__}", space, **more)
    return HiCacheStore(AttachConfig(settings=own))


def batch(
    operation: Operation,
    memory: np.ndarray[Any, Any],
    keys: list[str] | None = None,
    **more: Any,
) -> Batch:
    names = keys or [f"space/{row:064x}.kv" for row in range(len(memory))]
    rows = [[memory.ctypes.data + row * memory.strides[0]] for row in range(len(names))]
    sizes = [[memory.shape[1]]] * len(names)
    if operation not in (Operation.PUT, Operation.GET):
        return Batch(operation, names, **more)
    return Batch(operation, names, np.array(rows), np.array(sizes), **more)


def filled(rows: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (rows, NBYTES), np.uint8)


def put(store: HiCacheStore, rows: int) -> np.ndarray[Any, Any]:
    data = filled(rows)
    outcomes = store.run(batch(Operation.PUT, data)).outcomes
    assert outcomes.tolist() == [Outcome.OK] * rows
    return data


def got(store: HiCacheStore, memory: np.ndarray[Any, Any], **more: Any) -> list[int]:
    found = store.run(batch(Operation.GET, memory, **more)).outcomes.tolist()
    return list(found)


def test_a_class_that_says_yes_and_writes_nothing_is_found_out(space: str) -> None:
    store = opened(space, fails="says yes and writes nothing")
    put(store, 3)
    memory = np.zeros((3, NBYTES), np.uint8)
    assert got(store, memory) == [Outcome.CORRUPT] * 3
    assert not memory.any()


@pytest.mark.parametrize("cls", [standins.Shelf, standins.Pointers])
def test_an_object_that_the_class_cuts_to_the_memory_is_not_served(
    space: str, cls: type
) -> None:
    store = opened(space, cls)
    put(store, 2)
    memory = np.zeros((2, NBYTES // 2), np.uint8)
    assert Outcome.OK not in got(store, memory)
    assert not memory.any()


def test_objects_that_changed_places_are_not_served(space: str) -> None:
    store = opened(space)
    put(store, 2)
    kept = standins.SPACES[space]
    one, two = kept
    kept[one], kept[two] = kept[two], kept[one]
    assert got(store, np.zeros((2, NBYTES), np.uint8)) == [Outcome.CORRUPT] * 2


def test_one_file_that_makes_the_class_raise_does_not_take_the_others(
    space: str,
) -> None:
    store = opened(space, fails="short reads")
    data = put(store, 3)
    kept = standins.SPACES[space]
    second = list(kept)[1]
    kept[second] = kept[second][:-1]
    memory = np.zeros((3, NBYTES), np.uint8)
    assert got(store, memory) == [Outcome.OK, Outcome.ERROR, Outcome.OK]
    assert (memory[::2] == data[::2]).all()


def test_a_batch_that_a_full_store_took_in_part_is_ok_in_part(space: str) -> None:
    store = opened(space, room=3 * (NBYTES + 32))
    outcomes = store.run(batch(Operation.PUT, filled(5))).outcomes.tolist()
    assert outcomes == [Outcome.OK] * 3 + [Outcome.REFUSED] * 2


def test_nothing_is_deleted_and_nothing_is_cleared(space: str) -> None:
    store = opened(space)
    data = put(store, 2)
    for operation in (Operation.DELETE, Operation.CLEAR):
        answer = plugin.kvdock_batch_io(store, batch(operation, data))
        assert answer.outcomes.tolist() == [Outcome.REFUSED] * 2
    assert len(standins.SPACES[space]) == 2


def test_a_closed_gate_keeps_the_engines_memory_as_it_is(space: str) -> None:
    store = opened(space)
    put(store, 2)
    gate = MemoryGate()
    assert gate.close(time.monotonic() + 5)
    memory = np.zeros((2, NBYTES), np.uint8)
    assert got(store, memory, gate=gate) == [Outcome.TIMEOUT] * 2
    assert not memory.any()
    other = batch(Operation.PUT, filled(1), keys=["other"], gate=gate)
    assert store.run(other).outcomes.tolist() == [Outcome.TIMEOUT]
    assert len(standins.SPACES[space]) == 2


def test_a_read_waits_for_another_no_longer_than_its_deadline(space: str) -> None:
    store = opened(space)
    put(store, 1)
    memory = np.zeros((1, NBYTES), np.uint8)
    with store._storage.reading:
        late = got(store, memory, deadline_s=time.monotonic() + 0.05)
    assert late == [Outcome.TIMEOUT]
    assert got(store, memory, deadline_s=time.monotonic() + 60) == [Outcome.OK]


def test_threads_read_one_after_another(space: str) -> None:
    # The stand-in raises where two of its reads meet.
    store = opened(space, batch_keys=1)
    put(store, 40)
    found: list[list[int]] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(got(store, np.zeros((40, NBYTES), np.uint8)))
        )
        for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [[Outcome.OK] * 40] * 4


def test_pools_share_the_object_and_the_last_one_closes_it(space: str) -> None:
    config = AttachConfig(settings=settings("hicache_standins:Shelf", space))
    one, two = HiCacheStore(config), HiCacheStore(config)
    shared = one._storage._object
    assert shared is two._storage._object
    one.close()
    assert not shared.closed
    two.close()
    assert shared.closed
    assert not config.shared


@pytest.mark.parametrize(
    ("cls", "asked", "form"),
    [
        ("Shelf", "auto", Form.GENERIC),
        ("Pointers", "auto", Form.V1),
        ("Pointers", "generic", Form.GENERIC),
        ("Transfers", "auto", Form.GENERIC),
        ("Transfers", "v2", Form.V2),
    ],
)
def test_the_form_is_what_a_class_defines(cls: str, asked: str, form: Form) -> None:
    found = FoundClass.of(settings(f"hicache_standins:{cls}", "", form=asked))
    assert found.form is form


@pytest.mark.parametrize(
    ("cls", "form", "said"),
    [
        ("hicache_standins:Shelf", "v1", "does not define batch_get_v1"),
        ("hicache_standins:HiCacheStorageConfig", "auto", "does not stand on"),
        ("hicache_standins:Nothing", "auto", "cannot be imported"),
        ("no.such.module:Shelf", "auto", "cannot be imported"),
        ("words", "auto", "cannot be imported"),
    ],
)
def test_a_class_that_cannot_serve_is_refused_by_name(
    cls: str, form: str, said: str
) -> None:
    own = settings(cls, "", form=form)
    with pytest.raises(AttachError, match=said):
        FoundClass.of(own)
    (finding,) = kvdock_probe(AttachConfig(settings=own))
    assert not finding.ok
    assert finding.hint


def test_a_class_that_cannot_be_built_is_named() -> None:
    own = structure(
        HiCacheSettings, {"storage_class": "hicache_standins:Shelf"}, where="tests"
    )
    with pytest.raises(AttachError, match="Shelf cannot be built: KeyError"):
        HiCacheStore(AttachConfig(settings=own))


@pytest.mark.parametrize("given", ["{", "[]", 3])
def test_options_that_are_not_a_table_are_refused(given: object) -> None:
    wrong = {"storage_class": "a:B", "extra_config": given}
    with pytest.raises(SettingsError, match="neither a table nor JSON"):
        structure(HiCacheSettings, wrong, where="tests")


def test_options_are_read_from_json() -> None:
    given = {"storage_class": "a:B", "extra_config": '{"x": 1}'}
    assert structure(HiCacheSettings, given, where="t").extra_config == {"x": 1}
