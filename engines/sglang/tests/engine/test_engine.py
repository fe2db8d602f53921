"""(5) SGLang's whole engine, end to end: write, end, restart, restore."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs
import lives
import pytest
import tiny_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

POOLS = {
    "llama": {"kv"},
    "latent": {"kv"},
    "window": {"kv", "swa"},
    "recurrent": {"kv", "mamba"},
}


@attrs.frozen
class Story:
    """Two lives of one model's engine over one store.

    Args:
        world: Where they took place.
        cold: The first answers, computed.
        warm: The same engine's answers from its own memory.
        restored: Answers of the second engine, from the store.
        altered: Its answers after every page got other numbers.
        damaged: Its answers after bytes were flipped on the disk.
    """

    world: lives.World
    cold: list[dict[str, Any]]
    warm: list[dict[str, Any]]
    restored: list[dict[str, Any]]
    altered: list[dict[str, Any]]
    damaged: list[dict[str, Any]]


def tell(name: str, model: Path, folder: Path) -> Story:
    tiny = tiny_models.MODELS[name]
    root = folder / "store"
    world = lives.World(
        tiny=tiny,
        model=model,
        folder=folder,
        storage={"plugin": "file", "root": str(root)},
    )
    cold, warm = world.live(
        "first",
        [
            {"prompts": lives.PROMPTS},
            {"prompts": "next turn" if tiny.turns else lives.PROMPTS},
        ],
    )
    prompts = [one["prompt"] for one in warm]
    second = world.live(
        "second",
        [
            {"prompts": prompts},
            {"first": ["alter", str(world.trace("first"))], "prompts": prompts},
            {"first": ["damage", str(root)], "prompts": prompts},
        ],
    )
    return Story(world, cold, warm, *second)


@pytest.fixture(scope="module")
def stories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Story]]:
    """Live two engines at a time, for the models that are asked for."""
    models = tmp_path_factory.mktemp("models")
    asked = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    running: dict[str, Future[Story]] = {}
    with ThreadPoolExecutor(2) as pool:
        for name in [one for one in tiny_models.MODELS if one in asked]:
            model = tiny_models.make(name, models)
            folder = tmp_path_factory.mktemp(name)
            running[name] = pool.submit(tell, name, model, folder)
        yield lambda name: running[name].result()


def numbers(answers: list[dict[str, Any]]) -> list[Any]:
    return [(one["tokens"], one["logprobs"]) for one in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in answers]


def pools_moved(world: lives.World, life: str, what: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in world.moves(life):
        if line["what"] == what:
            counts[line["pool"]] = counts.get(line["pool"], 0) + sum(line["ok"])
    return counts


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_a_restarted_engine_answers_from_the_store_as_a_warm_one(
    name: str, stories: Callable[[str], Story]
) -> None:
    story = stories(name)
    assert all(cached(story.warm)), "the warm run proves nothing"
    assert cached(story.restored) == cached(story.warm)
    assert numbers(story.restored) == numbers(story.warm)
    for life, what in (("first", "write"), ("second", "read")):
        moved = pools_moved(story.world, life, what)
        assert set(moved) == POOLS[name]
        assert all(moved.values())


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_other_numbers_in_the_pages_are_other_answers(
    name: str, stories: Callable[[str], Story]
) -> None:
    """The counterproof: what was restored is what the engine computed with."""
    story = stories(name)
    assert cached(story.altered) == cached(story.warm)
    assert numbers(story.altered) != numbers(story.warm)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_damaged_pages_are_computed_again(
    name: str, stories: Callable[[str], Story]
) -> None:
    story = stories(name)
    assert sum(cached(story.damaged)) < sum(cached(story.warm))
    tokens = [one["tokens"] for one in story.damaged]
    assert tokens == [one["tokens"] for one in story.warm]
