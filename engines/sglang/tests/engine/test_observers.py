"""Observers of the core, around what SGLang stores and loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import test_families as families
import zoo
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from pathlib import Path

METRICS = {"core": {"observers": ["metrics"]}}


def value(name: str, **labels: str) -> float:
    """Return the sum of a metric's series with these labels, of all models."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def restored() -> dict[str, float]:
    """What the counters of restored prefixes say, of the whole process."""
    pools = ("kv", "mamba", "draft")
    return {
        "prefix": value("kvdock_restored_prefix_pages_total"),
        "with draft": value("kvdock_restored_draft_pages_total"),
        **{name: value("kvdock_restored_pages_total", pool=name) for name in pools},
    }


def test_what_is_stored_and_restored_is_counted(tmp_path: Path) -> None:
    pools: dict[str, Any] = {"kv": zoo.mha_host(), "mamba": zoo.mamba_host()}
    draft = zoo.mha_host(layers=1)
    keys = families.hashes(3)
    cfg = families.config(tmp_path, extra=METRICS)
    stored = {
        "backend": "file",
        "pool": "kv",
        "operation": "put",
        "outcome": "ok",
    }
    before = value("kvdock_keys_total", **stored), restored()
    with families.attached(cfg, pools, {"draft": draft}) as storage:
        drafts = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0, 1]), keys=keys[:2])
        states = PoolTransfer(
            PoolName.MAMBA,
            zoo.slots(pools["mamba"], [4]),
            keys=keys[2:],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        storage.batch_set_v2([drafts])
        storage.batch_set_v2([states])
        storage.batch_set_v1(keys, zoo.slots(pools["kv"], [0, 1, 2]))
        assert restored() == before[1]
        # As the engine loads: the target, what follows it, and the states.
        storage.batch_get_v1(keys, zoo.slots(pools["kv"], [5, 6, 7]))
        three = zoo.slots(draft, [0, 1, 2])
        storage.batch_get_v2([PoolTransfer(PoolName.DRAFT, three, keys=keys)])
        storage.batch_get_v2([states])
    assert value("kvdock_keys_total", **stored) - before[0] == 3
    grown = {name: now - before[1][name] for name, now in restored().items()}
    assert grown == {"prefix": 3, "with draft": 2, "kv": 3, "mamba": 1, "draft": 2}


def test_a_page_that_is_missing_ends_what_counts_as_restored(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    keys = families.hashes(3)
    before = restored()
    cfg = families.config(tmp_path, extra=METRICS)
    with families.attached(cfg, {"kv": pool}) as storage:
        some = [keys[0], keys[2]]
        storage.batch_set_v1(some, zoo.slots(pool, [0, 2]))
        got = storage.batch_get_v1(keys, zoo.slots(pool, [5, 6, 7]))
        assert got == [True, False, True]
    assert restored()["prefix"] - before["prefix"] == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"core": {"observers": ["metrisc"]}}, "no observer 'metrisc'.*'metrics'"),
        ({"observers": {"metrics": {}}}, "'metrics', which is not switched on"),
        (
            {**METRICS, "observers": {"metrisc": {}}},
            "'metrisc', which is not switched on.*'metrics'",
        ),
        ({**METRICS, "observers": {"metrics": {"port": 1}}}, "'port'"),
    ],
)
def test_observers_that_would_do_nothing_stop_the_start(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    cfg = families.config(tmp_path, extra=extra)
    with (
        pytest.raises(KvdockError, match=message),
        families.attached(cfg, {"kv": zoo.mha_host()}),
    ):
        pass
