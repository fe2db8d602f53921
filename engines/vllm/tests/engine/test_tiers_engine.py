"""vLLM's whole engine over tiers: one is wiped, killed, or never finished."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # types are not installed
import pytest
import vllm_models
from scenes import unlike_others
from vllm_lives import Lives, tokens

from kvdock.batch import Operation
from kvdock.journal import read_journal
from kvdock.wrappers.key_ring import add_key
from kvdock_s3.server import local_server
from kvdock_segments import DirectoryStore

pytestmark = pytest.mark.slow

FAMILIES = ("llama", "draft", "mamba2")
"""Together they have attention pools, a draft's layers and Mamba states."""


def sealing(folder: Path) -> dict[str, str]:
    """Make keys beside the tiers; return the wrapper that uses them."""
    keys, master = folder / "keys.json", folder / "master"
    master.write_bytes(bytes(range(32)))
    if not keys.exists():
        add_key(keys, master.read_bytes(), "default")
    return {"name": "seal", "keys": str(keys), "master_file": str(master)}


def over_tiers(
    folder: Path,
    journal: Path,
    far: dict[str, Any] | None = None,
    *,
    sealed: bool = False,
) -> dict[str, Any]:
    """Return the settings of a file store near, and of one far or what is given."""
    folder.chmod(0o700)
    wrap = [sealing(folder)] if sealed else []
    return {
        "tiers": [{"backend": "near", "promote": "always"}, "far"],
        "backends": {
            name: {
                "plugin": "file",
                "root": str(folder / name),
                "free_space": "1 MiB",
                "wrap": wrap,
            }
            for name in ("near", "far")
        }
        | ({"far": far} if far else {}),
        "core": {
            "deadlines": {
                "exists": "30 s",
                "get": "60 s",
                "put": "60 s",
                "close": "60 s",
            },
            "observers": ["journal"],
            "tiers": {"lookup": "30 s"},
        },
        "observers": {"journal": {"dir": str(journal)}},
    }


@contextmanager
def killable() -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Run the server of a far tier; yield its settings and what to kill."""
    before = {one.pid for one in psutil.Process().children()}
    with local_server({}) as (settings, _):
        own = [one for one in psutil.Process().children() if one.pid not in before]
        yield {"plugin": "s3", **settings}, [one.pid for one in own]


def loads(journal: Path) -> Counter[tuple[str, str]]:
    """Count the pages that requests have loaded, by tier and pool."""
    return Counter(
        (one.backend, one.pool)
        for one in read_journal(journal)
        if one.operation == Operation.GET and one.request
        for _, outcome in one.each()
        if outcome == "ok"
    )


def pages_of(root: Path) -> int:
    """Count the pages of a tier; none of them may be wrong."""
    reports = [
        DirectoryStore(root).verify(record.parent.name)
        for record in root.glob("*/namespace.json")
    ]
    assert all(report.ok for report in reports), reports
    return sum(report.good for report in reports)


@pytest.mark.parametrize(
    ("families", "sealed"), [(FAMILIES, False), (("llama",), True)]
)
def test_prompts_are_restored_from_far_and_then_from_near(
    families: tuple[str, ...], *, sealed: bool, lives: Lives, tmp_path: Path
) -> None:
    storage = over_tiers(tmp_path, tmp_path / "stored", sealed=sealed)
    stored = lives.run(
        "tiers-store",
        [lives.phase(one, one, storage, rounds=2, new_tokens=16) for one in families],
    )
    near, far = tmp_path / "near", tmp_path / "far"
    assert pages_of(near) == pages_of(far) > 0
    assert not loads(tmp_path / "stored")
    for gone, used in ((near, "far"), (far, "near")):
        shutil.rmtree(gone)
        journal = tmp_path / f"from-{used}"
        storage = over_tiers(tmp_path, journal, sealed=sealed)
        restored = lives.run(
            f"tiers-{used}",
            [lives.phase(one, one, storage, new_tokens=16) for one in families],
        )
        for family in families:
            warm = stored[family]["rounds"][1]
            assert tokens(restored[family]["rounds"][0]) == tokens(warm), family
        pools = {pool for one in families for pool in vllm_models.FAMILIES[one].pools}
        found = loads(journal)
        assert {pool for tier, pool in found if tier == used} == pools, found
        assert {tier for tier, _ in found} == {used}, found
    assert pages_of(near) > 0


def test_a_kill_during_copies_leaves_nothing_wrong(
    lives: Lives, tmp_path: Path
) -> None:
    storage = over_tiers(tmp_path, tmp_path / "journal")
    killed = lives.phase(
        "llama",
        "killed",
        storage,
        scene="killed",
        first=1,
        mark=str(tmp_path / "mark"),
        kill_after_s=0.2,
    )
    prompts = [unlike_others(number, 300) for number in range(1, 5)]
    more: dict[str, Any] = {"prompts": prompts, "new_tokens": 4}
    found = lives.run(
        "tiers-killed",
        [
            killed,
            lives.phase("llama", "right", {**storage, "salt": "other"}, **more),
            lives.phase("llama", "after", storage, **more),
        ],
    )
    assert found["killed"]["killed"]
    right, after = (tokens(found[one]["rounds"][0]) for one in ("right", "after"))
    assert right == after
    assert found["after"]["pages"].get("kv/load/ok", 0) > 0
    # What waited to be copied at the kill is near alone.
    assert pages_of(tmp_path / "near") >= pages_of(tmp_path / "far") > 0


def test_an_engine_whose_far_tier_is_killed_goes_on_with_the_near_one(
    lives: Lives, tmp_path: Path
) -> None:
    with killable() as (far, pids):
        journal = tmp_path / "journal"
        storage = over_tiers(tmp_path, journal, far)
        # After each round vLLM forgets all: what comes again comes from a tier.
        gone = {"kill": pids, "drain": True, "forget_host": True}
        salts = [None, None, "new", "new"]
        given = {"rounds": 4, "salts": salts, "new_tokens": 8, **gone}
        found = lives.run("far-killed", [lives.phase("llama", "one", storage, **given)])
    rounds = found["one"]["rounds"]
    assert len({str(tokens(one)) for one in rounds}) == 1
    cached = [sum(one["cached"] for one in some) for some in rounds]
    # Pages that were stored while the far tier was there, and after its end.
    assert not cached[0]
    assert cached[1] == cached[3] > 0 == cached[2]
    assert {tier for tier, _ in loads(journal)} == {"near"}
    put = Counter(
        one.backend
        for one in read_journal(journal)
        if one.operation == Operation.PUT
        for _, outcome in one.each()
        if outcome == "ok"
    )
    assert put["near"] > put["far"] > 0, put
    assert pages_of(tmp_path / "near") == put["near"]
