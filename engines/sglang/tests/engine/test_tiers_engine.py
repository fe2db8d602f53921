"""SGLang's whole engine over tiers: one is wiped, killed, or never finished."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import lives
import psutil  # type: ignore[import-untyped]  # types are not installed
import pytest
import tiny_models
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from test_families import attached, config, hashes

from kvdock.batch import Operation
from kvdock.journal import read_journal
from kvdock.wrappers.key_ring import add_key
from kvdock_s3.server import local_server as object_server
from kvdock_segments.directory_store import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
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


def world_of(
    tmp_path: Path,
    model: str,
    far: dict[str, Any] | None = None,
    *,
    sealed: bool = False,
    **engine: Any,
) -> lives.World:
    """Return an engine over a near tier and a far one, with a journal."""
    tiny = tiny_models.MODELS[model]
    wrap = [sealing(tmp_path)] if sealed else []
    return lives.World(
        tiny=attrs.evolve(tiny, engine={**tiny.engine, **engine}),
        model=tiny_models.make(model, tmp_path),
        folder=tmp_path,
        storage={
            "tiers": [{"backend": "near", "promote": "always"}, "far"],
            "core": {"observers": ["journal"]},
            "observers": {"journal": {"dir": str(tmp_path / "journal")}},
            "backends": {
                "near": {
                    "plugin": "file",
                    "root": str(tmp_path / "near"),
                    "wrap": wrap,
                },
                "far": far
                or {"plugin": "file", "root": str(tmp_path / "far"), "wrap": wrap},
            },
        },
    )


def sealing(folder: Path) -> dict[str, str]:
    """Make keys beside the tiers; return the wrapper that uses them."""
    keys, master = folder / "keys.json", folder / "master"
    master.write_bytes(bytes(range(32)))
    add_key(keys, master.read_bytes(), "default")
    return {"name": "seal", "keys": str(keys), "master_file": str(master)}


DRAFTED = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}
"""A chain of one proposal a step: what the stand-in can verify."""


@pytest.mark.parametrize(
    ("model", "sidecar", "sealed"),
    [
        ("window", "swa", False),
        pytest.param("window", "swa", True, marks=pytest.mark.long),
        pytest.param("recurrent", "mamba", False, marks=pytest.mark.long),
        pytest.param("llama", "draft", False, marks=pytest.mark.long),
    ],
)
def test_prompts_are_restored_from_far_and_then_from_near(
    model: str, sidecar: str, *, sealed: bool, tmp_path: Path
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    drafted: dict[str, Any] = {}
    if sidecar == "draft":
        path = tiny_models.make(model, tmp_path / "of the draft")
        drafted = {**DRAFTED, "speculative_draft_model_path": str(path)}
    world = world_of(tmp_path, model, sealed=sealed, **drafted)

    begin: list[dict[str, Any]] = [{"prompts": lives.PROMPTS}]
    if world.tiny.turns:
        begin.append({"prompts": "next turn"})
    first, *later_turn = world.live("stores", begin)
    assert not any(one["cached"] for one in first)
    prompts = [one["prompt"] for one in later_turn[0]] if later_turn else lives.PROMPTS

    def restored(life: str) -> None:
        """Ask a new engine, and again under a salt, which no stored page has."""
        warm, cold = world.live(life, rounds_of(prompts, life))
        check_restored(warm, cold)

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


def rounds_of(prompts: list[list[int]], life: str) -> list[dict[str, Any]]:
    """Ask for prompts, and again under a salt, which no stored page has."""
    salted = {"cache_salt": f"cold {life}"}
    return [{"prompts": prompts}, {"prompts": prompts, "generate": salted}]


def check_restored(warm: list[dict[str, Any]], cold: list[dict[str, Any]]) -> None:
    """Check that prompts were restored, and answered as when they are computed."""
    assert all(one["cached"] for one in warm)
    assert not any(one["cached"] for one in cold)
    assert [one["tokens"] for one in warm] == [one["tokens"] for one in cold]


@contextmanager
def killable() -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Run the server of a far tier; yield its settings and what to kill."""
    before = {one.pid for one in psutil.Process().children()}
    with object_server({}) as (settings, _):
        own = [one for one in psutil.Process().children() if one.pid not in before]
        yield {"plugin": "s3", **settings}, [one.pid for one in own]


@pytest.mark.long
def test_an_engine_whose_far_tier_is_killed_goes_on_with_the_near_one(
    tmp_path: Path,
) -> None:
    others = [[(13 * n + 7) % 500 + 4 for n in range(120)]]
    with killable() as (far, pids):
        world = world_of(tmp_path, "llama", far)
        stored, warm, new, again, cold, *_ = world.live(
            "far killed",
            [
                {"prompts": lives.PROMPTS},
                {"prompts": lives.PROMPTS, "first": ["kill", *map(str, pids)]},
                {"prompts": others},
                {"prompts": others, "first": ["nothing"]},
                rounds_of([*lives.PROMPTS, *others], "far killed")[1],
            ],
        )
    assert not any(one["cached"] for one in [*stored, *new])
    check_restored([*warm, *again], cold)
    assert {tier for tier, _ in loads(tmp_path)} == {"near"}
    # Both were there before the kill.
    put = Counter(
        one.backend
        for one in read_journal(tmp_path / "journal")
        if one.operation == Operation.PUT
        for _, outcome in one.each()
        if outcome == "ok"
    )
    assert put["near"] > put["far"] > 0


@pytest.mark.long
def test_an_engine_killed_during_copies_leaves_nothing_wrong(tmp_path: Path) -> None:
    delays = {
        "name": "faults",
        "kinds": ["delay"],
        "delay": "1 s",
        "operations": ["put"],
    }
    slow = {"plugin": "file", "root": str(tmp_path / "far"), "wrap": [delays]}
    world = world_of(tmp_path, "window", slow)
    prompts = [
        [(seed * n + n * n + 3) % 500 + 4 for n in range(120)] for seed in range(3, 13)
    ]

    def copying() -> bool:
        """Return whether some pages were copied, and others wait."""
        near, far = (total(tmp_path / one) for one in ("near", "far"))
        return 0 < far < near and pages_of(tmp_path / "near").get("kv", 0) > 14

    world.live("killed", [{"prompts": prompts}], kill_when=copying)
    near, far = (total(tmp_path / one) for one in ("near", "far"))
    assert near > far > 0
    for tier in ("near", "far"):
        check_whole(tmp_path / tier)
    again = world_of(tmp_path, "window")
    warm, cold = again.live("after it", rounds_of(prompts[:1], "after it"))
    check_restored(warm, cold)
    for tier in ("near", "far"):
        check_whole(tmp_path / tier)


def total(root: Path) -> int:
    """Return how many pages a tier has."""
    return sum(pages_of(root).values()) if root.exists() else 0


def check_whole(root: Path) -> None:
    """Check that no page of a tier is wrong."""
    for record in root.glob("*/namespace.json"):
        report = DirectoryStore(root).verify(record.parent.name)
        assert report.ok, report


@pytest.mark.long
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
