"""The demos with models as users run them, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest

from kvdock.errors import KvdockError, PluginError, SettingsError
from kvdock_cli.output import UsageProblem
from kvdock_cli.reports._style import PLAIN, Style
from model_demo import program
from model_demo.program import models
from model_demo.report import Outcome, Table

DEADLINE_S = 300
EXAMPLE = Path(__file__).parents[1]
TINY = ("--send", "--size", "tiny", "--backend", "nixl")


def processes_of(folder: Path) -> dict[int, str]:
    """Return the living processes that name a folder in their command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder) in words and state not in "ZX":
            found[int(path.parent.name)] = words
    return found


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Give children a SIGINT that a shell's background job would ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def running(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Run the demo until both of its processes are there."""
    with subprocess.Popen(
        [sys.executable, EXAMPLE, *TINY, *more],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until_s = time.monotonic() + DEADLINE_S
            while len(processes_of(folder)) < 2:
                assert process.poll() is None
                assert time.monotonic() < until_s
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process and its children take connections."""
    found = set()
    with suppress(psutil.Error):  # they come and go
        every = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for one in every:
            with suppress(psutil.Error):
                found |= {
                    socket.laddr.ip
                    for socket in one.net_connections("tcp")
                    if socket.status == psutil.CONN_LISTEN
                }
    return found


def pid_of(role: str, folder: Path) -> int:
    """Return the process of a role; `exec` writes its words in several steps."""
    until_s = time.monotonic() + 20
    while True:
        found = [
            pid
            for pid, words in processes_of(folder).items()
            if f"{role}.json" in words
            for pid, words in processes_of(folder).items()
            if f"{role}.json" in words
        ]
        if len(found) == 1:
            return found[0]
        assert time.monotonic() < until_s, found
        time.sleep(0.01)


def check_all_ended(folder: Path) -> None:
    until_s = time.monotonic() + 20
    while processes_of(folder):
        assert time.monotonic() < until_s, processes_of(folder)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_demo_that_is_ended_leaves_no_process_and_no_file(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with running(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == code
    check_all_ended(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        process.kill()
        process.wait()
        check_all_ended(tmp_path)


@pytest.mark.parametrize(
    "role", ["prefill", pytest.param("decode", marks=pytest.mark.slow)]
)
def test_a_process_that_dies_is_named_and_ends_the_demo(
    role: str, tmp_path: Path
) -> None:
    with running(tmp_path, "--json") as process:
        os.kill(pid_of(role, tmp_path), signal.SIGKILL)
        output, errors = process.communicate(timeout=DEADLINE_S)
    found = json.loads(output)
    assert found["schema"] == "kvdock.error/1"
    assert (
        f"the {role} process failed: it ended with signal 9" in found["error"]["what"]
    )
    assert process.returncode == 1
    assert "Traceback" not in errors
    check_all_ended(tmp_path)


def test_without_a_backend_that_can_it_is_one_line() -> None:
    done = sent(["--size", "tiny"], KVDOCK_PLUGINS="file")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kvdock: no installed backend declares peers")


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["--send", "--model", "gpt"], SettingsError, "gpt"),
        (["--send", "--size", "huge"], SettingsError, "huge"),
        (["--send", "--set", "no_such=1"], SettingsError, "no_such"),
        (["--send", "--set", "quota"], UsageProblem, "KEY=VALUE"),
        (["--send", "--dir", __file__], SettingsError, "--dir"),
        (["--send", "--backend", "file"], PluginError, "declare peers"),
        (["--send", "--backend", "bogus"], PluginError, "bogus"),
        (["--backend", "no_such"], PluginError, "no_such"),
        (["--dir", __file__], SettingsError, "--dir"),
        (["--set", "no_such=1"], SettingsError, "no_such"),
        (["--set", "root=/x"], SettingsError, "--dir"),
        (["--set", "quota=1", "--set", "quota=2"], UsageProblem, "twice"),
    ],
)
def test_bad_input_is_rejected_before_any_process_starts(
    arguments: list[str],
    kind: type[KvdockError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model_demo.trial.run_round", None)
    options = iter(arguments)
    given: dict[str, Any] = {"set_": ()}
    for option in options:
        name = option.removeprefix("--")
        if name == "send":
            given[name] = True
        elif name == "set":
            given["set_"] += (next(options),)
        elif name == "dir":
            given["dir"] = Path(next(options))
        else:
            given[name] = next(options)
    with pytest.raises(kind) as caught:
        models(**given)
    assert words in str(caught.value)


def test_a_disk_without_room_is_an_error_before_any_model_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model_demo.trial.run_round", None)
    with pytest.raises(KvdockError, match="cannot store pages here: 0 B") as caught:
        models(backend="file", set_=("free_space=1024 TiB",))
    assert "--dir" in caught.value.fix


def sent(
    arguments: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    return demonstrated(["--send", *arguments], **environment)


def demonstrated(
    arguments: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.slow
def test_stored_pages_of_a_model_end_in_one_json_object(tmp_path: Path) -> None:
    words = ["--model", "mha", "--size", "tiny", "--json"]
    words += ["--dir", str(tmp_path), "--set", "free_space=0"]
    done = demonstrated(words)
    assert done.returncode == 0, done.stderr
    assert "verdict" in done.stderr
    summary = json.loads(done.stdout)
    assert (summary["schema"], summary["ok"]) == ("kvdock.demo/1", True)
    (model,) = summary["models"]
    assert model["tokens_identical"]
    assert model["damage_survived"]
    assert model["max_abs_diff"] == 0.0
    assert set(model["pools"]) == {"kv", "draft"}
    assert 0 < model["draft_acceptance_before"] == model["draft_acceptance_after"] < 1
    (trial,) = tmp_path.iterdir()
    assert not (trial / "models").exists(), "what is bulky is cleared away"


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_backend_without_files_brings_its_server_and_is_harmed_by_hooks() -> None:
    library = pytest.importorskip("kvdock_mooncake.library")
    try:
        library.load()
    except KvdockError as error:
        pytest.skip(f"{error}")
    words = ["--model", "mha", "--size", "tiny", "--json"]
    done = demonstrated([*words, "--backend", "mooncake", "--set", "replicas=1"])
    assert done.returncode == 0, done.stderr
    assert "tarted a local master" in " ".join(done.stderr.split())
    summary = json.loads(done.stdout)
    assert summary["ok"]
    (model,) = summary["models"]
    assert model["damage_survived"]
    assert model["damaged_pages"] == 4
    assert 0 < model["draft_acceptance_before"] == model["draft_acceptance_after"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["nixl", pytest.param("mooncake", marks=pytest.mark.mooncake)]
)
def test_every_model_decodes_as_one_process_does(backend: str, tmp_path: Path) -> None:
    # Compiled code stays where the machine keeps it: a new cache takes a minute.
    words = ["--size", "tiny", "--backend", backend, "--json", "--dir", str(tmp_path)]
    done = sent(words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["ok"]) == ("kvdock.demo-send/1", True)
    assert found["backend"] == backend
    pools = {one["model"]: set(one["pools"]) for one in found["models"]}
    assert pools == {
        "mha": {"kv", "draft"},
        "mla": {"kv"},
        "swa": {"kv", "swa"},
        "mamba": {"kv", "mamba"},
    }
    for one in found["models"]:
        assert one["tokens_identical"]
        assert one["max_abs_diff"] == 0.0
        assert one["computed_tokens"] == 5
        assert set(one["arrived"]) == set(one["pools"])
    mha = found["models"][0]
    assert 0 < mha["draft_acceptance_decode"] < 1
    assert mha["draft_acceptance_decode"] == mha["draft_acceptance_one_process"]
    (trial,) = tmp_path.iterdir()
    assert not (trial / "models").exists(), "what is bulky is cleared away"


def test_the_end_is_tables_and_what_failed() -> None:
    rows = [("bytes", "1.0 KiB"), ("", ""), ("verdict", "FAILED")]
    shown = Table("Results", ("", "mha"), rows)
    found = Outcome(data={}, tables=[shown], failed=["FAILED mha: a claim (why)"])
    assert program._outcome_text(found, 2.0, PLAIN).splitlines() == [
        "",
        "Results",
        "         mha",
        "bytes    1.0 KiB",
        "",
        "verdict  FAILED",
        "",
        "FAILED mha: a claim (why)",
        "FAILED, 2 s in all",
    ]
    fine = Outcome(data={}, tables=[shown], failed=[])
    text = program._outcome_text(fine, 2.0, Style(colour=True))
    assert "\x1b[31mFAILED\x1b[0m" in text
    assert text.endswith("\nall as it should be, 2 s in all")


@pytest.mark.slow
def test_a_demo_takes_connections_on_loopback_alone(tmp_path: Path) -> None:
    """But for Mooncake's library, which has no setting for it, as the pages say."""
    found = set()
    words = [sys.executable, str(EXAMPLE), *TINY, "--model", "mha", "--dir"]
    with subprocess.Popen(
        [*words, str(tmp_path)], stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            found |= listening(process.pid)
            time.sleep(0.05)
    assert process.returncode == 0
    assert found == {"127.0.0.1"}


def test_every_key_of_the_answer_is_documented() -> None:
    page = (EXAMPLE / "README.md").read_text()
    source = (EXAMPLE / "model_demo" / "report.py").read_text()
    for schema, function in (("demo/1", "_stored"), ("demo-send/1", "_sent")):
        section = page.partition(f"`kvdock.{schema}`")[2].partition("\n### ")[0]
        text = source.partition(f"def {function}_model")[2].partition("\ndef ")[0]
        names = re.findall(r'^ +"(\w+)": ', text, re.MULTILINE)
        assert len(names) > 10
        for name in {*names, "model", "backend"}:
            assert f"`{name}`" in section, (schema, name)
