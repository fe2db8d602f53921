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
