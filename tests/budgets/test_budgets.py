"""Source and a page's way stay within the numbers of `budgets.toml`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import budgets
import pytest
from benchmark_scripts import load_script
from budgets import Budget, Figures
from source_sizes import KINDS, ROOT, size

from kvdock import Attachment

SAMPLE = '''
"""What a sample is for."""
import os

class Sample:
    def call(self, near, far):
        """Call it."""
        return call(near, far)
'''


def checked(figures: Figures, note: Callable[[str, str], None]) -> list[str]:
    """Return what is over; note for the end of the run what could be lowered."""
    limits = {
        name: budget
        for name, budget in budgets.read(budgets.FILE.read_text()).items()
        if name.partition(".")[0] in {name.partition(".")[0] for name in figures}
    }
    for line in budgets.to_lower(figures, limits):
        note("budgets", line)
    return budgets.over(figures, limits)


def test_the_source_is_no_larger_than_its_budgets(
    record_property: Callable[[str, str], None],
) -> None:
    assert not checked(budgets.source_figures(), record_property)


def test_a_page_goes_no_longer_way_than_its_budgets(
    record_property: Callable[[str, str], None],
) -> None:
    if reason := budgets.not_comparable():
        pytest.skip(reason)
    assert not checked(budgets.way_figures(), record_property)


def test_the_file_is_as_the_command_writes_it() -> None:
    """After a merge a number may stand twice: `make budgets` decides."""
    text = budgets.FILE.read_text()
    assert budgets.written(budgets.read(text)) == text


def git(*arguments: str) -> str:
    """Return what git prints; "" where it has no such commit or file."""
    command = ["git", "-C", str(ROOT), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout if ran.returncode == 0 else ""


def test_a_number_that_rose_says_why() -> None:
    file = str(budgets.FILE.relative_to(ROOT))
    text = budgets.FILE.read_text()
    before = git("show", f"HEAD:{file}")
    if before == text:
        changed = git("log", "-1", "--format=%H", "--", file).strip()
        before = git("show", f"{changed}^:{file}")
    assert not budgets.unexplained(budgets.read(before), budgets.read(text))


@pytest.mark.parametrize(
    ("planted", "kinds"),
    [
        ("        near = far", {"statements"}),
        ("        found = near", {"statements", "vague_names"}),
        ("        for one in near: far", {"statements", "vague_names"}),
        ("        both = near, far; call(*both)", {"statements", "packed_calls"}),
        ("        call(*(near, far))", {"statements", "packed_calls"}),
        ("        def more(self): pass", {"statements", "functions"}),
        ("class More: pass", {"statements", "classes"}),
    ],
)
def test_what_is_planted_in_the_source_is_over_its_budget(
    planted: str, kinds: set[str]
) -> None:
    before, after = size(SAMPLE), size(f"{SAMPLE}{planted}\n")
    limits = {f"{kind}.sample": Budget(before[kind]) for kind in KINDS}
    over = budgets.over({f"{kind}.sample": after[kind] for kind in KINDS}, limits)
    assert {line.partition(".")[0] for line in over} == kinds


def test_docstrings_imports_and_parameters_that_are_unpacked_cost_nothing() -> None:
    more = 'import sys\ndef call(*near):\n    """Call it again."""\n    call(*near)\n'
    assert size(SAMPLE + more) - size(SAMPLE) == {"statements": 2, "functions": 1}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("page_path")


@pytest.fixture(scope="module")
def way(script: ModuleType) -> dict[str, float]:
    return dict(script.warm_figures(script.warm_calls(1), 1))


@pytest.fixture
def _planted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    get = Attachment.get

    def planted(*arguments: object) -> object:
        return get(*arguments)  # type: ignore[arg-type] # as they came

    monkeypatch.setattr(Attachment, "get", planted)


@pytest.mark.usefixtures("_planted_call")
def test_one_planted_call_is_over_its_budget(
    script: ModuleType, way: dict[str, float]
) -> None:
    figures = budgets.by_section(script.warm_figures(script.warm_calls(1), 1))
    limits = {name: Budget(int(most)) for name, most in budgets.by_section(way).items()}
    assert {line.partition(" ")[0] for line in budgets.over(figures, limits)} == {
        "way.get_1_calls",
        "way.get_frames",
    }


def test_a_way_that_reaches_no_system_call_is_a_failure(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing = {name: [script.Call()] for name in ("get", "exists", "put")}
    monkeypatch.setattr(script, "warm_calls", lambda *_: nothing)
    monkeypatch.setattr(script, "full_store", lambda: [script.Call()])
    monkeypatch.setattr(script, "handoffs", dict)
    assert script.main([]) == 1
    assert "get: no preadv was seen" in capsys.readouterr().out


BEFORE = {"way.calls": Budget(10), "way.frames": Budget(5)}


def test_budgets_only_fall_by_themselves() -> None:
    figures = {"way.calls": 9, "way.frames": 6}
    assert budgets.over(figures, BEFORE) == ["way.frames is 6, at most 5"]
    assert budgets.to_lower(figures, BEFORE) == ["way.calls could be 9 instead of 10"]
    assert budgets.lowered(figures, BEFORE) == {
        "way.calls": Budget(9),
        "way.frames": Budget(5),
    }


def test_a_budget_that_rises_keeps_its_reason_until_the_rise_is_undone() -> None:
    raised = budgets.raised({"way.calls": 12}, BEFORE, "a step more")
    assert raised["way.calls"] == Budget(12, "10: a step more")
    assert budgets.read(budgets.written(raised)) == raised
    assert budgets.lowered({"way.calls": 11}, raised)["way.calls"].why
    assert not budgets.lowered({"way.calls": 10}, raised)["way.calls"].why


def test_a_budget_that_rises_without_a_reason_of_its_own_is_noticed() -> None:
    once = BEFORE | {"way.calls": Budget(12, "10: a step more")}
    twice = once | {"way.calls": Budget(13, "10: a step more")}
    assert not budgets.unexplained(BEFORE, once)
    assert budgets.unexplained(once, twice)
    assert budgets.unexplained(BEFORE, BEFORE | {"way.calls": Budget(11)})
    assert not budgets.unexplained(once, BEFORE)


def test_a_figure_without_a_budget_is_over() -> None:
    assert budgets.over({"way.more": 1}, BEFORE) == ["way.more is 1 and has no budget"]
    assert budgets.raised({"way.more": 1}, {}, "new") == {"way.more": Budget(1)}


def test_of_a_number_that_a_merge_left_twice_the_larger_one_counts() -> None:
    text = "[way]\ncalls = 9\ncalls = 12 # from 10: a step more\n"
    assert budgets.read(text) == {"way.calls": Budget(12, "10: a step more")}
    with pytest.raises(ValueError, match="no budget"):
        budgets.read("[way]\ncalls = many\n")


def test_figures_that_vary_have_room() -> None:
    figures = budgets.by_section({"put_full_calls": 99.5, "put_1_calls": 100})
    assert figures == {"varying.put_full_calls": 100, "way.put_1_calls": 100}
    assert budgets.raised(figures, {}, "new") == {
        "varying.put_full_calls": Budget(120),
        "way.put_1_calls": Budget(100),
    }
    limits = {"varying.calls": Budget(120)}
    assert budgets.lowered({"varying.calls": 91}, limits) == limits
    assert budgets.lowered({"varying.calls": 80}, limits) == {
        "varying.calls": Budget(96)
    }


def test_the_command_lowers_and_refuses_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "budgets.toml"
    monkeypatch.setattr(budgets, "FILE", file)
    monkeypatch.setattr(budgets, "not_comparable", str)
    monkeypatch.setattr(budgets, "source_figures", dict)
    monkeypatch.setattr(budgets, "way_figures", lambda: {"way.a": 9, "way.b": 6})
    file.write_text("[way]\na = 10\nb = 5\n")
    assert budgets.main([""]) == 1
    assert "a = 9\nb = 5\n" in file.read_text()
    assert capsys.readouterr().out == "way.b is 6, at most 5\n"
    assert budgets.main(["a step more"]) == 0
    assert "b = 6 # from 5: a step more\n" in file.read_text()
