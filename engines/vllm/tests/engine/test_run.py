"""`kvdock run` in front of vLLM's own command, and a rollout tried before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import vllm_environment
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
    kvdock = str(Path(sys.executable).with_name("kvdock"))
    start = (kvdock, "run", *words, "--")
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

    def separating(dtype: str) -> list[str]:
        """Return the fields that separate a new command from what is stored."""
        command = f"vllm serve {model} --dtype {dtype} --max-model-len 512"
        command += " --block-size 32 --enforce-eager --port 1"
        done = subprocess.run(
            [kvdock, "route", "--namespace", "--json", *words, "--", *command.split()],
            env={**os.environ, **vllm_environment.CPU},
            stdout=subprocess.PIPE,
            check=False,
        )
        nearest = json.loads(done.stdout)["compared"]["target"]
        assert done.returncode == bool(nearest["differences"])
        return [difference["field"] for difference in nearest["differences"]]

    assert separating("float32") == []
    assert separating("bfloat16") == ["page_format.model_config.dtype"]
