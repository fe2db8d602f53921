"""The tier as vLLM's manager uses it, without an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_adapters import asked
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    ReqContext,
    TierFilter,
    TierMatcher,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_rigs import ROW, Rig, identity, open_rig, storage

from kvdock.errors import KvdockError
from kvdock_segments.directory_store import DirectoryStore
from kvdock_vllm.tier import KvdockTier


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = open_rig(storage(tmp_path / "store"))
    yield rig
    rig.tier.shutdown()


def fill(rig: Rig, rows: list[int], seed: int = 1) -> Any:
    data = np.random.default_rng(seed).integers(0, 256, (len(rows), ROW), np.uint8)
    rig.rows[rows] = data
    return data


def flip_every_page(folder: Path) -> None:
    """Change a byte in each 512 of what is stored."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size >= ROW:
            data = bytearray(path.read_bytes())
            for at in range(256, len(data), 512):
                data[at] ^= 0xFF
            path.write_bytes(data)


def test_rows_come_back_in_other_rows_and_for_another_process(
    rig: Rig, tmp_path: Path
) -> None:
    data = fill(rig, [0, 1, 2, 3])
    assert rig.store(rig.keys(), [0, 1, 2, 3]).success
    rig.tier.shutdown()
    other = open_rig(storage(tmp_path / "store"))
    assert other.lookup(other.keys()) == ["HIT"] * 4
    result = other.load(other.keys(), [40, 12, 30, 7])
    assert result.success
    assert (other.rows[[40, 12, 30, 7]] == data).all()
    other.tier.shutdown()
    rig.tier = open_rig(storage(tmp_path / "store")).tier


def test_groups_with_equal_hashes_are_pools_of_their_own(rig: Rig) -> None:
    fill(rig, [0])
    rig.store(rig.keys(count=1), [0])
    assert rig.lookup(rig.keys(count=1, group=2)) == ["MISS"]
    rig.finish_request()
    assert rig.lookup(rig.keys(count=1)) == ["HIT"]


def test_a_job_may_have_keys_of_several_groups(rig: Rig) -> None:
    data = fill(rig, [0, 1])
    keys = rig.keys(count=1) + rig.keys(count=1, group=2)
    assert rig.store(keys, [0, 1]).success
    assert rig.load(keys, [8, 9]).success
    assert (rig.rows[8] == data[0]).all()
    assert (rig.rows[9, :1000] == data[1, :1000]).all()


def test_bytes_that_a_group_does_not_own_are_neither_stored_nor_loaded(
    rig: Rig, tmp_path: Path
) -> None:
    """What lies beside a page in its row is another request's."""
    rig.rows[0] = np.frombuffer(b"another request's secret" * ROW, np.uint8)[:ROW]
    rig.rows[0, :1000] = 7
    rig.rows[1] = 99
    assert rig.store(rig.keys(count=1, group=2), [0]).success
    assert rig.load(rig.keys(count=1, group=2), [1]).success
    assert (rig.rows[1, :1000] == 7).all()
    assert (rig.rows[1, 1000:] == 99).all()
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes()


def test_each_generation_has_its_own_pages_and_no_answer_of_another(rig: Rig) -> None:
    tier, keys = rig.tier, rig.keys(count=1)

    def go_on(generation: str) -> None:
        tier.take(tier.next_generation(generation))
        tier.forget_lookups()

    old = fill(rig, [0])
    rig.store(keys, [0])
    assert rig.lookup(keys) == ["HIT"]
    go_on("7")
    # By the request that was told of them before.
    assert rig.lookup(keys) == ["MISS"]
    assert not rig.load(keys, [1]).success
    new = fill(rig, [2], seed=2)
    assert rig.store(keys, [2]).success
    go_on("")
    assert rig.load(keys, [3]).success
    go_on("7")
    assert rig.lookup(keys) == ["HIT"]
    assert rig.load(keys, [4]).success
    assert (rig.rows[3] == old[0]).all()
    assert (rig.rows[4] == new[0]).all()


