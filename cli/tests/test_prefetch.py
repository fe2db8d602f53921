"""`kvdock prefetch`: prompts go to an engine as hints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_server import Asked, serving

from kvdock.hints import read_envelope
from kvdock_cli.commands.prefetch import prefetch


def answer(asked: Asked) -> tuple[list[int], list[float], int | None]:
    assert asked.tokens == 1
    return [1], [-1.0], 0


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_each_prompt_is_a_hint_on_a_request_of_one_token(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("some text\n[3, 4, 5]\n")
    with serving(engine, answer) as (url, asked):
        assert prefetch(url, prompts=prompts, salt="s", json=True) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 12
    named = []
    for one in asked:
        assert (len(one.prompt), one.salt) == (1, "s")
        told: list[tuple[str, str, str]] = []
        found = read_envelope("r", one.hints, lambda *said: told.append(said))  # noqa: B023 - it is called at once
        assert [outcome for _, _, outcome in told] == ["taken"]
        named.append(found.hints[0].tokens)
    assert named == [tuple(b"some text"), (3, 4, 5)]


def test_of_a_prompt_that_no_hint_has_room_for_the_beginning_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(f"[3, 4]\n{json.dumps(list(range(100_000, 130_000)))}\n")
    with serving("sglang", answer) as (url, asked):
        assert prefetch(url, prompts=prompts) == 0
    said = capsys.readouterr().out
    assert "of 1 prompts only for the beginning" in said
    found = read_envelope("r", asked[1].hints, lambda *_: None)
    tokens = found.hints[0].tokens
    assert tokens == tuple(range(100_000, 100_000 + len(tokens)))
    assert len(tokens) > 9_000
