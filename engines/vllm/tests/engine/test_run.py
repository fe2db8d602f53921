"""`kvdock run` in front of vLLM's own command."""

from __future__ import annotations

import sys
from pathlib import Path

import vllm_models
from vllm_lives import Lives, prompts
from vllm_server import serving


def test_a_server_behind_one_word_restores_after_a_restart(
    lives: Lives, tmp_path: Path
) -> None:
    model = vllm_models.make(vllm_models.FAMILIES["llama"], lives.models)
    settings = {
        "plugin": "file",
        "root": tmp_path / "store",
        "free_space": "1 MiB",
        "host_memory": "16 MiB",
        # On a busy machine a call of the default deadline may be a miss.
        **{f"core.deadlines.{call}": "60 s" for call in ("exists", "get", "put")},
    }
    words = [
        word
        for pair in settings.items()
        for word in ("--set", "=".join(map(str, pair)))
    ]
    start = (str(Path(sys.executable).with_name("kvdock")), "run", *words, "--")
    prompt = prompts(100)[0]
    with serving(model, {}, tmp_path / "first.log", start=start) as server:
        first = server.complete(prompt)
        assert server.keys_soon("put", 3) >= 3
        assert server.keys("get") == 0
    with serving(model, {}, tmp_path / "second.log", start=start) as server:
        assert server.complete(prompt) == first
        assert server.keys_soon("get", 3) >= 3
    said = (tmp_path / "second.log").read_text()
    assert "kvdock adds to the command:\n" in said
    assert "--kv-transfer-config" in said
