"""What is added to a command of vLLM's, where vLLM need not be installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdock_vllm import doctor
from kvdock_vllm.launch import launch


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)


def settings(tmp_path: Path) -> dict[str, Any]:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    return {"plugin": "file", "root": str(root), "free_space": "0"}


def test_a_command_gets_the_connector_time_to_end_and_a_seed(tmp_path: Path) -> None:
    given = settings(tmp_path)
    made = launch(["vllm", "serve", "M"], {**given, "host_memory": "1 MiB"})
    flag, text, *rest = made.flags
    assert (flag, rest) == ("--kv-transfer-config", ["--shutdown-timeout", "30"])
    whole = json.loads(text)
    assert whole["kv_connector"] == "KvdockConnector"
    assert whole["kv_connector_extra_config"] == {**given, "host_memory": "1 MiB"}
    assert made.variables == {"PYTHONHASHSEED": "0"}
    assert not [one for one in made.findings if "start vLLM with this" in one.what]


def test_what_the_user_has_said_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    made = launch(["vllm", "serve", "M", "--shutdown_timeout=5"], settings(tmp_path))
    assert made.variables == {}
    assert "--shutdown-timeout" not in made.flags


def test_host_memory_that_is_not_given_fits_in_shared_memory(tmp_path: Path) -> None:
    made = launch(["vllm"], settings(tmp_path))
    (memory,) = [one for one in made.findings if "host_memory is" in one.what]
    assert memory.ok, memory.what


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (["--kv-transfer-config", "{}"], {}, "has a --kv-transfer-config already"),
        (["--kv-transfer-config.kv_role=x"], {}, "has a --kv-transfer-config already"),
        ([], {"quotta": "1"}, "unknown setting 'quotta'"),
        ([], {"config": "{"}, "config is not JSON"),
    ],
)
def test_what_the_engine_would_refuse_is_a_problem(
    tmp_path: Path, words: list[str], more: dict[str, str], said: str
) -> None:
    given = {} if "config" in more else settings(tmp_path)
    made = launch(["vllm", *words], {**given, **more})
    assert [one for one in made.findings if not one.ok and said in one.what]


def test_the_model_that_is_looked_at_is_not_a_setting(tmp_path: Path) -> None:
    more = {"description": "llama-3.1-8b", "host_memory": "1 MiB"}
    made = launch(["vllm"], {**settings(tmp_path), **more})
    assert "description" not in json.loads(made.flags[1])["kv_connector_extra_config"]
