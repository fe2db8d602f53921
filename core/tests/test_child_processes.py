from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvdock.child_processes import ended_with_parent
from kvdock.synchronization import ProcessGuard

LONG = [sys.executable, "-c", "import time; time.sleep(600)"]

PARENT = (
    "import subprocess, time\n"
    "from kvdock.child_processes import ended_with_parent\n"
    f"child = subprocess.Popen(ended_with_parent({LONG!r}))\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" without one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def words_of(command: Path) -> list[str]:
    return command.read_bytes().decode().split("\0")[:-1]


def runs(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def wait_until_ended(pid: int) -> bool:
    until = time.monotonic() + 60
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not runs(pid)


@linux
def test_a_program_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as it:
        assert it.stdout
        try:
            child = int(it.stdout.readline())
            command = Path(f"/proc/{child}/cmdline")
            # What stands before the program is replaced by it. In between a process
            # has no command line.
            until = time.monotonic() + 60
            while words_of(command) != LONG and time.monotonic() < until:
                time.sleep(0.01)
            assert words_of(command) == LONG
        finally:
            it.kill()
    try:
        assert wait_until_ended(child)
    finally:
        if runs(child):
            os.kill(child, signal.SIGKILL)


@linux
def test_a_program_does_not_begin_after_its_parent_has_ended() -> None:
    command = ended_with_parent([sys.executable, "-c", "print('begun')"])
    (at,) = (i for i, word in enumerate(command) if word == str(os.getpid()))
    begun = subprocess.run(command, capture_output=True, check=True)
    assert begun.stdout == b"begun\n"
    command[at] = "1"
    late = subprocess.run(command, capture_output=True, check=True)
    assert late.stdout == b""


def test_a_thread_that_may_end_first_binds_no_program() -> None:
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(ended_with_parent(LONG)))
    thread.start()
    thread.join()
    assert found == [LONG]


def test_a_guard_tells_a_forked_child_from_its_process() -> None:
    guard = ProcessGuard()
    child = os.fork()
    if not child:
        # A new guard is the child's own.
        os._exit(int(guard.forked) + 2 * int(ProcessGuard().forked))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert not guard.forked
