"""Running the kit in a process of its own, whatever a backend does to it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from waiting import until

from kvdock.config.fields import option
from kvdock.errors import KvdockError
from kvdock.testing import contract, report
from kvdock.testing.report import resolve_settings
from kvdock.testing.subprocess import Progress, Record, run_tests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiny import Shelf

SUITE = """
import os
import pytest

class TestThing:
    def test_passes(self):
        pass

    def test_fails(self):
        assert 1 + 1 == 3, "arithmetic"

    @pytest.mark.parametrize("case", [1], ids=["one"])
    def test_skips(self, case):
        pytest.skip("UNDECLARED: this")

    @pytest.mark.xfail(reason="known")
    def test_xfails(self):
        raise ValueError

    def test_raises(self):
        raise OSError("broken pipe")
"""


PATIENCE_S = 20.0


def ended(pid: int) -> bool:
    """Return whether a process has ended, or only waits to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.slow
def test_a_record_says_how_each_test_ended(tmp_path: Path) -> None:
    suite = tmp_path / "suite.py"
    suite.write_text(SUITE)
    record = run_tests([str(suite)])
    assert {one.name: one.how for one in record.ended} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_xfails": "xfailed",
        "test_raises": "failed",
    }
    by_name = {one.name: one for one in record.ended}
    assert by_name["test_fails"].raised == "AssertionError"
    assert by_name["test_fails"].why == "arithmetic"
    assert by_name["test_raises"].raised == "OSError"
    assert by_name["test_skips"].why == "UNDECLARED: this"
    assert by_name["test_skips"].case == "one"
    assert record.planned == 5
    assert not record.unfinished


def test_a_test_that_ends_the_process_is_named(tmp_path: Path) -> None:
    suite = tmp_path / "suite.py"
    suite.write_text(
        "import os, signal\n"
        "def test_first(): pass\n"
        "def test_deadly(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def test_never(): pass\n"
    )
    record = run_tests([str(suite)])
    assert record.unfinished.endswith("test_deadly")
    assert record.status == -11
    assert [one.name for one in record.ended] == ["test_first"]


@pytest.mark.slow
def test_a_test_that_holds_the_interpreter_is_given_up_at_its_own_limit(
    tmp_path: Path,
) -> None:
    """No thread of that process could notice it."""
    suite = tmp_path / "suite.py"
    suite.write_text(
        "import ctypes\n"
        "def test_passes(): pass\n"
        # Unlike CDLL, this one keeps the lock.
        "def test_holds(): ctypes.PyDLL(None).sleep(60)\n"
    )
    began = time.monotonic()
    record = run_tests([str(suite)], test_limit_s=1.0)
    assert time.monotonic() - began < PATIENCE_S
    assert record.said.startswith("test_holds did not end within 1 s: ")
    assert record.unfinished.endswith("test_holds")
    assert [one.name for one in record.ended] == ["test_passes"]


@pytest.mark.slow
def test_progress_is_told_while_tests_run(tmp_path: Path) -> None:
    suite = tmp_path / "suite.py"
    suite.write_text(
        "import time\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "def test_waits(): time.sleep(60)\n"
    )
    told = []

    def watch(progress: Progress) -> None:
        told.append(progress)
        if progress.current.endswith("test_waits"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tests([str(suite)], watch=watch)
    assert (told[-1].planned, told[-1].ended, told[-1].failed) == (3, 2, 1)


GRANDCHILD = """
import subprocess, sys, time
from pathlib import Path

def test_waits():
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(sleep)
    Path("{told}").write_text(str(child.pid))
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_run_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    suite, told = tmp_path / "suite.py", tmp_path / "pid"
    suite.write_text(GRANDCHILD.format(told=told))
    run_tests([str(suite)], timeout_s=8.0)
    until(lambda: ended(int(told.read_text())))


@pytest.mark.slow
def test_a_run_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    suite, told = tmp_path / "suite.py", tmp_path / "pid"
    suite.write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "def test_waits():\n"
        f"    Path({str(told)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    code = (
        f"from kvdock.testing.subprocess import run_tests; run_tests([{str(suite)!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as asker:
        until(lambda: told.exists() and bool(told.read_text()))
        asker.kill()
    until(lambda: ended(int(told.read_text())))


LYING = """
import attrs
from kvdock import PoolKind
from mutants import stored


class Lying(stored.NothingVerified):
    name = "lying"

    def manifest(self):
        full = super().manifest()
        return attrs.evolve(full, kinds={PoolKind.MHA: full.kinds[PoolKind.MHA]})


plugin = Lying()
"""


@pytest.mark.slow
def test_integrity_that_nothing_could_try_is_declared_and_not_proven(
    shelf: Shelf,
) -> None:
    """It declares integrity, verifies nothing, and brings no oracle."""
    shelf.add("lying", LYING, attribute="plugin")
    settings = {"root": "{tmp}/store"}
    small = {"root": "{tmp}/small", "quota_bytes": "1 MiB"}
    checked = report.check("lying", settings, small=small, only="heals or shift")
    assert not checked.failed
    # As if all others had been run as well.
    words = attrs.evolve(checked, only="").unproven
    (lacking,) = [word for word in words if str(word.claim) == "integrity"]
    assert lacking.reasons == ("the author gives no oracle",)


def test_a_quick_check_leaves_out_slow_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(words: Sequence[str], **_: object) -> Record:
        asked.extend(words)
        return Record(ended=(), planned=0, unfinished="", status=0, broken="", said="")

    monkeypatch.setattr(report, "run_tests", run)
    report.check("reference:memory", {}, only="clear or damage", quick=True)
    first, *others = asked[asked.index("-k") + 1].split(" and ")
    assert first == "(clear or damage)"
    assert "not test_a_clear_forgets_thousands_of_pages" in others
    tests = contract.groups(contract.BackendContract)
    tests |= contract.groups(contract.TierContract)
    tests |= contract.groups(contract.FaultContract)
    assert {one.removeprefix("not ") for one in others} < tests.keys()
    assert "not test_pages_come_back_as_they_were_stored" not in others


def test_missing_folders_become_temporary_ones(tmp_path: Path) -> None:
    @attrs.frozen
    class Settings:
        root: Path = option(help="Where.")
        spare: Path | None = option(None, help="Where else.")

    assert resolve_settings(Settings, {}, tmp_path) == {"root": str(tmp_path / "root")}
    assert resolve_settings(Settings, {"root": "/data"}, tmp_path) == {"root": "/data"}
    assert resolve_settings(Settings, {"root": "{tmp}/a"}, tmp_path) == {
        "root": f"{tmp_path}/a"
    }
    assert resolve_settings(None, {}, tmp_path) == {}


def test_a_missing_pytest_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdock.testing.report.find_spec", lambda _: None)
    with pytest.raises(KvdockError, match="pytest and hypothesis") as caught:
        report.check("any", {})
    assert "kvdock[testing]" in caught.value.fix


def test_asking_for_a_checkup_imports_no_pytest() -> None:
    code = "import sys, kvdock.testing.report; print('pytest' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.strip() == "False"
