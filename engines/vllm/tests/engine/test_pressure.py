"""The engine with little memory, under resets and kills, with ranks, beside another."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scenes import unlike_others
from test_families import on_files
from vllm_lives import Lives, tokens

from kvdock_segments import DirectoryStore

KILLS = 20
APART = 24
"""How many prompts an engine has to itself before it is killed."""

SHARED = Path("/dev/shm")  # noqa: S108 - where vLLM's ranks on a CPU share memory

LITTLE = "512 KiB"
"""Host memory of 32 rows: each is 16 KiB for the Llama of these tests."""

pytestmark = pytest.mark.slow


def many(count: int, length: int = 100) -> list[list[int]]:
    """Return prompts of whole and part pages that share no prefix."""
    return [unlike_others(number, length) for number in range(1, count + 1)]


def loads(found: dict[str, Any]) -> dict[str, int]:
    """Return what was loaded, by pool and outcome."""
    return {one: n for one, n in found["pages"].items() if "/load/" in one}


def right_pages(root: Path) -> int:
    """Return how many pages a store has; none of them may be wrong."""
    reports = [
        DirectoryStore(root).verify(namespace.parent.name)
        for namespace in root.glob("*/namespace.json")
    ]
    assert reports
    assert all(report.ok for report in reports), reports
    return sum(report.good for report in reports)


def test_answers_are_right_with_memory_for_few_of_forty_prompts(
    lives: Lives, tmp_path: Path
) -> None:
    """Pages are evicted from host memory, and requests are preempted."""
    storage = on_files(tmp_path)
    # Prompts of three whole pages that begin their fifth block with the ninth token:
    # four of them are admitted to 20 blocks, one of which is vLLM's own.
    more: dict[str, Any] = {"prompts": many(40, 120), "new_tokens": 16, "rounds": 2}
    enough = {"max_model_len": 256}
    short = {**enough, "num_gpu_blocks_override": 20, "max_num_seqs": 8}
    little = {**storage, "host_memory": LITTLE}
    more["held"] = True
    found = lives.run(
        "many",
        [
            lives.phase("llama", "enough", storage, **more, engine=enough),
            lives.phase("llama", "little", little, **more, engine=short),
        ],
    )
    right = tokens(found["enough"]["rounds"][0])
    assert tokens(found["enough"]["rounds"][1]) == right
    assert [tokens(one) for one in found["little"]["rounds"]] == [right, right]
    assert found["little"]["preemptions"] > 0
    assert found["little"]["held"] == 0
    # Each round finds 120 pages in storage and has memory for 32.
    assert loads(found["little"])["kv/load/ok"] > 120
    assert set(loads(found["little"])) == {"kv/load/ok"}
    assert right_pages(tmp_path) >= 120


def test_answers_are_right_when_all_caches_are_reset_while_jobs_run(
    lives: Lives, tmp_path: Path
) -> None:
    storage = on_files(tmp_path)
    faults = {"kinds": ["delay"], "delay": "200 ms", "operations": ["get", "put"]}
    slow = {
        **storage,
        "wrap": [{"name": "faults", **faults}],
    }
    prompts = many(8)
    more: dict[str, Any] = {"prompts": prompts, "new_tokens": 16}
    half = {**more, "prompts": prompts[:4]}
    found = lives.run(
        "reset",
        [
            lives.phase("llama", "right", {**storage, "salt": "other"}, **more),
            lives.phase("llama", "half", storage, **half),
            lives.phase("llama", "reset", slow, **more, scene="reset", resets=3),
        ],
    )
    assert found["reset"]["tokens"] == tokens(found["right"]["rounds"][0])
    assert set(found["reset"]["resets"]) == {"load", "store"}
    assert loads(found["reset"])["kv/load/ok"]
    assert set(loads(found["reset"])) == {"kv/load/ok"}
    # Three pages of each prompt, under either salt.
    assert right_pages(tmp_path) >= 2 * 3 * len(prompts)


def test_two_engines_use_one_store_at_once(lives: Lives, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    # 36 pages, host memory for 16: a later round finds most of them in storage.
    storage = {**on_files(store), "host_memory": "256 KiB"}
    prompts = many(12)
    more: dict[str, Any] = {"new_tokens": 8, "rounds": 3, "drain": True}
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    phases = [
        lives.phase("llama", "a", storage, prompts=prompts, meet=[a, b], **more),
        lives.phase("llama", "b", storage, prompts=prompts[::-1], meet=[b, a], **more),
    ]
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(
            lambda phase: lives.run(f"two-{phase['name']}", [phase])[phase["name"]],
            phases,
        )
    right = tokens(one["rounds"][0])
    assert [tokens(answers) for answers in one["rounds"]] == [right] * 3
    assert [tokens(answers)[::-1] for answers in other["rounds"]] == [right] * 3
    for found in (one, other):
        assert found["pages"]["kv/store/ok"]
        assert loads(found)["kv/load/ok"] > 20
        assert set(loads(found)) == {"kv/load/ok"}
    assert right_pages(store) >= 36


def test_two_ranks_share_rows_and_restore_them(lives: Lives, tmp_path: Path) -> None:
    storage = on_files(tmp_path)
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    more: dict[str, Any] = {"engine": engine, "new_tokens": 16}
    before = set(SHARED.glob("vllm_dist_*"))
    try:
        found = lives.run(
            "ranks",
            [
                lives.phase("llama_2", "first", storage, **more),
                lives.phase("llama_2", "second", storage, **more),
                lives.phase("llama_2", "one", storage, new_tokens=16),
            ],
        )
    finally:
        # vLLM leaves the memory behind in which ranks on a CPU add their results.
        for path in set(SHARED.glob("vllm_dist_*")) - before:
            path.unlink()
    right = tokens(found["first"]["rounds"][0])
    assert tokens(found["second"]["rounds"][0]) == right
    assert loads(found["second"]) == {"kv/load/ok": 6}
    assert not loads(found["one"]), "pages of two ranks were found by one"
    # Two ranks have stored six pages, and the one has stored six of its own.
    assert right_pages(tmp_path) == 12


def test_answers_are_right_after_engines_were_killed_while_they_stored(
    lives: Lives, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    storage = on_files(store)
    chosen = random.Random(7)  # noqa: S311 - when to kill
    killed = [
        lives.phase(
            "llama",
            f"killed-{kill}",
            storage,
            scene="killed",
            first=1 + APART * kill,
            mark=str(tmp_path / "storing"),
            kill_after_s=chosen.uniform(0, 0.5),
        )
        for kill in range(KILLS)
    ]
    found = lives.run("killed", killed, timeout_s=1800)
    assert all(found[one["name"]]["killed"] for one in killed)
    assert right_pages(store) > KILLS
    # The first of each engine, and two of those that it was answering.
    numbers = {1 + APART * kill for kill in range(KILLS)}
    for one in found.values():
        # Numbers that differ by 500 are the same prompt.
        numbers |= {one["answering"] % 500, (one["answering"] + 3) % 500}
    prompts = [unlike_others(number, 300) for number in sorted(numbers)]
    more: dict[str, Any] = {"prompts": prompts, "new_tokens": 4}
    found = lives.run(
        "after-kills",
        [
            lives.phase("llama", "right", {**storage, "salt": "other"}, **more),
            lives.phase("llama", "after", storage, **more),
            lives.phase("llama", "again", storage, **more),
        ],
    )
    right = tokens(found["right"]["rounds"][0])
    assert tokens(found["after"]["rounds"][0]) == right
    assert loads(found["after"])["kv/load/ok"] > KILLS
    # A page that was being written is absent, and none is wrong.
    assert set(loads(found["after"])) <= {"kv/load/ok", "kv/load/absent"}
    assert tokens(found["again"]["rounds"][0]) == right
    assert loads(found["again"]) == {"kv/load/ok": 9 * len(prompts)}
    right_pages(store)
