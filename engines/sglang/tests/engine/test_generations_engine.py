"""Weights that are replaced under a real engine: no wrong token, and hits again."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import environment
import lives
import pytest
import tiny_models
import warm_python

import kvdock_trace

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

LIFE = Path(__file__).with_name("generation_life.py")
UPDATES = 20
CLIENTS = 8
PROMPTS = [
    [
        *[(7 * n + 3) % 500 + 4 for n in range(64)],
        *[(n * k) % 490 + 5 for n in range(60)],
    ]
    for k in range(1, CLIENTS + 1)
]
"""Of one beginning, so that what one client stores another one finds."""


@attrs.frozen
class World:
    """Two checkpoints of one model, what each of them says, and a place for lives.

    Args:
        said: Folder of a checkpoint to the tokens of each prompt, as an engine
            without any cache says them.
    """

    folder: Path
    models: tuple[str, str]
    said: dict[str, list[list[int]]]

    def live(
        self,
        life: str,
        steps: list[Any],
        *,
        kill_when: Callable[[], bool] | None = None,
        engine: dict[str, Any] | None = None,
        model: int = 0,
        cached: bool = True,
        **storage: object,
    ) -> list[Any]:
        """Start an engine, take steps, end it; return what was said in each.

        With `kill_when`, all of its processes are killed once that is true.
        """
        out, log = self.folder / f"{life}.json", self.folder / f"{life}.log"
        trace = self.folder / f"{life}.trace"
        given = {
            "backend_name": "kvdock",
            "module_path": "kvdock_sglang",
            "class_name": "KvdockStorage",
            "prefetch_threshold": 16,
            "plugin": "file",
            "root": str(self.folder / "store"),
            **storage,
        }
        task = {
            "model": self.models[model],
            "engine": {**tiny_models.MODELS["llama"].engine, **(engine or {})},
            "prompts": PROMPTS,
            "new_tokens": lives.NEW_TOKENS,
            "steps": steps,
            "out": str(out),
            "storage": given if cached else None,
            "trace": str(trace),
        }
        path = self.folder / f"{life}.task.json"
        path.write_text(json.dumps(task))
        variables = {
            **os.environ,
            **environment.CPU,
            **({kvdock_trace.FOLDER: str(trace)} if cached else {}),
        }
        started = warm_python.warm(lives.IMPORTED)(
            [str(LIFE), str(path)], variables, log
        )
        end_s = time.monotonic() + lives.LONGEST_S
        try:
            while started.poll() is None and not (kill_when and kill_when()):
                assert time.monotonic() < end_s, log.read_text()[-4000:]
                time.sleep(0.02)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        if kill_when is not None:
            return []
        assert out.exists(), log.read_text()[-4000:]
        found: list[Any] = json.loads(out.read_text())
        assert len(found) == len(steps), log.read_text()[-4000:]
        return found

    def right(self, answers: list[dict[str, Any]], model: int) -> bool:
        said = self.said[self.models[model]]
        return all(one["tokens"] == said[one["prompt"]] for one in answers)


def hits(answers: list[dict[str, Any]]) -> int:
    return sum(one["cached"] for one in answers)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("generations")
    tiny = tiny_models.MODELS["llama"]
    models = tuple(
        str(tiny_models.write(tiny, folder / name, seed))
        for name, seed in (("a", 1), ("b", 2))
    )
    blank = World(folder, (models[0], models[1]), {})
    said = {}
    for number, name in enumerate(models):
        (answers,) = blank.live(
            f"plain-{number}", [["ask"]], model=number, cached=False
        )
        assert hits(answers) == 0
        said[name] = [one["tokens"] for one in answers]
    a, b = said.values()
    assert all(one != other for one, other in zip(a, b, strict=True))
    return attrs.evolve(blank, said=said)


@pytest.fixture
def world(first: World, tmp_path: Path) -> World:
    return attrs.evolve(first, folder=tmp_path)


@pytest.mark.long
def test_no_token_is_wrong_in_many_updates_under_load_and_pages_are_found(
    world: World,
) -> None:
    a, b = world.models
    updates = [[(a, "a"), (b, "b")][number % 2] for number in range(1, UPDATES + 1)]
    (load,) = world.live("load", [["load", updates, CLIENTS]], generations="run:policy")
    answers = load["answers"]
    assert len(answers) >= UPDATES * CLIENTS
    wrong = [
        one
        for one in answers
        if one["tokens"] != world.said[one["folder"]][one["prompt"]]
    ]
    assert wrong == []
    assert {one["folder"] for one in answers if one["cached"] > 64} == {a, b}


def test_engines_of_a_run_share_the_pages_of_a_version_and_no_others_do(
    world: World,
) -> None:
    a, b = world.models
    run: dict[str, Any] = {"generations": "run:policy"}
    before, _, cold, _, warm = world.live(
        "one",
        [["ask"], ["disk", b, "7"], ["ask"], ["disk", b, "7"], ["ask"]],
        **run,
    )
    assert world.right(before, 0)
    assert world.right(cold, 1)
    assert world.right(warm, 1)
    assert cold[0]["cached"] == 0, "of the old weights nothing is found"
    assert warm[0]["cached"] > 0
    # Another engine of the run, and two that are not: one says nothing, one fails.
    _, shared, _, again = world.live(
        "two", [["disk", b, "7"], ["ask"], ["tensor", a, "8"], ["ask"]], **run
    )
    assert world.right(shared, 1)
    assert shared[0]["cached"] > 0
    assert world.right(again, 0)
    assert again[0]["cached"] == 0
    _, private, good, failed = world.live(
        "three", [["disk", b, "7"], ["ask"], ["disk", str(world.folder), "9"], ["ask"]]
    )
    assert world.right(private, 1)
    assert private[0]["cached"] == 0
    assert not good
    assert failed[0]["cached"] == 0


@pytest.mark.long
def test_an_engine_killed_in_an_update_leaves_nothing_wrong(world: World) -> None:
    _, b = world.models
    begun = world.folder / "begun"
    steps = [["disk", b, "7"], ["ask"], ["write", str(begun)]]
    forever = [["load", [[one, "7"] for one in (b, *world.models * 40)], CLIENTS]]
    world.live(
        "killed", [*steps, *forever], kill_when=begun.exists, generations="run:policy"
    )
    (before, _, after, _, private) = world.live(
        "again",
        [
            ["ask"],
            ["disk", b, "7"],
            ["ask"],
            ["tensor", world.models[0], None],
            ["ask"],
        ],
        generations="run:policy",
    )
    assert world.right(before, 0)
    assert before[0]["cached"] == 0
    assert world.right(after, 1)
    assert after[0]["cached"] > 0
    assert world.right(private, 0)
    assert private[0]["cached"] == 0


@pytest.mark.long
def test_ranks_of_one_engine_go_on_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    # Otherwise SGLang wants a NUMA node for each rank.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    _, b = world.models
    engine = {"tp_size": 2}
    (_, cold, _, warm) = world.live(
        "ranks",
        [["disk", b, "7"], ["ask"], ["disk", b, "7"], ["ask"]],
        engine=engine,
        generations="run:policy",
    )
    assert world.right(cold, 1)
    assert world.right(warm, 1)
    assert warm[0]["cached"] > 0