def test_a_generation_that_cannot_be_opened_leaves_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig({**storage(tmp_path / "kv"), "enable_kv_events": True})
    tier, keys = rig.tier, rig.keys(count=1)

    def fails(*_: object) -> None:
        raise KvdockError("no room")

    monkeypatch.setattr("kvdock_vllm.tier.attach", fails)
    tier._adapters.stop()
    with pytest.raises(KvdockError, match="no room"):
        tier.next_generation("7")
    tier.forget_lookups()
    assert rig.lookup(keys) == ["MISS"]
    assert not rig.store(keys, [0]).success
    assert list(tier.take_events()) == []
    for _ in range(2):
        tier.shutdown()


def test_an_answer_that_comes_after_its_lookup_was_forgotten_does_not_count(
    rig: Rig,
) -> None:
    keys, context = rig.keys(count=1), ReqContext(req_id="r")
    fill(rig, [0])
    rig.store(keys, [0])
    assert rig.tier.lookup(keys[0], context).name == "RETRY"
    rig.tier.on_schedule_end(SimpleNamespace())  # it is asked now
    end_s = time.monotonic() + 60
    while rig.tier._lookups._pending_results.empty():
        assert time.monotonic() < end_s
        time.sleep(0.002)
    opened = rig.tier.next_generation("7")
    rig.tier.take(opened)
    rig.tier.forget_lookups()
    assert rig.lookup(keys) == ["MISS"]


def test_a_request_finds_a_page_that_was_stored_since_it_missed_it(rig: Rig) -> None:
    keys = rig.keys()
    assert rig.lookup(keys) == ["MISS"] * 4
    rig.store(keys[:3], [0, 1, 2])
    assert rig.lookup(keys) == ["HIT"] * 3 + ["MISS"]


