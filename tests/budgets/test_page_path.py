"""What a page goes through between an engine's call and the system call."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "page_path.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_path", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_reaches_the_system_call_within_its_frames_and_files() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["get_frames"] <= 20
    assert figures["get_files"] <= 24
    assert figures["put_frames"] <= 22
    assert figures["put_files"] <= 26


@pytest.mark.parametrize(
    ("stack", "files", "status"),
    [(20, 24, 0), (21, 24, 1), (20, 25, 1), (0, 0, 1)],
)
def test_one_frame_or_file_too_many_is_a_failure(
    stack: int, files: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = loaded()
    found = {"get": (["frame"] * stack, ["file"] * files)}
    monkeypatch.setattr(script, "measure", lambda: found)
    assert script.main([]) == status
