"""(5) SGLang's whole engine, end to end: write, end, restart, restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lives
import pytest
import tiny_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: tiny_models.make(name, root)


def numbers(answers: list[dict[str, Any]]) -> list[Any]:
    return [(one["tokens"], one["logprobs"]) for one in answers]


def pools_moved(world: lives.World, life: str, what: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in world.moves(life):
        if line["what"] == what:
            counts[line["pool"]] = counts.get(line["pool"], 0) + sum(line["ok"])
    return counts


POOLS = {
    "llama": {"kv"},
    "latent": {"kv"},
    "window": {"kv", "swa"},
    "recurrent": {"kv", "mamba"},
}


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_a_restarted_engine_answers_from_the_store_as_a_warm_one(
    name: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    tiny = tiny_models.MODELS[name]
    world = lives.World(
        tiny=tiny,
        model=models(name),
        folder=tmp_path,
        storage={"plugin": "file", "root": str(tmp_path / "store")},
    )
    again = "next turn" if tiny.turns else lives.PROMPTS
    _, warm = world.live("first", [lives.PROMPTS, again])
    assert all(one["cached"] > 0 for one in warm), "the warm run proves nothing"
    assert set(pools_moved(world, "first", "write")) == POOLS[name]

    prompts = [one["prompt"] for one in warm]
    (restored,) = world.live("second", [prompts])
    assert [one["cached"] for one in restored] == [one["cached"] for one in warm]
    assert numbers(restored) == numbers(warm)
    read = pools_moved(world, "second", "read")
    assert set(read) == POOLS[name]
    assert all(read.values())

    assert world.alter("first") > 0
    (altered,) = world.live("third", [prompts])
    assert [one["cached"] for one in altered] == [one["cached"] for one in warm]
    assert numbers(altered) != numbers(warm), "the engine did not use the pages"