def test_pages_of_one_adapter_are_not_those_of_another(
    rig: Rig, tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    adapters, adapter = rig.tier._adapters, asked(tmp_path)
    fill(rig, [0])
    rig.store(rig.keys(count=1), [0])
    adapters.begin("r", adapter)
    assert rig.lookup(rig.keys(count=1)) == ["MISS"]
    rig.store(rig.keys(count=1), [0])
    rig.finish_request()
    adapters.begin("r", adapter)
    assert rig.lookup(rig.keys(count=1)) == ["HIT"]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    assert not rig.store(rig.keys(first=1, count=1), [0]).success
    rig.finish_request()
    adapters.begin("r", adapter)
    assert rig.lookup(rig.keys(count=1)) == ["MISS"]


def test_a_request_whose_adapter_is_unknown_is_neither_stored_nor_found(
    rig: Rig,
) -> None:
    adapter = asked(Path("/nowhere"))
    rig.tier._adapters.begin("r", adapter)
    fill(rig, [0])
    assert not rig.store(rig.keys(count=1), [0]).success
    assert rig.lookup(rig.keys(count=1)) == ["MISS"]
    rig.finish_request()
    assert rig.lookup(rig.keys(count=1)) == ["MISS"]


def test_flipped_pages_fail_key_by_key_and_are_misses_until_they_are_stored_again(
    rig: Rig, tmp_path: Path
) -> None:
    data = fill(rig, [0, 1])
    rig.store(rig.keys(count=2), [0, 1])
    flip_every_page(tmp_path / "store")
    rig.store(rig.keys(first=2, count=1), [0])
    keys = rig.keys(count=3)
    assert rig.lookup(keys) == ["HIT"] * 3
    rig.rows[8:11] = 55
    result = rig.load(keys, [8, 9, 10])
    assert (result.success, result.successful_keys) == (False, keys[2:])
    assert not rig.rows[8:10].any(), "bytes of a wrong page are left in a row"
    assert rig.lookup(keys) == ["MISS", "MISS", "HIT"], "vLLM would try without end"
    rig.finish_request()
    assert rig.store(keys[:2], [0, 1]).success
    rig.finish_request()
    assert rig.lookup(keys) == ["HIT"] * 3
    assert rig.load(keys[:2], [8, 9]).success
    assert (rig.rows[8:10] == data).all()


def open_faulty(
    folder: Path, kind: str, operation: str, hang: str, **deadlines: str
) -> Rig:
    """Attach a tier whose calls of one operation hang."""
    given = storage(folder, deadlines={"close": "1 s", **deadlines})
    faults = {"kinds": [kind], "operations": [operation], "hang": hang}
    given["wrap"] = [{"name": "faults", **faults}]
    return open_rig(given)


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_job_that_hangs_ends_at_its_deadline(
    operation: str, rig: Rig, tmp_path: Path
) -> None:
    fill(rig, [0, 1])
    rig.store(rig.keys(count=2), [0, 1])
    faulty = open_faulty(
        tmp_path / "store",
        "hang",
        operation,
        "60 s",
        get="1 s",
        put="1 s",
    )
    began = time.monotonic()
    faulty.submit(faulty.keys(count=2), [8, 9], load=operation == "get")
    result = faulty.result()
    # 0.2 s is the promise; the rest is for a machine that others load.
    assert 1 <= time.monotonic() - began < 1 + 0.2 + 1
    assert not result.success
    assert not result.successful_keys
    faulty.tier.shutdown()


def test_late_bytes_find_no_row_that_was_given_back(rig: Rig, tmp_path: Path) -> None:
    fill(rig, [0, 1])
    rig.store(rig.keys(count=2), [0, 1])
    late = open_faulty(tmp_path / "store", "late", "get", "2 s", get="500 ms")
    assert not late.load(late.keys(count=2), [8, 9]).success
    late.rows[8:10] = 55
    assert late.tier._transfers.drain(30), "the late call has not ended"
    assert (late.rows[8:10] == 55).all()
    late.tier.shutdown()


def test_a_lookup_that_hangs_is_a_miss_at_its_deadline(
    rig: Rig, tmp_path: Path
) -> None:
    fill(rig, [0])
    rig.store(rig.keys(count=1), [0])
    faulty = open_faulty(tmp_path / "store", "hang", "exists", "60 s", exists="300 ms")
    began = time.monotonic()
    assert faulty.lookup(faulty.keys(count=1)) == ["MISS"]
    assert time.monotonic() - began < 2
    faulty.tier.shutdown()


def test_reset_waits_for_jobs_and_reports_them_all(rig: Rig) -> None:
    fill(rig, list(range(16)))
    for first in range(0, 16, 4):
        rows = list(range(first, first + 4))
        rig.submit(rig.keys(first=first), rows, load=False)
    rig.tier.drain_jobs()
    found = list(rig.tier.get_finished_jobs())
    assert [job.success for job in found] == [True] * 4
    assert not rig.tier.has_pending_work()


def test_what_became_of_pages_is_counted_once_and_as_it_was_declared(
    rig: Rig,
) -> None:
    rig.tier.get_stats()
    fill(rig, [0, 1])
    rig.store(rig.keys(count=2), [0, 1])
    rig.load(rig.keys(count=3), [8, 9, 10])
    stats: Any = rig.tier.get_stats()
    declared = KvdockTier.build_metric_definitions({})
    values = stats._values
    keys = {
        labels[1:4]: count for labels, count in values["vllm:kvdock_keys_total"].items()
    }
    assert keys == {
        ("kv", "put", "ok"): 2,
        ("kv", "get", "ok"): 2,
        ("kv", "get", "absent"): 1,
    }
    for name, series in values.items():
        for labels in series:
            assert len(labels) == len(declared[name].labelnames)
    assert rig.tier.get_stats() is None


def test_pages_that_vllm_serves_itself_are_touched_in_the_store(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[Any] = []
    pool = rig.tier.attached["kv"]
    monkeypatch.setattr(
        type(pool),
        "touch",
        lambda self, hashes: touched.append((self.pool.name, hashes)),
    )
    keys = rig.keys(count=2)
    rig.tier.touch(keys, ReqContext(req_id="r"))
    assert touched == [("kv", [key[:-4].hex() for key in keys])]


def test_stored_and_lost_pages_are_published_where_vllm_publishes_events(
    tmp_path: Path,
) -> None:
    given = {**storage(tmp_path / "store"), "enable_kv_events": True}
    rig = open_rig(given)
    fill(rig, [0, 1])
    keys = rig.keys(count=1) + rig.keys(count=1, group=2)
    assert rig.store(keys, [0, 1]).success
    stored = list(rig.tier.take_events())
    assert sorted(key for event in stored for key in event.keys) == sorted(keys)
    assert not [event for event in stored if event.removed]
    assert all(event.removal_expected for event in stored)
    assert {(event.medium, event.locality) for event in stored} == {
        (Medium.STORAGE, Locality.LOCAL)
    }
    flip_every_page(tmp_path / "store")
    assert not rig.load(keys, [8, 9]).success
    end_s = time.monotonic() + 30
    lost: list[Any] = []
    while len(lost) < len(keys) and time.monotonic() < end_s:
        for event in rig.tier.take_events():
            assert event.removed
            lost += event.keys
        time.sleep(0.01)
    assert sorted(lost) == sorted(keys)
    rig.tier.shutdown()


def near_and_far(folder: Path) -> dict[str, Any]:
    """Return settings of two stores, of which other hosts see the second one."""
    files = {name: storage(folder / name) for name in ("near", "far")}
    return {
        "core": files["near"]["core"],
        "host_memory": files["near"]["host_memory"],
        "backends": {
            name: {key: one[key] for key in ("plugin", "root", "free_space")}
            for name, one in files.items()
        },
        "tiers": ["near", {"backend": "far", "locality": "remote"}],
    }


def test_a_tier_that_other_hosts_see_is_not_asked_where_local_ones_are_wanted(
    tmp_path: Path,
) -> None:
    only_local = TierFilter((TierMatcher(locality=Locality.LOCAL),))
    for name, given, locality, source in (
        ("local", storage(tmp_path / "store"), Locality.LOCAL, CacheHitSource.DISK),
        (
            "remote",
            near_and_far(tmp_path),
            Locality.REMOTE,
            CacheHitSource.EXTERNAL_UNSPECIFIED,
        ),
    ):
        tier = open_rig(given).tier
        assert (tier.locality, tier.cache_hit_source) == (locality, source), name
        allowed = only_local.allows(tier.medium, tier.locality)
        assert allowed == (locality is Locality.LOCAL)
        tier.shutdown()


def test_a_page_of_several_tiers_is_published_once_until_the_last_has_lost_it(
    tmp_path: Path,
) -> None:
    rig = open_rig({**near_and_far(tmp_path), "enable_kv_events": True})
    fill(rig, [0, 1])
    keys = rig.keys(count=2)
    assert rig.store(keys, [0, 1]).success
    assert rig.tier.attached.wait_idle(60)
    stored = list(rig.tier.take_events())
    assert [(one.locality, one.removed) for one in stored] == [(Locality.LOCAL, False)]
    assert (stored[0].keys, stored[0].ownership) == (keys, None)
    assert stored[0].removal_expected
    # Wrong bytes near are deleted there; the page is loaded from far.
    flip_every_page(tmp_path / "near")
    assert rig.load(keys, [8, 9]).success
    moved = list(rig.tier.take_events())
    assert [(one.locality, one.removed, one.keys) for one in moved] == [
        (Locality.LOCAL, True, keys),
        (Locality.REMOTE, False, keys),
    ]
    rig.tier.shutdown()


def test_no_pages_are_published_unless_both_sides_want_it(tmp_path: Path) -> None:
    rig = open_rig(storage(tmp_path / "store"))
    fill(rig, [0])
    assert rig.store(rig.keys(count=1), [0]).success
    assert not list(rig.tier.take_events())
    rig.tier.shutdown()


def test_a_tier_without_its_connector_is_rejected() -> None:
    with pytest.raises(KvdockError, match="no identity"):
        KvdockTier(SimpleNamespace(), memoryview(bytearray(8)), "x")


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "other"},
        {"draft": "eagle x"},
        {"page_format": {"engine": "test", "cache_dtype": "fp8"}},
        {"page_format": {"engine": "test", "tp": 2}},
        {"model": "n"},
    ],
)
def test_pages_of_another_identity_are_misses(
    change: dict[str, Any], rig: Rig, tmp_path: Path
) -> None:
    fill(rig, [0])
    rig.store(rig.keys(count=1), [0])
    other = open_rig(storage(tmp_path / "store"), told=identity(**change))
    assert other.lookup(other.keys(count=1)) == ["MISS"]
    other.tier.shutdown()


