"""`kvdock check`: the report, and how it asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from golden import check_report, check_text

from kvdock.errors import PluginError, SettingsError
from kvdock.testing import CheckReport, FinishedRun
from kvdock.testing.claims import Claim
from kvdock.testing.report import _about as checkup_of
from kvdock.testing.subprocess import Record
from kvdock_cli.commands.check import check
from kvdock_cli.commands.doctor import doctor
from kvdock_cli.output import UsageProblem
from kvdock_cli.reports import check as report

if TYPE_CHECKING:
    from tiny import Shelf

GOLDEN = Path(__file__).with_name("golden")
AT = "/lib/kvdock_alpha/plugin.py:41 in kvdock_batch_io"
GROUPS = {
    "test_declared": "What is declared is true",
    "test_bytes": "Bytes come back",
    "test_late": "Nothing is late",
}


def ended(
    name: str, case: str, how: str, why: str = "", raised: str = ""
) -> FinishedRun:
    return FinishedRun("TestContract", name, case, how, why, raised, 0.5)


def checkup(*tests: FinishedRun, **changes: object) -> CheckReport:
    record = Record(
        ended=tests, planned=len(tests), unfinished="", status=0, broken="", said=""
    )
    about = {
        "backend": "alpha",
        "kvdock": "0.1.0, API 2",
        "python": "3.11.7 on Linux",
        "settings": "root=/data",
    }
    record = attrs.evolve(record, **changes)  # type: ignore[arg-type] # its fields
    return CheckReport(name="alpha", about=about, record=record, groups=GROUPS)


GOOD = checkup(
    ended("test_declared", "mha", "passed"),
    ended("test_declared", "mla", "skipped", "UNDECLARED: draft of mla pools"),
    ended("test_bytes", "mha", "passed"),
)
ALIKE = checkup(
    *(
        FinishedRun(
            "TestContract", test, case, "failed", why, "AssertionError", 0.5, AT
        )
        for test, case, why in (
            ("test_bytes", "mha", "wrong bytes: page 3 does not hold mha.L0-4"),
            ("test_bytes", "mla", "wrong bytes: page 7 does not hold mla.L0-4"),
            ("test_late", "swa", "wrong bytes: page 1 does not hold mla.L0-4"),
            ("test_late", "", "a call took 3.5 s"),
        )
    )
)
UNPROVEN = attrs.evolve(
    checkup(
        ended("test_declared", "mha", "passed"),
        ended("test_bytes", "zeroed", "skipped", "the author gives no oracle"),
    ),
    claims=(Claim("integrity", "native"), Claim("zero_copy", "native")),
    proofs={"test_bytes": "integrity", "test_declared": "zero_copy"},
)
BAD = checkup(
    ended("test_declared", "mha", "passed"),
    ended("test_bytes", "mha-page_first", "failed", "wrong bytes", "AssertionError"),
    ended("test_bytes", "mla-page_first", "failed", "wrong bytes", "AssertionError"),
    ended("test_late", "", "failed", "no route\nto host", "OSError"),
    ended("test_late", "x", "xfailed", "the server is slow"),
    ended("test_bytes", "swa", "skipped", "UNDECLARED: draft of mla pools"),
)
DEAD = checkup(
    ended("test_declared", "mha", "passed"),
    planned=9,
    unfinished="installed.py::TestContract::test_bytes[mha]",
    status=-11,
    said="Fatal Python error: Segmentation fault",
)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("check", GOOD),
        ("check-bad", BAD),
        ("check-dead", DEAD),
        ("check-unproven", UNPROVEN),
        ("check-alike", ALIKE),
    ],
)
def test_the_report_reads_as_it_did_and_fits(name: str, made: CheckReport) -> None:
    check_report(
        GOLDEN / f"{name}.txt", report.report(made, "alpha (kvdock-alpha 1.2)")
    )


def test_the_report_as_data_is_what_the_docs_say() -> None:
    data = report.report(BAD, "alpha (kvdock-alpha 1.2)").as_data()
    check_text(GOLDEN / "check.json", json.dumps(data, indent=1))
    assert data["ok"] is False


@pytest.mark.parametrize(
    ("made", "ok"),
    [(GOOD, True), (BAD, False), (DEAD, False), (UNPROVEN, False)],
)
def test_ok_means_that_all_ran_and_none_failed(made: CheckReport, ok: bool) -> None:  # noqa: FBT001 - a case
    assert made.ok is ok


def test_what_is_not_proven_is_data_too() -> None:
    assert report.report(UNPROVEN, "alpha").as_data()["unproven"] == [
        {
            "capability": "integrity",
            "declared": "native",
            "reasons": ["the author gives no oracle"],
        }
    ]


def test_a_run_without_a_test_is_not_ok() -> None:
    assert not checkup().ok
    assert "no test ran" in report.report(checkup(), "alpha").text()


def test_a_backend_that_is_not_installed_is_named() -> None:
    with pytest.raises(PluginError, match="no backend 'fiel'"):
        check("fiel")


def test_a_run_of_some_tests_is_not_a_verdict() -> None:
    some = attrs.evolve(UNPROVEN, only="declared")
    assert (some.ok, some.unproven) == (True, ())
    said = " ".join(report.report(some, "alpha").text().split())
    assert "keeps what" not in said
    assert "alpha passes the tests with 'declared' in their names" in said
    assert (
        "does not pass" in report.report(attrs.evolve(BAD, only="late"), "alpha").text()
    )
    assert report.report(some, "alpha").as_data()["only"] == "declared"


def test_a_quick_run_is_not_a_verdict_either() -> None:
    some = attrs.evolve(UNPROVEN, quick=True)
    assert (some.ok, some.unproven) == (True, ())
    said = " ".join(report.report(some, "alpha").text().split())
    assert "alpha passes the quick tests; a run of all tests is a verdict" in said
    both = report.report(attrs.evolve(BAD, quick=True, only="late"), "alpha")
    assert "does not pass the quick tests with 'late' in their names" in both.text()
    assert both.as_data()["quick"]


def test_a_word_that_no_test_has_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageProblem, match="not one word"):
        check("file", only="a or b")
    monkeypatch.setattr("kvdock.testing.report.check", lambda *_, **__: checkup())
    with pytest.raises(UsageProblem, match="no test has 'clera' in its name"):
        check("file", only="clera")


Checked = Callable[..., CheckReport]


def test_settings_reach_the_kit_from_wherever_they_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def stand_in(name: str, settings: object, **words: object) -> CheckReport:
        asked.update(name=name, settings=settings, **words)
        return GOOD

    monkeypatch.setattr("kvdock.testing.report.check", stand_in)
    monkeypatch.setenv("KVDOCK_BACKENDS__FILE__ROOT", "/of/the/environment")
    monkeypatch.setenv("KVDOCK_BACKENDS__FILE__THREADS", "1")
    assert check("file", set_=("root=/x",), small=("quota=1 MiB",), faults=True) == 0
    assert asked["settings"] == {"root": "/x", "threads": "1"}
    assert asked["small"] == {"quota": "1 MiB"}
    assert asked["faults"] is True
    assert "keeps what it declares" in capsys.readouterr().out


def test_a_chain_reaches_the_kit_with_the_settings_of_each_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, object] = {}

    def stand_in(name: str, settings: object, **words: object) -> CheckReport:
        asked.update(name=name, settings=settings, **words)
        return GOOD

    monkeypatch.setattr("kvdock.testing.report.check", stand_in)
    for tier in ("memory", "disk"):
        monkeypatch.setenv(f"KVDOCK_BACKENDS__{tier.upper()}__PLUGIN", "file")
    monkeypatch.setenv("KVDOCK_BACKENDS__MEMORY__ROOT", str(tmp_path))
    monkeypatch.setenv("KVDOCK_BACKENDS__DISK__THREADS", "1")
    assert check(tiers="memory,disk") == 0
    assert asked["name"] == "file"
    assert asked["tiers"] == {
        "memory": {"root": str(tmp_path), "plugin": "file"},
        "disk": {"threads": "1", "plugin": "file"},
    }
    for words, message in (
        ({}, "either a backend or --tiers"),
        ({"tiers": "memory,disk", "faults": True}, "goes without"),
        ({"tiers": "memory,disk", "set_": ("threads=1",)}, "goes without --set"),
    ):
        with pytest.raises(UsageProblem, match=message):
            check(**words)


@pytest.mark.parametrize(
    ("set_", "small", "message"),
    [
        (("rot=/x",), (), "unknown setting 'rot'.*Did you mean 'root'"),
        (("threads=many",), (), "threads: 'many' is not a whole number"),
        ((), ("quotta=1 MiB",), "unknown setting 'quotta'.*Did you mean 'quota'"),
    ],
)
def test_wrong_settings_are_refused_before_a_test_runs(
    monkeypatch: pytest.MonkeyPatch,
    set_: tuple[str, ...],
    small: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.delattr("kvdock.testing.report.check")
    with pytest.raises(SettingsError, match=message):
        check("file", set_=set_, small=small)


def test_the_report_shows_no_secret() -> None:
    told = checkup_of("alpha", {"token": "sesame", "root": "/x"}, {}, ("sesame",))
    assert told["settings"] == "token=<hidden> root=/x"


def test_a_process_that_ends_between_two_tests_is_no_success() -> None:
    gone = checkup(ended("test_declared", "mha", "passed"), planned=9, status=0)
    assert not gone.ok
    text, data = (
        report.report(gone, "alpha").text(),
        report.report(gone, "alpha").as_data(),
    )
    assert data["ok"] is False
    assert data["died"] == "the process ended with status 0 after test_declared"
    assert "8 tests were not run" in text


def test_a_run_that_ended_before_its_first_test_says_so() -> None:
    gone = checkup(status=-9, said="the run did not end within 1 s")
    data = report.report(gone, "alpha").as_data()
    assert data["died"] == "the process was ended by SIGKILL before the first test"


def test_a_test_whose_teardown_failed_is_not_counted_for_another_one() -> None:
    twice = ended("test_declared", "mha", "passed"), ended("test_declared", "mha", "x")
    assert checkup(*twice, planned=2).record.left == 1


def test_a_folder_is_where_the_command_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, object] = {}

    def stand_in(_: str, settings: object, **words: object) -> CheckReport:
        asked.update(settings=settings, **words)
        return GOOD

    monkeypatch.setattr("kvdock.testing.report.check", stand_in)
    monkeypatch.chdir(tmp_path)
    check("file", set_=("root=here",), small=("root={tmp}/small",))
    assert asked["settings"] == {"root": str(tmp_path / "here")}
    assert asked["small"] == {"root": "{tmp}/small"}


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan"), 1e12])
def test_a_timeout_that_is_no_time_is_a_wrong_question(timeout: float) -> None:
    with pytest.raises(UsageProblem, match="is not a time to wait"):
        check("file", timeout=timeout)
    with pytest.raises(UsageProblem, match="is not a time to wait"):
        doctor("file", timeout=timeout)


def test_the_probe_may_take_as_long_as_the_run(shelf: Shelf) -> None:
    probe = """def kvdock_probe(config):
    import threading
    threading.Event().wait()

@hookimpl
def kvdock_manifest"""
    shelf.add_backend("stuck", ("def kvdock_manifest", probe))
    done = shelf.kvdock("check", "stuck", "--timeout", "1")
    assert done.returncode == 1
    assert "no answer within 1 s" in done.stderr
