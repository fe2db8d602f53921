"""(14) SGLang's whole engine over tiers: near is wiped, then far."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import lives
import pytest
import tiny_models

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


@pytest.mark.parametrize("model", ["window"])
def test_prompts_are_restored_from_far_and_then_from_near(
    model: str, tmp_path: Path
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

    def restored(life: str) -> None:
        """Ask a new engine, and again under a salt, which no stored page has."""
        salted = {"cache_salt": f"cold {life}"}
        rounds: list[dict[str, Any]] = [
            {"prompts": lives.PROMPTS},
            {"prompts": lives.PROMPTS, "generate": salted},
        ]
        warm, cold = world.live(life, rounds)
        assert all(one["cached"] for one in warm)
        assert not any(one["cached"] for one in cold)
        assert [one["tokens"] for one in warm] == [one["tokens"] for one in cold]

    (answers,) = world.live("stores", [{"prompts": lives.PROMPTS}])
    assert not any(one["cached"] for one in answers)
    stored = pages_of(near)
    assert pages_of(far) == stored
    assert {"kv", "swa"} <= stored.keys()
    assert loads(tmp_path) == {}
    shutil.rmtree(near)
    restored("from far")
    # Each page once for the engine, and once for its copy.
    by_tier = loads(tmp_path)
    assert set(by_tier) >= {("far", "kv"), ("far", "swa")}
    # What was loaded from far, and what the salted prompts stored.
    assert all(pages_of(near)[pool] > pages for pool, pages in stored.items())
    shutil.rmtree(far)
    restored("from near")
    later = loads(tmp_path)
    assert {one for one in later if later[one] > by_tier.get(one, 0)} == {
        ("near", "kv"),
        ("near", "swa"),
    }