def test_a_salt_keeps_tenants_apart(rig: Rig, tmp_path: Path) -> None:
    fill(rig, [0])
    rig.store(rig.keys(count=1), [0])
    other = open_rig({**storage(tmp_path / "store"), "salt": "mine"})
    assert other.lookup(other.keys(count=1)) == ["MISS"]
    other.tier.shutdown()


def test_a_route_of_a_pool_that_the_model_lacks_is_rejected(tmp_path: Path) -> None:
    given = {**storage(tmp_path / "store"), "routes": {"swa": "file"}}
    with pytest.raises(KvdockError, match="no pool 'swa'"):
        open_rig(given)


def test_pools_may_be_routed_to_several_backends(tmp_path: Path) -> None:
    given = storage(tmp_path / "store")
    given["routes"] = {"mamba": "file"}
    rig = open_rig(given)
    plan = rig.tier.attached.plan
    assert {route.pool.name for route in plan.accepted} == {"kv", "mamba"}
    rig.tier.shutdown()


def hinted(**payloads: dict[str, object]) -> ReqContext:
    """Return a request whose client sends hints over HTTP."""
    actions = [
        {
            "action_id": kind,
            "action_type": f"kvdock.{kind}",
            "action_version": "1",
            "payload": payload,
        }
        for kind, payload in payloads.items()
    ]
    given = {"protocol_version": "1", "message_id": "m", "actions": actions}
    return ReqContext(req_id="r", kv_transfer_params={"kvdock": given})


