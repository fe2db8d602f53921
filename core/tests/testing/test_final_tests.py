"""What is the contract's stays as it is, whatever a suite's author tries."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

from kvdock.testing import BackendContract, SealedError
from kvdock.testing.subprocess import Record, run_tests

if TYPE_CHECKING:
    from pathlib import Path

ONE = "test_putting_again_is_harmless"


def passing(*_: object, **__: object) -> None:
    """Pass, whatever the backend does."""


def excused(mark: Any) -> Any:
    """Return a test that fails, with a mark."""

    def failing(*_: object) -> None:
        raise AssertionError

    return mark(failing)


MIXIN = type("Mixin", (), {ONE: passing})
WRAPPER = wraps(getattr(BackendContract, ONE))(lambda *_: None)
MACHINERY = type("Mixin", (), {"pytest_generate_tests": passing})
LATER = type("Mine", (BackendContract,), {"plugin": "mine"})


@pytest.mark.parametrize(
    ("bases", "members", "said"),
    [
        ((BackendContract,), {ONE: passing}, f"Suite overrides {ONE}"),
        ((BackendContract,), {ONE: None}, f"Suite overrides {ONE}"),
        ((LATER,), {ONE: None}, ONE),
        ((MIXIN, BackendContract), {}, f"Suite overrides {ONE}"),
        ((MACHINERY, BackendContract), {}, "pytest_generate_tests"),
        # What looks like the test.
        ((BackendContract,), {ONE: WRAPPER}, ONE),
        ((BackendContract,), {ONE: excused(pytest.mark.xfail(reason=" "))}, ONE),
        ((BackendContract,), {"harness": passing}, "Yours to say are"),
        ((BackendContract,), {"backend": passing}, "Yours to say are"),
        ((BackendContract,), {"pytest_generate_tests": passing}, "Yours to say are"),
    ],
)
def test_what_is_the_contracts_cannot_be_replaced(
    bases: tuple[type, ...], members: dict[str, object], said: str
) -> None:
    with pytest.raises(SealedError, match=said):
        type("Suite", bases, members)


def test_an_override_that_says_why_is_allowed() -> None:
    excuse = excused(pytest.mark.xfail(reason="the server forgets, issue 7"))
    honest = type("Honest", (BackendContract,), {"plugin": "honest", ONE: excuse})
    assert getattr(honest, ONE) is excuse


def test_a_base_class_behind_the_contract_changes_nothing() -> None:
    mixed = type("Mixed", (BackendContract, MIXIN), {})
    assert getattr(mixed, ONE) is getattr(BackendContract, ONE)


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.skip(reason="later"),
        pytest.mark.skipif(True, reason="later"),
        pytest.mark.xfail(reason="later"),
    ],
    ids=lambda mark: mark.name,
)
@pytest.mark.parametrize("several", [False, True])
def test_a_class_cannot_be_marked_away_as_a_whole(mark: Any, *, several: bool) -> None:
    marks = [pytest.mark.usefixtures("tmp_path"), mark] if several else mark
    with pytest.raises(SealedError, match=f"with {mark.name}"):
        type("Later", (BackendContract,), {"pytestmark": marks})
    mixin = type("Mixin", (), {"pytestmark": marks})
    with pytest.raises(SealedError, match=f"with {mark.name}"):
        type("Mixed", (mixin, BackendContract), {})


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.xfail(False, reason="issue 12"),
        pytest.mark.xfail(condition=False, reason="issue 12"),
        pytest.mark.xfail(reason="issue 12", strict=False),
        pytest.mark.xfail(),
        pytest.mark.skip(reason="issue 12"),
    ],
    ids=["condition", "named_condition", "lenient", "mute", "skip"],
)
def test_an_excuse_that_may_hide_a_pass_is_refused(mark: Any) -> None:
    with pytest.raises(SealedError, match=ONE):
        type("Sly", (BackendContract,), {ONE: excused(mark)})


def test_no_second_mark_softens_an_excuse() -> None:
    marked = excused(pytest.mark.xfail(reason="issue 12"))
    marked = pytest.mark.skipif(True, reason="not today")(marked)
    with pytest.raises(SealedError, match=ONE):
        type("Sly", (BackendContract,), {ONE: marked})


SUITE = """
import pytest
from kvdock.testing import BackendContract

{module}

{decorator}
class TestSealed(BackendContract):
    plugin = "reference:memory"

    @pytest.mark.xfail(reason="issue 12")
    def {name}(self):
        pass
"""


def ran(folder: Path, *, module: str = "", decorator: str = "") -> Record:
    """Run one overridden test in a pytest of its own, with no settings."""
    suite = folder / "suite.py"
    suite.write_text(SUITE.format(name=ONE, module=module, decorator=decorator))
    return run_tests([f"{suite}::TestSealed::{ONE}"])


def test_an_excuse_fails_when_the_test_passes_whatever_the_settings_say(
    tmp_path: Path,
) -> None:
    assert [one.how for one in ran(tmp_path).ended] == ["failed"]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["skip(reason='later')", "xfail(reason='later')"])
def test_a_class_cannot_be_marked_away_by_a_decorator(
    tmp_path: Path, word: str
) -> None:
    record = ran(tmp_path, decorator=f"@pytest.mark.{word}")
    assert "SealedError" in record.broken
    assert not record.ended


@pytest.mark.slow
def test_a_module_cannot_expect_the_contract_to_fail(tmp_path: Path) -> None:
    record = ran(tmp_path, module="pytestmark = pytest.mark.xfail(reason='later')")
    assert "marks the whole contract with xfail" in record.broken
    assert not record.ended


@pytest.mark.slow
def test_a_module_may_skip_where_a_server_is_missing(tmp_path: Path) -> None:
    record = ran(tmp_path, module="pytestmark = pytest.mark.skip(reason='no server')")
    assert [(one.how, one.why) for one in record.ended] == [("skipped", "no server")]


@pytest.mark.slow
def test_a_suite_that_names_no_backend_is_told_what_to_write(tmp_path: Path) -> None:
    suite = tmp_path / "suite.py"
    suite.write_text(
        "from kvdock.testing import BackendContract\n"
        "class TestNothing(BackendContract): pass\n"
    )
    broken = run_tests([str(suite)]).broken
    assert "TestNothing does not say which backend it is about" in broken
    assert 'plugin = "mine"' in broken
