"""The core takes a plugin's word for its bytes only with a report of its very files."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvdock.plugin.evidence import NO_REPORT, REPORT, digest_of, why_unproven
from kvdock.plugin.manifest import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "package_of_a_plugin"
PLUGIN = f"{NAME}.plugin:build"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of a loaded plugin."""
    package = tmp_path / NAME
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "store.py").write_text("VERIFIED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__(NAME)
    yield package
    del sys.modules[NAME]


def report(folder: Path, **changes: Any) -> None:
    """Write a report of what is there now."""
    whole = {
        "ok": True,
        "evidence": {"contract": API_VERSION, "digest": digest_of(folder)},
        "words": [{"word": "integrity", "proof": "proven"}],
    }
    (folder / REPORT).write_text(json.dumps(whole | changes))


def test_an_oracle_alone_proves_nothing(folder: Path) -> None:
    assert why_unproven(PLUGIN) == NO_REPORT
    report(folder)
    assert why_unproven(PLUGIN) == ""


def test_a_module_that_is_no_package_carries_no_report() -> None:
    assert why_unproven("json.decoder") == NO_REPORT
    assert why_unproven("never_imported") == NO_REPORT


@pytest.mark.parametrize("change", ["edited", "added", "removed", "moved"])
def test_a_report_of_other_files_is_stale(folder: Path, change: str) -> None:
    report(folder)
    store = folder / "deep" / "store.py"
    if change == "edited":
        store.write_text("VERIFIED = None\n")
    elif change == "added":
        (folder / "another.so").write_bytes(b"")
    elif change == "removed":
        store.unlink()
    else:
        store.rename(folder / "store.py")
    assert why_unproven(PLUGIN) == "its report is of other files than those installed"


def test_what_python_compiles_and_the_report_itself_are_not_among_the_files(
    folder: Path,
) -> None:
    before = digest_of(folder)
    report(folder)
    (folder / "deep" / "__pycache__").mkdir()
    (folder / "deep" / "__pycache__" / "store.cpython-311.pyc").write_bytes(b"x")
    assert digest_of(folder) == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"evidence": {"contract": 1, "digest": ""}}, "of contract 1"),
        ({"ok": False}, "does not prove it"),
        ({"words": []}, "does not prove it"),
        (
            {"words": [{"word": "integrity", "proof": "proven in part"}]},
            "does not prove it",
        ),
        ({"evidence": {}}, "cannot be read"),
        ({"words": 3}, "cannot be read"),
    ],
)
def test_a_report_that_says_less_is_not_believed(
    folder: Path, changes: dict[str, Any], why: str
) -> None:
    report(folder, **changes)
    assert why in why_unproven(PLUGIN)


def test_a_report_that_is_damaged_is_not_believed(folder: Path) -> None:
    (folder / REPORT).write_text("{")
    assert "cannot be read" in why_unproven(PLUGIN)
