"""`kvdock audit` against servers that speak as the engines do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_server import Asked, serving

from kvdock.errors import KvdockError
from kvdock_cli.engine_client import EngineClient
from kvdock_cli.main import _run

Audit = Callable[..., tuple[int, str]]
LOGS = [-0.5, -0.25, -1.0, -2.0]


@pytest.fixture
def audit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Audit:
    given = tmp_path / "prompts"
    given.write_text('first prompt\n\n"second \\n prompt"\n[7, 8, 9]\n')

    def command(*words: object) -> tuple[int, str]:
        called = ["--prompts", given, "--rate", 1000, "--tokens", 4, *words]
        monkeypatch.setattr("sys.argv", ["kvdock", "audit", *map(str, called)])
        code = _run(as_json="--json" in words)
        assert isinstance(code, int)
        said = capsys.readouterr()
        return code, " ".join((said.out or said.err).split())

    return command


def sound(asked: Asked) -> tuple[list[int], list[float], int | None]:
    return [1, 2, 3, 4], LOGS, 0 if asked.salt else 64


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_sound_engine_differs_in_no_prompt(audit: Audit, engine: str) -> None:
    with serving(engine, sound) as (url, asked):
        code, said = audit(url)
    assert (code, said) == (
        0, "0 of 3 restored prompts differed by more than 0.1 in a log-probability.",
    )  # fmt: skip
    assert [one.prompt for one in asked[::2]] == [
        list(b"first prompt"), list(b"second \n prompt"), [7, 8, 9],
    ]  # fmt: skip
    salts = [one.salt for one in asked]
    assert salts[::2] == [""] * 3
    assert len({one for one in salts[1::2] if one}) == 3


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_prompt_that_differs_can_be_reproduced(audit: Audit, engine: str) -> None:
    def wrong(asked: Asked) -> tuple[list[int], list[float], int | None]:
        if asked.prompt == [7, 8, 9] and not asked.salt:
            return [1, 2, 9, 9], [-0.5, -0.25, -3.0, -1.0], 2
        return sound(asked)

    with serving(engine, wrong) as (url, asked):
        code, said = audit(url, "--json")
        code_of_text, text = audit(url)
    assert (code, code_of_text) == (1, 1)
    assert text.startswith("1 of 3 restored prompts differed by more than 0.1")
    found: Any = json.loads(said)
    assert (found["ok"], found["engine"], found["restored"]) == (False, engine, 3)
    (one,) = found["differing"]
    assert one["prompt"] == [7, 8, 9]
    assert one["line"] == 4
    assert one["salt"] == next(
        other.salt for other in asked if other.prompt == [7, 8, 9] and other.salt
    )
    assert one["restored"] == {
        "tokens": [1, 2, 9, 9], "logprobs": [-0.5, -0.25, -3.0, -1.0], "cached": 2,
        "restored": 2 if engine == "sglang" else None,
    }  # fmt: skip
    assert one["anew"]["tokens"] == [1, 2, 3, 4]
    assert (one["same_tokens"], one["largest"]) == (2, 2.0)


def test_a_tie_is_no_difference(audit: Audit) -> None:
    """Two tokens of one probability: which one comes is not promised on a GPU."""

    def tie(asked: Asked) -> tuple[list[int], list[float], int | None]:
        if asked.salt:
            return [1, 2, 3, 4], LOGS, 0
        # What comes after another token is another text.
        return [1, 2, 8, 8], [-0.5, -0.25, -1.01, -9.0], 64

    with serving("sglang", tie) as (url, _):
        code, _ = audit(url)
        strict, _ = audit(url, "--tolerance", 0.001)
    assert (code, strict) == (0, 1)


@pytest.mark.parametrize("log", [float("nan"), -0.7])
def test_equal_tokens_of_other_probabilities_differ(audit: Audit, log: float) -> None:
    def wrong(asked: Asked) -> tuple[list[int], list[float], int | None]:
        return [1], [-0.5 if asked.salt else log], 0 if asked.salt else 64

    with serving("sglang", wrong) as (url, _):
        code, said = audit(url)
    assert code == 1
    assert said.startswith("3 of 3 restored prompts differed")


def test_what_was_not_restored_is_not_counted(audit: Audit) -> None:
    with serving("vllm", lambda _: ([1], [-1.0], 0)) as (url, asked):
        code, said = audit(url)
    assert code == 1
    assert said.startswith("None of the prompts was restored, so nothing was compared.")
    assert len(asked) == 3


def test_what_the_engine_has_in_its_own_memory_is_not_restored(audit: Audit) -> None:
    with serving("sglang", sound, in_memory=64) as (url, asked):
        code, said = audit(url)
        data = json.loads(audit(url, "--json")[1])
    assert code == 1
    assert said.startswith("None of the prompts was restored, so nothing was compared.")
    assert "Of 3 prompts the engine had in its own memory what was cached" in said
    assert (data["restored"], data["in_memory"], len(asked)) == (0, 3, 6)
    with serving("sglang", sound, in_memory=16) as (url, _):
        data = json.loads(audit(url, "--json")[1])
    assert (data["restored"], data["restored_tokens"]) == (3, 3 * 48)


def test_an_engine_that_does_not_say_what_it_restored(audit: Audit) -> None:
    with serving("vllm", lambda _: ([1], [-1.0], None)) as (url, _):
        code, said = audit(url)
    assert code == 0
    assert "--enable-prompt-tokens-details" in said


def test_requests_keep_to_the_rate(audit: Audit) -> None:
    times: list[float] = []

    def timed(asked: Asked) -> tuple[list[int], list[float], int | None]:
        times.append(time.monotonic())
        return sound(asked)

    with serving("sglang", timed) as (url, _):
        audit(url, "--rate", 10)
    assert len(times) == 6
    # The first one may reach a busy server late; without a rate all take milliseconds.
    assert times[-1] - times[0] >= 5 / 10 * 0.7


def test_an_address_without_an_engine_is_said(audit: Audit) -> None:
    code, said = audit("127.0.0.1:9")
    assert code == 1
    assert "127.0.0.1:9" in said


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_answer_without_what_engines_give_is_an_error(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient("http://127.0.0.1:9", engine, "org/model")
    monkeypatch.setattr(EngineClient, "_ask", lambda *_, **__: {})
    with pytest.raises(KvdockError, match="is not understood"):
        client.complete("a prompt", tokens=1)
    with pytest.raises(KvdockError, match="is not understood"):
        client.tokenize("a prompt")
