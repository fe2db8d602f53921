"""What sealed stores leave in files, logs and metrics: nothing in the clear."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.config import CoreSettings, structure
from kvdock.observers.metrics import Metrics
from kvdock.pools import Part
from kvdock.wrappers.key_ring import add_key, destroy_keys

if TYPE_CHECKING:
    import pytest

PAGES, PAGE_BYTES = 24, 4096
MASTER = bytes(range(200, 232))
SALTS = {"acme": "the-salt-of-acme", "": "a-salt-that-is-not-listed"}
"""Of a tenant that the operator lists, and of one that is not listed."""


def open_chain(
    root: Path, salt: str, memory: np.ndarray, observer: Metrics
) -> Attachment:
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0], page_tokens=16, anchor=True,
    )  # fmt: skip
    seal = {"name": "seal", "keys": root / "keys.json", "master_file": root / "master"}
    settings = {
        name: {
            "plugin": "file", "root": root / "store" / name, "free_space": 0,
            "quota": "8 MiB", "segment_bytes": "1 MiB", "wrap": [seal],
        }
        for name in ("near", "far")
    }  # fmt: skip
    core = structure(
        CoreSettings, {"tenants": {"acme": {"salt": SALTS["acme"]}}}, where="test"
    )
    dock = Dock.load(require=[*settings], only=[*settings], settings=settings)
    dock.add_observer("metrics", observer)
    rules = [{"backend": name} for name in settings]
    plan = dock.plan([pool], Shard(), tiers=rules)
    regions = {"kv": Region.of(pool, Shard(), [memory], PAGES)}
    namespace = Namespace(model="m", salt=salt)
    return Attachment.open(dock, plan, namespace, regions, settings, core=core)


def test_files_logs_and_metrics_hold_no_plain_page_name_salt_or_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "master").write_bytes(MASTER)
    keys = tmp_path / "keys.json"
    for tenant in ("default", "acme"):
        add_key(keys, MASTER, tenant)
    registry = CollectorRegistry()
    observer = Metrics(registry)
    right = np.random.default_rng(5).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)
    names = [f"{page:064x}" for page in range(PAGES)]
    for salt in SALTS.values():
        memory = right.copy()
        with open_chain(tmp_path, salt, memory, observer) as cache:
            assert cache.put(names, {"kv": np.arange(PAGES)}).pages == PAGES
            assert cache.wait_idle(60)
            memory[:] = 0
            assert cache.get(names, {"kv": np.arange(PAGES)}).pages == PAGES
            assert (memory == right).all()
            if salt == SALTS["acme"]:
                destroy_keys(keys, "acme")
    with open_chain(tmp_path, SALTS["acme"], right.copy(), observer) as cache:
        assert not cache.get(names, {"kv": np.arange(PAGES)}).pages
    files = [one for one in (tmp_path / "store").rglob("*") if one.is_file()]
    stored = [one.read_bytes() for one in files]
    assert sum(map(len, stored)) > 4 * right.size
    said = caplog.text.encode() + generate_latest(registry)
    assert b"the key was destroyed" in said
    where = b"\0".join(str(one).encode() for one in files)
    secrets = [
        *(salt.encode() for salt in SALTS.values()),
        MASTER,
        MASTER.hex().encode(),
    ]
    for text in (*stored, where, said):
        assert not [one for one in secrets if one in text]
    # Of pages not even sixteen bytes; a name may be a listed tenant's, in a log alone.
    pieces = {page[at : at + 16].tobytes() for page in right for at in (0, 2000, 4080)}
    for data in stored:
        assert not [one for one in (*pieces, b"acme") if one in data]
    assert b"acme" not in where
