"""The doctor says what is missing, and attaching says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdock import AttachConfig, Dock, Finding
from kvdock.self_test import Trial, try_backend
from kvdock_nixl import preconditions
from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.io_engine import NixlIOEngine
from kvdock_nixl.settings import IOMethod
from kvdock_segments import io

DENIED = Path(__file__).with_name("denied.py")


def findings(root: Path, **settings: object) -> list[Finding]:
    backend = Dock.load(require=["nixl"]).backends["nixl"]
    given = backend.settings({"root": root, "free_space": 0, **settings})
    return list(backend.probe(AttachConfig(settings=given)))


def tried(root: Path, **settings: object) -> Trial:
    backend = Dock.load(require=["nixl"]).backends["nixl"]
    return try_backend(backend, {"root": str(root), "free_space": 0, **settings})


@pytest.mark.parametrize(
    "settings", [{}, {"direct": True}, {"io": "aio", "direct": True}]
)
def test_a_page_comes_back_through_nixl_and_leaves_no_file(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    before = MOVED.read()
    found = tried(tmp_path / "root", **settings).short
    assert all(one.ok for one in found), found
    assert found[0].what.startswith("nixl-cu12 ")
    assert any("self test: a page of each kind" in one.what for one in found)
    after = MOVED.read()
    assert after[Way.NIXL_WRITE] > before[Way.NIXL_WRITE]
    assert not (tmp_path / "root").exists()


def test_a_page_that_only_the_kernel_can_move_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = NixlIOEngine.move

    def past(self: NixlIOEngine, request: Any) -> Any:
        MOVED.add(Way.KERNEL_READ, 1)
        return move(self, request)

    monkeypatch.setattr(NixlIOEngine, "move", past)
    wrong = [one for one in tried(tmp_path / "root").moved if not one.ok]
    assert "a page was not stored by nixl" in wrong[0].what
    assert "NIXL did not move a page, and the kernel did" in wrong[0].hint


def test_a_root_that_cannot_be_used_is_named_and_not_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    found = findings(root)
    assert [one.ok for one in found] == [True, False]
    assert "others could plant pages" in found[-1].what


@pytest.mark.parametrize("io", ["gds", "gds_mt"])
def test_without_a_gpu_the_doctor_says_what_gpudirect_storage_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: str
) -> None:
    monkeypatch.setattr(preconditions, "_loads", lambda _: False)
    last = findings(tmp_path, io=io, direct=True)[-1]
    assert not last.ok
    for missing in ("libcuda.so.1", "libcudart.so.12", "libcufile.so.0"):
        assert missing in last.what
    assert 'io = "io_uring"' in last.hint


def test_a_host_whose_asynchronous_requests_are_reserved_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(path: Path) -> str:
        return {"aio-nr": "65536", "aio-max-nr": "65536"}[path.name]

    monkeypatch.setattr(Path, "read_text", read)
    what, fix = preconditions.why_not(IOMethod.AIO)
    assert "65536 of 65536" in what
    assert "fs.aio-max-nr" in fix


def denied(program: str) -> str:
    command = [sys.executable, str(DENIED), program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "seccomp" in done.stderr.splitlines()[-1:]:
        pytest.skip("system calls cannot be denied here")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_where_io_uring_is_denied_the_doctor_names_the_alternative(
    tmp_path: Path,
) -> None:
    program = (
        "import json, sys\n"
        "from kvdock_nixl.probe import findings\n"
        "from kvdock_nixl.settings import NixlSettings\n"
        f"for more in {{}}, {{'io': 'aio', 'direct': True}}:\n"
        f"    found = findings(NixlSettings(root={str(tmp_path / 'root')!r}, "
        "free_space=0, **more))\n"
        "    print(json.dumps([found[-1].ok, found[-1].what, found[-1].hint]))\n"
    )
    bad, good = map(json.loads, denied(program).splitlines())
    assert not bad[0]
    assert "io_uring is denied" in bad[1]
    assert "seccomp" in bad[1]
    assert 'io = "aio" and direct = true' in bad[2]
    # Nothing falls back by itself: the alternative is asked for, and then works.
    assert good[0], good


def test_where_io_uring_is_denied_attaching_fails_with_the_same_words() -> None:
    program = (
        "from kvdock import KvdockError\n"
        "from kvdock_nixl.agent_pair import AGENTS\n"
        "from kvdock_nixl.settings import IOMethod\n"
        "try:\n"
        "    AGENTS.acquire(IOMethod.IO_URING)\n"
        "except KvdockError as error:\n"
        "    print(error)\n"
    )
    said = denied(program)
    assert "cannot move bytes with io_uring: io_uring is denied" in said
    assert 'io = "aio"' in said


def test_a_trial_ends_although_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, nbytes: int) -> None:
        del fd, nbytes
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io, "preallocate_file", full)
    wrong = [one for one in tried(tmp_path / "root").moved if not one.ok]
    assert "a page was not stored by nixl" in wrong[0].what
    assert "refused" in wrong[0].hint
    assert not (tmp_path / "root").exists()