def test_pages_that_a_hinted_request_stores_have_its_times(
    rig: Rig, tmp_path: Path
) -> None:
    """The head is promised, the tail is not stored, and what lies between is plain."""
    context, keys = (
        hinted(retain={"keep_s": 600, "to_token": 32}, forget={"from_token": 48}),
        rig.keys(count=5),
    )
    for at, key in enumerate(keys, 1):
        context.set_offload_key_position(key, 16 * at)
    rig.tier.take_hints(context, keys, lambda _: [])
    fill(rig, [0, 1, 2, 3, 4])
    job = TransferJob(7, keys, np.arange(5), False, context)
    rig.tier.submit_store(job)
    result = rig.result()
    assert result.successful_keys == keys[:3]
    assert rig.lookup(keys) == ["HIT"] * 3 + ["MISS"] * 2
    store = DirectoryStore(tmp_path / "store")
    (name,) = store.namespaces()
    (pool,) = (one for one in store.survey(name).pools if one.pages)
    assert pool.promised_bytes // 8192 == 2
    shown = rig.tier.get_stats()
    assert "hint_pages_total" in str(vars(shown))


def test_hints_apply_to_what_is_stored_already(rig: Rig) -> None:
    keys = rig.keys()
    fill(rig, [0, 1, 2, 3])
    rig.store(keys, [0, 1, 2, 3])
    context = hinted(expire={"after_s": 0, "from_token": 33}, prefetch={"tokens": [1]})
    for at, key in enumerate(keys, 1):
        context.set_offload_key_position(key, 16 * at)
    asked: list[object] = []

    def hashes_of(tokens: object) -> list[bytes]:
        asked.append(tokens)
        return [b"ab"]

    rig.tier.take_hints(context, keys, hashes_of)
    end_s = time.monotonic() + 60
    while not asked and time.monotonic() < end_s:
        time.sleep(0.002)
    assert rig.lookup(keys) == ["HIT"] * 2 + ["MISS"] * 2
