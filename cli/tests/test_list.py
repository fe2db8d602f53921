from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny import Shelf

WATCH = """
import sys, socket
def refuse(*_): raise AssertionError("a connection was opened")
socket.socket.connect = refuse
sys.argv = ["kvdock", "list"]
from kvdock_cli.main import main
try:
    main()
finally:
    print(*sorted(sys.modules), file=sys.stderr)
"""
HEAVY = {"numpy", "cattrs", "pydantic", "rich", "torch", "asyncio", "xxhash"}


def test_the_real_listing_shows_what_is_installed(shelf: Shelf) -> None:
    shelf.add_backend("good")
    done = shelf.kvdock("list")
    assert (done.stderr, done.returncode) == ("", 0)
    row = next(line for line in done.stdout.splitlines() if line.startswith("good"))
    about = ["a", "backend"]
    expected = ["good", "1.2.3", "kvdock-good", "?", "none", "none", "?", *about]
    assert row.split() == expected
    backend = json.loads(shelf.kvdock("list", "good", "--json").stdout)["backend"]
    assert backend["path"] == str(shelf.root / "kvdock_good.py")


def test_a_listing_imports_nothing_heavy(shelf: Shelf) -> None:
    shelf.add_backend("good")
    done = subprocess.run(
        [sys.executable, "-c", WATCH], capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(done.stderr.split())
    assert "kvdock.plugin.discovery" in done.stderr.split()


def test_a_broken_plugin_is_listed_beside_the_good_ones(shelf: Shelf) -> None:
    shelf.add_backend("good")
    shelf.add("bad", "import nowhere")
    done = shelf.kvdock("list", "--json")
    assert (done.stderr, done.returncode) == ("", 1)
    data = json.loads(done.stdout)
    assert data["ok"] is False
    assert "good" in {backend["name"] for backend in data["backends"]}
    assert [problem["name"] for problem in data["problems"]] == ["bad"]


def test_the_allow_list_hides_and_says_so(shelf: Shelf) -> None:
    shelf.add_backend("good")
    shelf.add("bad", "import nowhere")
    done = shelf.kvdock("list", "--json", KVDOCK_PLUGINS="good")
    data = json.loads(done.stdout)
    assert (data["ok"], done.returncode) == (True, 0)
    assert [backend["name"] for backend in data["backends"]] == ["good"]
    assert "bad" in data["hidden"]


def test_a_misspelt_allow_list_is_a_problem(shelf: Shelf) -> None:
    shelf.add_backend("good")
    done = shelf.kvdock("list", KVDOCK_PLUGINS="god")
    assert done.returncode == 1
    assert "KVDOCK_PLUGINS names it, but it is not installed" in done.stdout


@pytest.mark.slow
def test_observers_are_listed_without_being_imported(shelf: Shelf) -> None:
    shelf.add("mine", "import nowhere", group="kvdock.observers", attribute="observer")
    done = shelf.kvdock("list", "--json")
    assert (done.stderr, done.returncode) == ("", 0)
    mine = next(
        one for one in json.loads(done.stdout)["observers"] if one["name"] == "mine"
    )
    assert mine == {
        "name": "mine",
        "version": "1.2.3",
        "distribution": "kvdock-mine",
        "entry_point": "kvdock_mine:observer",
    }
    assert "mine      1.2.3    kvdock-mine" in shelf.kvdock("list").stdout


def test_a_backend_that_crashes_or_hangs_is_a_row_and_hides_no_other(
    shelf: Shelf,
) -> None:
    shelf.add_backend("good")
    shelf.add_backend(
        "bad",
        (
            "from kvdock",
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\nfrom kvdock",
        ),
    )
    done = shelf.kvdock("list", "--json", KVDOCK_PLUGINS="good,bad")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert [one["name"] for one in data["backends"]] == ["good"]
    (problem,) = data["problems"]
    assert (problem["name"], "SIGSEGV" in problem["cause"]) == ("bad", True)
    left = shelf.kvdock("list", "--json", KVDOCK_PLUGINS="good,bad", KVDOCK_DENY="bad")
    assert left.returncode == 0
    assert "bad" in json.loads(left.stdout)["hidden"]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_listing_that_is_ended_leaves_no_trial_behind(
    shelf: Shelf, tmp_path: Path, threads: int
) -> None:
    began = tmp_path / "began"
    hang = (
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(began)!r}).write_text(str(os.getpid()))\n"
        "threading.Event().wait()\n"
    )
    shelf.add_backend("bad", ("from kvdock", f"{hang}from kvdock"))
    beside = (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    ) * (threads - 1)
    listing = f"{beside}from kvdock_cli.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", listing, "list"],
        env=os.environ | {"PYTHONPATH": str(shelf.root), "KVDOCK_PLUGINS": "bad"},
        stderr=subprocess.PIPE,
    ) as command:
        deadline_s = time.monotonic() + 60
        while not (began.exists() and began.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        pid = int(began.read_text())
        command.terminate()
        assert command.wait(60) == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_signal_during_an_import_ends_the_command(shelf: Shelf) -> None:
    """It is no failure of the plugin that happens to be imported."""
    shelf.add(
        "slow",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "def slow() -> int:\n    '''Do it.'''\n    return 0\n",
        group="kvdock.commands",
    )
    done = shelf.kvdock("slow")
    assert (done.returncode, done.stdout) == (128 + 15, "")


def test_a_broken_backend_that_is_named_is_a_problem(shelf: Shelf) -> None:
    shelf.add("bad", "import nowhere")
    done = shelf.kvdock("list", "bad", "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["schema"] == "kvdock.error/1"
    assert data["problems"][0]["stage"] == "import"
