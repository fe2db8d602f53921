"""`kvdock run` in front of SGLang's own command."""

from __future__ import annotations

import sys
from pathlib import Path

import lives
import pytest
from test_server import served

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
    start = (str(Path(sys.executable).with_name("kvdock")), "run", *words, "--")
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
