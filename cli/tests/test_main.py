from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdock import native
from kvdock.errors import KvdockError, NoRoute, PluginError, SettingsError
from kvdock.plugin import BrokenPlugin, Candidate, LoadStage
from kvdock_cli.output import UsageProblem, exit_code

if TYPE_CHECKING:
    from tiny import Shelf

BROKEN = Candidate(name="a", value="a", distribution="d", version="1").problem(
    LoadStage.IMPORT, "broken", "Mend it."
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageProblem("x"), 2),
        (SettingsError("x"), 2),
        (PluginError("x"), 2),
        (BrokenPlugin(BROKEN), 1),
        (NoRoute("x"), 1),
        (KvdockError("x"), 1),
    ],
)
def test_wrong_questions_and_bad_news_have_different_codes(
    error: KvdockError, code: int
) -> None:
    assert exit_code(error) == code


def test_no_command_at_all_shows_the_help(shelf: Shelf) -> None:
    done = shelf.kvdock()
    assert done.returncode == 2
    assert "Usage: kvdock" in done.stdout + done.stderr
    assert shelf.kvdock("--json").returncode == 2


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_names_every_command(shelf: Shelf, flag: str) -> None:
    done = shelf.kvdock(flag)
    assert (done.stderr, done.returncode) == ("", 0)
    for name in ("list", "store", "route", "doctor"):
        assert f"\n  {name}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "--nope"), "no such option: --nope. See `kvdock list --help`."),
        (("new",), "missing argument 'name'. See `kvdock new --help`."),
        (("store", "lss"), "no such command 'lss'"),
        (("--nope",), "no such option: --nope"),
        (("nope",), "unknown command 'nope'. See `kvdock --help`."),
        (("route", "--tp", "x"), "invalid value for '--tp'"),
    ],
)
def test_errors_of_every_level_have_one_shape(
    shelf: Shelf, arguments: tuple[str, ...], said: str
) -> None:
    done = shelf.kvdock(*arguments, "--json")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("kvdock: ")
    assert said in done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["ok"]) == ("kvdock.error/1", False)
    assert found["error"]["type"] == "UsageProblem"


def test_summaries_in_the_help_are_whole_sentences(shelf: Shelf) -> None:
    for command in ((), ("store",)):
        shown = " ".join(shelf.kvdock(*command, "--help").stdout.split())
        assert "..." not in shown.partition("Commands:")[2]
    assert "1 if any is wrong or lost." in shown


def test_a_shell_completes_commands(shelf: Shelf) -> None:
    script = shelf.kvdock("completion", "bash")
    assert (script.stderr, script.returncode) == ("", 0)
    assert "_KVDOCK_COMPLETE=complete_bash" in script.stdout
    done = shelf.kvdock(
        _KVDOCK_COMPLETE="complete_bash", COMP_WORDS="kvdock do", COMP_CWORD="1"
    )
    assert done.stdout.split() == ["doctor"]


SLOW = """def slow() -> None:
    import os, signal, time
    # A test run in the background of a shell inherits that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_an_interrupt_is_one_line_and_its_own_exit_code(shelf: Shelf) -> None:
    shelf.add("slow", SLOW, group="kvdock.commands", attribute="slow")
    done = shelf.kvdock("slow")
    assert (done.stdout, done.stderr) == ("", "kvdock: interrupted\n")
    assert done.returncode == 130


@pytest.mark.parametrize(
    "arguments",
    [
        ("store", "record", ""),
        ("config", "show", "--config", ""),
        ("check", "file", "--set", "root="),
        ("new", "plenty", "--into", ""),
    ],
)
def test_an_empty_path_is_a_wrong_question(shelf: Shelf, arguments: tuple[str]) -> None:
    done = shelf.kvdock(*arguments)
    assert "'' is not a path" in done.stderr
    assert (done.stdout, done.returncode) == ("", 2)


def test_the_version_names_every_part_without_importing_it(shelf: Shelf) -> None:
    shelf.add_backend("good", ("from kvdock", "import nowhere\nfrom kvdock"))
    shelf.add("greet", "", group="kvdock.commands", attribute="greet")
    shelf.add("gone", "")
    (shelf.root / "kvdock_gone.py").unlink()
    done = shelf.kvdock("--version", "--json")
    assert (done.stderr, done.returncode) == ("", 0)
    parts = {one["name"]: one for one in json.loads(done.stdout)["parts"]}
    assert parts["backend good"] == {
        "name": "backend good",
        "version": "1.2.3",
        "distribution": "kvdock-good",
        "path": str(shelf.root / "kvdock_good.py"),
    }
    assert parts["command greet"]["path"] == str(shelf.root / "kvdock_greet.py")
    assert parts["backend gone"]["path"] == "?"
    assert {"python", "kvdock", "kvdock-cli"} <= set(parts)
    used = native.library() is not None
    assert parts["compiled pages"]["version"] == ("yes" if used else "no")
    without = shelf.kvdock("--version", "--json", KVDOCK_PURE="1")
    parts = {one["name"]: one for one in json.loads(without.stdout)["parts"]}
    assert (parts["compiled pages"]["version"], parts["compiled pages"]["path"]) == (
        "no",
        "-",
    )
    assert "kvdock_good.py" in shelf.kvdock("-V").stdout


@pytest.mark.slow
def test_a_path_of_any_bytes_can_be_told(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    root = f"{tmp_path}/\udcff \u00e4"
    given = ("--set", f"root={root}", "--set", "free_space=0")
    done = shelf.kvdock("doctor", "file", *given)
    assert (done.stderr, done.returncode) == ("", 0)
    assert r"\udcff \xe4" in done.stdout


HANGS = """def kvdock_batch_io(store, batch):
    import time
    from concurrent.futures import ThreadPoolExecutor
    ThreadPoolExecutor(1).submit(time.sleep, 90).result()
"""


@pytest.mark.slow
def test_a_backend_whose_threads_hang_does_not_hold_the_command(shelf: Shelf) -> None:
    shelf.add_backend("stuck", ("def kvdock_batch_io(store, batch):\n", HANGS))
    done = shelf.kvdock("doctor", "stuck", "--json", "--timeout", "1")
    assert done.returncode == 1
    assert "no answer within 1 s" in done.stdout


@pytest.mark.parametrize(
    ("asked", "lines"), [(("list",), 0), (("doctor", "nobody", "--json"), 1)]
)
def test_a_reader_that_has_gone_is_no_noise(asked: tuple[str, ...], lines: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [Path(sys.executable).with_name("kvdock"), *asked],
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
    )
    os.close(write_end)
    assert len(done.stderr.splitlines()) == lines
    assert done.returncode in (1, 2)


@pytest.mark.parametrize("asked", [("list",), ("list", "--json"), ("list", "--help")])
def test_an_answer_that_finds_no_room_is_an_error_in_a_line(
    asked: tuple[str, ...],
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [Path(sys.executable).with_name("kvdock"), *asked],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    said = "kvdock: the answer cannot be written: No space left on device\n"
    assert (done.stderr, done.returncode) == (said, 1)


def test_a_closed_output_is_no_error() -> None:
    command = Path(sys.executable).with_name("kvdock")
    shell = f"{command} list >&- && ! {command} nonsense 2>&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"", b"", 0)


def test_a_command_that_ends_with_words_is_heard(shelf: Shelf) -> None:
    text = "def greet() -> None:\n    raise SystemExit('not today')\n"
    shelf.add("greet", text, group="kvdock.commands", attribute="greet")
    done = shelf.kvdock("greet")
    assert (done.stderr, done.returncode) == ("not today\n", 1)
