"""(14) SGLang's whole engine over tiers: near is wiped, then far."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import lives
import pytest
import tiny_models
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from test_families import attached, config, hashes

from kvdock.batch import Operation
from kvdock.journal import read_journal
from kvdock_segments.directory_store import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def pages_of(root: Path) -> dict[str, int]:
    """Count what a tier has of each pool."""
    store = DirectoryStore(root)
    return {
        pool.pool: pool.pages
        for namespace in store.namespaces()
        for pool in store.survey(namespace).pools
    }


def loads(folder: Path) -> Counter[tuple[str, str]]:
    """Count the pages that requests have loaded, by tier and pool."""
    return Counter(
        (one.backend, one.pool)
        for one in read_journal(folder / "journal")
        if one.operation == Operation.GET and one.request
        for _, outcome in one.each()
        if outcome == "ok"
    )


@pytest.mark.parametrize(
    ("model", "sidecar"), [("window", "swa"), ("recurrent", "mamba")]
)
def test_prompts_are_restored_from_far_and_then_from_near(
    model: str, sidecar: str, tmp_path: Path
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    tiny = tiny_models.MODELS[model]
    world = lives.World(
        tiny=tiny,
        model=tiny_models.make(model, tmp_path),
        folder=tmp_path,
        storage={
            "tiers": [{"backend": "near", "promote": "always"}, "far"],
            "core": {"observers": ["journal"]},
            "observers": {"journal": {"dir": str(tmp_path / "journal")}},
            "backends": {
                "near": {"plugin": "file", "root": str(near)},
                "far": {"plugin": "file", "root": str(far)},
            },
        },
    )

    begin: list[dict[str, Any]] = [{"prompts": lives.PROMPTS}]
    if tiny.turns:
        begin.append({"prompts": "next turn"})
    first, *later_turn = world.live("stores", begin)
    assert not any(one["cached"] for one in first)
    prompts = [one["prompt"] for one in later_turn[0]] if later_turn else lives.PROMPTS

    def restored(life: str) -> None:
        """Ask a new engine, and again under a salt, which no stored page has."""
        salted = {"cache_salt": f"cold {life}"}
        rounds: list[dict[str, Any]] = [
            {"prompts": prompts},
            {"prompts": prompts, "generate": salted},
        ]
        warm, cold = world.live(life, rounds)
        assert all(one["cached"] for one in warm)
        assert not any(one["cached"] for one in cold)
        assert [one["tokens"] for one in warm] == [one["tokens"] for one in cold]

    stored = pages_of(near)
    assert pages_of(far) == stored
    assert {"kv", sidecar} <= stored.keys()
    assert loads(tmp_path) == {}
    shutil.rmtree(near)
    restored("from far")
    # Each page once for the engine, and once for its copy.
    by_tier = loads(tmp_path)
    assert set(by_tier) >= {("far", "kv"), ("far", sidecar)}
    # What was loaded from far, and what the salted prompts stored.
    assert all(pages_of(near)[pool] > pages for pool, pages in stored.items())
    shutil.rmtree(far)
    restored("from near")
    later = loads(tmp_path)
    assert {one for one in later if later[one] > by_tier.get(one, 0)} == {
        ("near", "kv"),
        ("near", sidecar),
    }


def test_drafts_come_from_far_where_near_was_wiped(tmp_path: Path) -> None:
    storage = {
        "tiers": ["near", "far"],
        "backends": {
            name: {"plugin": "file", "root": str(tmp_path / name)}
            for name in ("near", "far")
        },
    }
    given = config(tmp_path, extra=storage)
    for alone in ("plugin", "root"):
        del given.extra_config[alone]
    keys = hashes(3)
    target, draft = zoo.mha_host(), zoo.mha_host(layers=1)
    zoo.fill(draft, 3)
    expected = [zoo.page(draft, number).clone() for number in range(3)]
    move = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0, 1, 2]), keys=keys)
    with attached(given, {"kv": target}, {"draft": draft}) as cache:
        assert list(cache.batch_set_v2([move])["draft"]) == [True] * 3
    for tier in ("near", "far"):
        assert pages_of(tmp_path / tier)["draft"] == 3
    shutil.rmtree(tmp_path / "near")
    zoo.fill(draft, 9)
    with attached(given, {"kv": target}, {"draft": draft}) as cache:
        assert list(cache.batch_get_v2([move])["draft"]) == [True] * 3
    assert all(
        torch.equal(zoo.page(draft, number), page)
        for number, page in enumerate(expected)
    )
