"""`kvdock demo --send` as the command line runs it, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE_S = 300
KVDOCK = Path(sys.executable).with_name("kvdock")
TINY = ("demo", "--send", "--size", "tiny", "--backend", "nixl")


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
        [KVDOCK, *TINY, *more],
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


def test_a_demo_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        process.kill()
        process.wait()
        check_all_ended(tmp_path)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_process_that_dies_is_named_and_ends_the_demo(
    role: str, tmp_path: Path
) -> None:
    with running(tmp_path, "--json") as process:
        (pid,) = [
            pid
            for pid, words in processes_of(tmp_path).items()
            if f"{role}.json" in words
        ]
        os.kill(pid, signal.SIGKILL)
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
    assert done.stderr.startswith(
        "kvdock: no installed backend declares direct transfer"
    )


def sent(
    arguments: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVDOCK, "demo", "--send", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


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


def test_every_key_of_the_answer_is_documented() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "cli-json.md"
    section = (
        page.read_text().partition("`kvdock.demo-send/1`")[2].partition("\n## ")[0]
    )
    source = Path(__file__).parents[1] / "engines/transformers/src/kvdock_transformers"
    text = (source / "demo/send/presentation.py").read_text()
    names = re.findall(r'^ +"(\w+)": ', text, re.MULTILINE)
    assert len(names) > 15
    for name in set(names) - {"schema"}:
        assert f"`{name}`" in section
