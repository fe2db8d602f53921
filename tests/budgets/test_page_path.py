"""What a page goes through between an engine's call and the system call."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmark_scripts import FOLDER, load_script


def test_a_page_reaches_the_system_call_within_its_frames_and_files() -> None:
    ran = subprocess.run(
        [sys.executable, str(FOLDER / "page_path.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["get_frames"] <= 20
    assert figures["get_files"] <= 25
    assert figures["put_frames"] <= 22
    assert figures["put_files"] <= 27
    # A put into a full store claims one segment.
    assert figures["put_system_calls"] <= 52
    assert figures["put_calls"] <= 1800
    assert figures["get_calls"] <= 1000
    # The pools of a call move on one thread.
    assert figures["put_handoffs"] == figures["get_handoffs"] == 1


@pytest.mark.parametrize(
    ("stack", "files", "status"),
    [(20, 25, 0), (21, 25, 1), (20, 26, 1), (0, 0, 1)],
)
def test_one_frame_or_file_too_many_is_a_failure(
    stack: int, files: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("page_path")
    found = {"get": (["frame"] * stack, ["file"] * files)}
    monkeypatch.setattr(script, "measure", lambda: found)
    monkeypatch.setattr(script, "counts", dict)
    assert script.main([]) == status


def test_one_hand_off_too_many_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("page_path")
    monkeypatch.setattr(script, "measure", dict)
    monkeypatch.setattr(script, "counts", lambda: {"put_handoffs": 2})
    assert script.main([]) == 1
