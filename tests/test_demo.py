"""The demo as the command line runs it: how it fails and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny import Shelf

DEADLINE_S = 300
"""Long: what is tested is not the pace of a busy machine."""
NO_FLOOR = ("--backend", "file", "--set", "free_space=0")
"""The disk that tests run on may have less than a store leaves free."""


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["--backend", "bogus"], "PluginError", 2),
        (["--backend", "bad"], "BrokenPlugin", 1),
        (["--backend", "good"], "PluginError", 2),
        (["--set", "no_such=1"], "SettingsError", 2),
    ],
)
def test_what_cannot_be_tried_is_one_object_and_a_line(
    shelf: Shelf, arguments: list[str], kind: str, code: int
) -> None:
    shelf.add_backend("good")
    shelf.add_backend("bad", ("from kvdock", "import nowhere\nfrom kvdock"))
    done = shelf.kvdock("demo", "--json", *arguments)
    found = json.loads(done.stdout)
    assert (found["schema"], found["error"]["type"]) == ("kvdock.error/1", kind)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith("kvdock: ")
    assert "Traceback" not in done.stderr


def test_without_any_backend_nobody_is_blamed_for_an_option(shelf: Shelf) -> None:
    done = shelf.kvdock("demo", KVDOCK_PLUGINS="")
    assert done.returncode == 1
    assert "--backend" not in done.stderr
    assert "no backend is installed that keeps pages in a directory" in done.stderr


def test_a_disk_without_room_is_an_error_before_anything_is_stored(
    shelf: Shelf, tmp_path: Path
) -> None:
    floor = ("--backend", "file", "--set", "free_space=1024 TiB")
    done = shelf.kvdock("demo", "--dir", str(tmp_path / "here"), *floor)
    assert (done.stdout, done.returncode) == ("", 1)
    assert "cannot store pages here: 0 B to use" in done.stderr
    assert "Free some space" in done.stderr
    assert "--dir" in done.stderr
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.slow
def test_a_terminated_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [Path(sys.executable).with_name("kvdock"), "demo", *NO_FLOOR],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as running:
        deadline_s = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob("kvdock-demo-*/store/*")):
            assert running.poll() is None, running.stderr and running.stderr.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert running.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "notice"),
    [("file", ""), ("nixl", ""), ("hf3fs", "FAKE"), ("s3", "moto's S3 server")],
)
def test_pages_survive_their_process_and_damage_is_a_miss(
    backend: str, notice: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            Path(sys.executable).with_name("kvdock"),
            "demo",
            "--json",
            *("--backend", backend),
            *(("--set", "free_space=0") if backend != "s3" else ()),
        ],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    found = json.loads(done.stdout)
    assert found["backend"] == backend
    assert notice in found["notice"]
    assert bool(notice) == bool(found["notice"])
    assert [step["pages"] for step in found["steps"]] == [48, 48, 40, 48, 48]
    assert not any(step["wrong"] for step in found["steps"])
    assert len({step["pid"] for step in found["steps"]}) == 5
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_named(shelf: Shelf) -> None:
    done = shelf.kvdock("demo", "--dir", "/dev/null/x")
    assert done.returncode == 2
    assert "--dir /dev/null/x cannot be written: Not a directory" in done.stderr
