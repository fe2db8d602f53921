"""`kvdock why --url`: the engine is asked for a prompt, and its journal for why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from engine_server import Asked, serving
from shelf import Engine, hashes, patient

from kvdock.events import requested_by
from kvdock.journal.observer import Journal, JournalSettings
from kvdock_cli.main import _run

Why = Callable[..., tuple[int, str]]
PAGE = 4


@attrs.define(eq=False)
class Served:
    """A stand-in engine that looks prompts up as it is asked over HTTP."""

    journal: Journal
    engine: Engine
    in_memory: bool = False

    def answer(self, asked: Asked) -> tuple[list[int], list[float], int | None]:
        pages = hashes(len(asked.prompt) // PAGE)
        if pages and not self.in_memory:
            # vLLM adds to the name that it is given.
            with requested_by(f"cmpl-{asked.name}-0"):
                self.engine.attachment.exists(pages)
        return [1], [-1.0], len(asked.prompt) if self.in_memory else 0

    def store(self, pages: int) -> None:
        given = list(range(pages))
        self.engine.fill(hashes(pages), given)
        self.engine.attachment.put(hashes(pages), {"kv": given})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    journal = Journal(JournalSettings(dir=tmp_path / "journal"))
    served = Served(journal, Engine(core=patient(), observers=[journal]))
    yield served
    served.engine.attachment.close()


@pytest.fixture
def why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Why:
    monkeypatch.setattr("kvdock_cli.commands.why._WRITTEN_S", 1.0)

    def command(url: str, prompt: str) -> tuple[int, str]:
        (tmp_path / "prompt").write_text(prompt)
        called = ["--journal", tmp_path / "journal", "--url", url]
        called += ["--prompt", tmp_path / "prompt"]
        monkeypatch.setattr("sys.argv", ["kvdock", "why", *map(str, called)])
        code = _run(as_json=False)
        assert isinstance(code, int)
        return code, " ".join(capsys.readouterr().out.split())

    return command


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_page_that_is_missing(served: Served, why: Why, engine: str) -> None:
    served.store(2)
    with serving(engine, served.answer) as (url, _):
        code, said = why(url, "twelve chars")
    assert code == 1
    assert said.startswith("2 of 3 pages could be restored: pool kv lacks page 3 of 3")


@pytest.mark.parametrize(
    "engine", [pytest.param("sglang", marks=pytest.mark.slow), "vllm"]
)
def test_a_prompt_one_token_short_of_a_page(
    served: Served, why: Why, engine: str
) -> None:
    served.store(2)
    with serving(engine, served.answer) as (url, _):
        code, said = why(url, "eleven char")
        token_ids = why(url, "[1, 2, 3]")
    assert code == 0
    assert said.startswith(
        "The prompt is one token short of a page of 4, and only whole pages are "
        "stored: its last 3 tokens are computed. All 2 pages could be restored."
    )
    assert token_ids[0] == 1
    assert token_ids[1].startswith("The prompt is one token short of a page of 4")


def test_a_prompt_that_the_engine_has_itself(served: Served, why: Why) -> None:
    served.in_memory = True
    served.store(2)
    with serving("sglang", served.answer) as (url, _):
        code, said = why(url, "eight ch")
    assert code == 1
    assert said.startswith(
        "Storage was not asked: the engine had 8 of 8 tokens in its own memory."
    )


def test_an_engine_without_storage(served: Served, why: Why) -> None:
    served.store(2)
    with serving("vllm", lambda _: ([1], [-1.0], None)) as (url, _):
        code, said = why(url, "eight ch")
    assert code == 1
    assert said.startswith("Storage was not asked for this prompt. Look whether the")
