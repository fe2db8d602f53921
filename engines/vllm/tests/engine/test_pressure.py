"""The engine with little memory, under resets and kills, and beside another one."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scenes import unlike_others
from test_families import on_files
from vllm_lives import Lives, tokens

from kvdock.segments import verify_namespace

KILLS = 20
APART = 20
"""How many prompts an engine has to itself before it is killed."""

SHARED = Path("/dev/shm")  # noqa: S108 - where vLLM puts its host memory

pytestmark = pytest.mark.slow


def many(count: int) -> list[list[int]]:
    """Return prompts of three pages that share no prefix."""
    return [unlike_others(number, 100) for number in range(1, count + 1)]


def loads(found: dict[str, Any]) -> dict[str, int]:
    """Return what was loaded, by pool and outcome."""
    return {one: n for one, n in found["pages"].items() if "/load/" in one}


def test_answers_are_right_with_memory_for_few_of_forty_prompts(
    lives: Lives, tmp_path: Path
) -> None:
    """Pages are evicted from host memory, and requests are preempted."""
    storage = on_files(tmp_path)
    # 32 rows of 16 KiB, and 20 blocks on the device, of which a request needs 5.
    little = {**storage, "host_memory": "512 KiB"}
    engine = {"num_gpu_blocks_override": 20, "max_num_seqs": 8}
    more: dict[str, Any] = {"prompts": many(40), "new_tokens": 48, "rounds": 2}
    found = lives.run(
        "many",
        [
            lives.phase("llama", "enough", storage, **more),
            lives.phase("llama", "little", little, **more, engine=engine),
        ],
    )
    right = tokens(found["enough"]["rounds"][1])
    assert [tokens(one) for one in found["little"]["rounds"]] == [right, right]
    assert found["little"]["preemptions"] > 0
    # Each prompt has three pages; the second round finds them in storage again.
    assert loads(found["little"]).get("kv/load/ok", 0) > 150
    assert set(loads(found["little"])) == {"kv/load/ok"}


def test_answers_are_right_when_all_caches_are_reset_while_jobs_run(
    lives: Lives, tmp_path: Path
) -> None:
    storage = on_files(tmp_path)
    faults = {"kinds": ["delay"], "delay": "200 ms", "operations": ["get", "put"]}
    slow = {
        **storage,
        "core": {"observers": ["faults"]},
        "observers": {"faults": faults},
    }
    prompts = many(8)
    more: dict[str, Any] = {"prompts": prompts, "new_tokens": 16}
    found = lives.run(
        "reset",
        [
            lives.phase("llama", "right", {**storage, "salt": "other"}, **more),
            lives.phase("llama", "half", storage, **{**more, "prompts": prompts[:4]}),
            lives.phase("llama", "reset", slow, **more, scene="reset", resets=4),
        ],
    )
    assert found["reset"]["tokens"] == tokens(found["right"]["rounds"][0])
    assert set(found["reset"]["resets"]) == {"load", "store"}


def test_two_engines_use_one_store_at_once(lives: Lives, tmp_path: Path) -> None:
    storage = on_files(tmp_path)
    more: dict[str, Any] = {"prompts": many(12), "new_tokens": 8, "rounds": 3}
    phases = [
        lives.phase("llama", name, storage, **more, drain=True) for name in ("a", "b")
    ]
    with ThreadPoolExecutor(2) as threads:
        both = list(
            threads.map(lambda one: lives.run(f"two-{one['name']}", [one]), phases)
        )
    right = tokens(both[0]["a"]["rounds"][0])
    for found in (both[0]["a"], both[1]["b"]):
        assert [tokens(answers) for answers in found["rounds"]] == [right] * 3
        assert found["pages"]["kv/store/ok"]
        assert set(loads(found)) <= {"kv/load/ok"}
    (namespace,) = tmp_path.glob("*/namespace.json")
    report = verify_namespace(tmp_path, namespace.parent.name)
    assert report.good >= 36
    assert report.ok


def test_two_ranks_share_rows_and_restore_them(lives: Lives, tmp_path: Path) -> None:
    storage = on_files(tmp_path)
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    more: dict[str, Any] = {"engine": engine, "new_tokens": 16}
    found = lives.run(
        "ranks",
        [
            lives.phase("llama_2", "first", storage, **more),
            lives.phase("llama_2", "second", storage, **more),
            lives.phase("llama_2", "one", storage, new_tokens=16),
        ],
    )
    right = tokens(found["first"]["rounds"][0])
    assert tokens(found["second"]["rounds"][0]) == right
    assert loads(found["second"]) == {"kv/load/ok": 6}
    assert not loads(found["one"]), "pages of two ranks were found by one"


def test_a_store_is_whole_after_engines_were_killed_while_they_stored(
    lives: Lives, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    storage = on_files(store)
    chosen = random.Random(7)  # noqa: S311 - when to kill
    before = set(SHARED.glob("vllm_offload_*"))
    killed = [
        lives.phase(
            "llama",
            f"killed-{kill}",
            storage,
            scene="killed",
            first=1 + APART * kill,
            marker=str(tmp_path / "storing"),
            kill_after_s=chosen.uniform(0, 0.5),
        )
        for kill in range(KILLS)
    ]
    prompts = [unlike_others(1 + APART * kill, 300) for kill in range(KILLS)]
    more: dict[str, Any] = {"prompts": prompts, "new_tokens": 4}
    try:
        found = lives.run(
            "killed",
            [
                *killed,
                lives.phase("llama", "right", {**storage, "salt": "other"}, **more),
                lives.phase("llama", "after", storage, **more),
                lives.phase("llama", "again", storage, **more),
            ],
            timeout_s=1800,
        )
    finally:
        left = set(SHARED.glob("vllm_offload_*")) - before
        for path in left:
            path.unlink()
    # What a killed engine leaves is what the doctor names.
    assert len(left) == KILLS
    assert all(found[one["name"]]["killed"] for one in killed)
    right = tokens(found["right"]["rounds"][0])
    assert tokens(found["after"]["rounds"][0]) == right
    assert loads(found["after"]).get("kv/load/ok", 0) > KILLS
    # A page that was being written is absent, and none is wrong.
    assert set(loads(found["after"])) <= {"kv/load/ok", "kv/load/absent"}
    assert tokens(found["again"]["rounds"][0]) == right
    assert loads(found["again"]) == {"kv/load/ok": 9 * len(prompts)}
