"""`kvdock run` in front of SGLang's own command, and a rollout tried before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import environment
import lives
import pytest
from test_server import flags_of, served, words_of

import kvdock_trace

pytestmark = pytest.mark.slow


def test_a_server_behind_one_word_restores_after_a_restart(tmp_path: Path) -> None:
    settings = {
        "plugin": "file",
        "root": tmp_path / "store",
        "free_space": "1 MiB",
        "prefetch_threshold": 16,
    }
    words = [
        word
        for pair in settings.items()
        for word in ("--set", "=".join(map(str, pair)))
    ]
    kvdock = str(Path(sys.executable).with_name("kvdock"))
    start = (kvdock, "run", *words, "--")
    prompt = lives.PROMPTS[0]
    with served(tmp_path, start) as server:
        first, cached = server.answer(prompt)
        assert cached == 0
        kvdock_trace.settle(server.trace)
    with served(tmp_path, start) as server:
        again, cached = server.answer(prompt)
        assert again == first
        assert cached > 0
    said = (tmp_path / "server.log").read_text()
    assert "kvdock adds to the command:\n--enable-hierarchical-cache\n" in said

    flags = flags_of(tmp_path, 1)
    del flags["enable_hierarchical_cache"], flags["hicache_storage_prefetch_policy"]

    def separating(**changes: object) -> list[str]:
        """Return the fields that separate a new command from what is stored."""
        command = [sys.executable, "-m", "sglang.launch_server"]
        command += words_of(flags | changes)
        done = subprocess.run(
            [kvdock, "route", "--namespace", "--json", *words, "--", *command],
            env={**os.environ, **environment.CPU},
            stdout=subprocess.PIPE,
            check=False,
        )
        nearest = json.loads(done.stdout)["compared"]["target"]
        assert done.returncode == bool(nearest["differences"])
        return [difference["field"] for difference in nearest["differences"]]

    assert separating(served_model_name="other") == []
    assert separating(kv_cache_dtype="bf16", context_length=512) == [
        "page_format.arguments.context_tokens",
        "page_format.arguments.kv_cache_dtype",
    ]
