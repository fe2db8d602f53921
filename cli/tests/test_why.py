from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvdock.journal import JournalRecord
from kvdock.journal.records import encode
from kvdock_cli.main import _run

if TYPE_CHECKING:
    from pathlib import Path

Run = Callable[..., tuple[object, str, str]]

POOL = {
    "name": "kv", "kind": "mha", "anchor": True, "required": True, "draft": False,
    "engine_hits": False, "hit_policy": "all_pages", "window_pages": 0,
    "block_pages": 0, "group_pages": 0,
}  # fmt: skip


def line(operation: str, outcomes: tuple[tuple[str, int], ...], **more: object) -> dict:  # type: ignore[type-arg]
    pages = " ".join("abcdef"[: sum(size for _, size in outcomes)])
    given = {"request": "r", "pool": "kv", "backend": "disk", "pages": pages}
    return {"operation": operation, "outcomes": outcomes, **given, **more}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    lines = [
        {"operation": "attached", "pools": (POOL,), "record": {"schema": 1}},
        line("put", (("ok", 6),), request="w"),
        line("exists", (("ok", 2), ("absent", 1), ("ok", 3))),
        line("get", (("ok", 2),)),
    ]
    records = [
        JournalRecord(version=1, at_s=1795469998.0 + at, namespace="2f6c" * 16, **one)
        for at, one in enumerate(lines)
    ]
    (tmp_path / "0-1-1.jsonl").write_bytes(encode(records))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: object) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["kvdock", "why", *map(str, words)])
        code = _run(as_json="--json" in words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def test_a_request_is_explained(journal: Path, run: Run) -> None:
    code, out, _ = run("--journal", journal, "--request", "r")
    assert code == 1
    assert out == (
        "2 of 6 pages could be restored: pool kv lacks page 3 of 6: it was stored, and "
        "made way for other pages since.\n"
        "Give the store more room, or retain less: see `kvdock store ls`.\n"
        "\n"
        "namespace 2f6c2f6c2f6c2f6c, 2026-11-23 21:40:00.000+00:00\n"
        "POOL  BACKEND  ASKED  FOUND  LOADED  MISSING BECAUSE\n"
        "kv    disk         6      5       2  evicted (1)\n"
    )


def test_the_answer_is_data(journal: Path, run: Run) -> None:
    code, out, _ = run("--journal", journal, "--request", "r", "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["ok"]) == (1, "kvdock.why/1", False)
    assert (found["pages"], found["restorable"]) == (6, 2)
    assert found["pools"][0]["causes"] == {"evicted": 1}


def test_hashes_are_explained(journal: Path, tmp_path: Path, run: Run) -> None:
    given = tmp_path / "hashes"
    given.write_text("a\nb\n")
    code, out, _ = run("--journal", journal, "--hashes", given)
    assert (code, out.splitlines()[0]) == (0, "All 2 pages could be restored.")


def test_requests_are_listed(journal: Path, run: Run) -> None:
    code, out, _ = run("--journal", journal)
    assert code == 0
    assert out.splitlines()[1].split() == [
        "2026-11-23", "21:40:00.000+00:00", "r", "6", "5",
    ]  # fmt: skip
    code, out, _ = run("--journal", journal, "--json")
    assert json.loads(out)["requests"][0]["request"] == "r"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--request", "other"], "no lookup of request 'other'"),
        (["--request", "r", "--hashes", "x"], "exclude each other"),
        (["--request", "r", "--namespace", "2f"], "goes with --hashes"),
        (["--hashes", "missing"], "cannot be read"),
    ],
)
def test_what_cannot_be_answered_is_said(
    journal: Path,
    run: Run,
    words: list[str],
    said: str,
) -> None:
    found, _, error = run("--journal", journal, *words)
    assert found == 2
    assert said in error


def test_a_folder_without_a_journal_is_said(tmp_path: Path, run: Run) -> None:
    code, _, error = run("--journal", tmp_path)
    assert code == 2
    assert "holds no journal" in error
