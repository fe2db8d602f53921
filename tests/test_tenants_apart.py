"""Tenants of one store find and load nothing of each other, whatever they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.batch import Outcome
from kvdock.config import CoreSettings, structure
from kvdock.pools import Part

PAGES, PAGE_BYTES, LOOKUPS = 500, 4096, 20_000
TENANTS = {name: {"salt": f"of {name}", "quota": "64 MiB"} for name in ("acme", "bell")}
SALTS = ("of acme", "of bell", "of no one", "")
NAMES = [f"{page:064x}" for page in range(PAGES)]


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[dict[str, Attachment]]:
    """An engine for each salt, with pages of its own under the same names."""
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0], page_tokens=16, anchor=True,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "file": {"root": tmp_path, "free_space": 0, "quota": "256 MiB"}
    }
    core = structure(CoreSettings, {"tenants": TENANTS}, where="test")
    found = {}
    with ExitStack() as opened:
        for number, salt in enumerate(SALTS):
            dock = Dock.load(require=["file"], only=["file"], settings=settings)
            plan = dock.plan([pool], Shard(), ["file"], settings=settings)
            memory = np.full((PAGES, PAGE_BYTES), number, np.uint8)
            regions = {"kv": Region.of(pool, Shard(), [memory], PAGES)}
            cache = Attachment.open(
                dock, plan, Namespace(model="m", salt=salt), regions, settings,
                core=core,
            )  # fmt: skip
            found[salt] = opened.enter_context(cache)
        yield found


@pytest.mark.slow
def test_no_look_up_or_load_of_a_tenant_finds_a_page_of_another_one(
    caches: dict[str, Attachment],
) -> None:
    where, asked = {"kv": np.arange(PAGES)}, 0
    # What one has stored: in its namespace, or for a request in it.
    everyone = [(salt, tenant) for salt in caches for tenant in ("default", *TENANTS)]
    for owner in everyone:
        salt, tenant = owner
        assert caches[salt].for_tenant(tenant).put(NAMES, where).pages == PAGES
        for stranger in everyone:
            salt, tenant = stranger
            calls = caches[salt].for_tenant(tenant)
            hits, loaded = calls.exists(NAMES), calls.get(NAMES, where).outcomes["kv"]
            if stranger == owner:
                assert hits.best == PAGES
                assert not loaded.any()
                continue
            assert (hits.best, hits.found["kv"]) == (0, 0)
            assert (loaded == Outcome.ABSENT).all()
            asked += PAGES
        salt, tenant = owner
        assert set(caches[salt].clear().values()) == {Outcome.OK}
        assert caches[salt].for_tenant(tenant).exists(NAMES).best == 0
    assert asked >= LOOKUPS
