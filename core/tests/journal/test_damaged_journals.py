"""A journal that was damaged is read as far as it goes, and quickly."""

from __future__ import annotations

import json
import os
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from shelf import Engine, Shelf, attention, draft, hashes, patient, states

from kvdock.errors import KvdockError
from kvdock.events import LookupSkipped, Origin, requested_by
from kvdock.journal import explain, explain_prompt, read_journal, requests
from kvdock.journal import records as journal_records
from kvdock.journal.observer import Journal, JournalSettings
from kvdock.namespace import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = hashes(6)
WORSE: list[Any] = [
    None, True, -1, 0, 2**63, 10**40, -0.5, 1e308, "", "x", "\u0000", "é" * 40, [], {},
    [[]], [["ok", -1]], [["ok", 2**63]], [{"name": "kv"}], {"pools": 3},
    {"pools": {"kv": {}}}, {"pools": {"kv": {"page_tokens": "x"}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of a journal with records of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    journal = Journal(JournalSettings(dir=folder))
    shelf = Shelf()
    for salt in ("", "other"):
        engine = Engine(
            [shelf],
            pools=(attention(), draft(), states()),
            core=patient(),
            observers=[journal],
            namespace=Namespace(model="m", salt=salt),
        )
        with engine.attachment:
            places = engine.where(range(6))
            with requested_by("writer"):
                engine.attachment.put(NAMES, places)
            for key in [one for one in shelf.objects if NAMES[4] in one]:
                del shelf.objects[key]
            for request in ("r", "late"):
                with requested_by(request):
                    engine.attachment.exists(NAMES)
                    engine.attachment.get(NAMES, places)
            engine.attachment.clear()
            with requested_by("r"):
                engine.attachment.exists(NAMES)
    journal.kvdock_observe(
        LookupSkipped(request="skipped", reason="pays"), Origin(namespace="n" * 64)
    )
    assert journal.flush(10)
    (file,) = folder.iterdir()
    return file.read_bytes().splitlines(keepends=True)


def damaged(chance: random.Random, lines: list[bytes]) -> Iterator[bytes]:
    """Yield the lines with a few changes."""
    for line in lines:
        if chance.random() < 0.7:
            yield line
        elif chance.random() < 0.3:
            data = bytearray(line)
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            yield bytes(data)
        else:
            record = json.loads(line)
            _change(chance, record)
            yield json.dumps(record).encode() + b"\n"


def _change(chance: random.Random, value: Any) -> None:
    """Put something else in the place of a value, anywhere in a record."""
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    inner = value[key]
    if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
        _change(chance, inner)
    elif isinstance(value, dict) and chance.random() < 0.3:
        del value[key]
    else:
        value[key] = chance.choice(WORSE)


@pytest.mark.parametrize("rounds", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_no_damage_of_a_journal_is_more_than_an_answer_or_an_error_that_says_so(
    tmp_path: Path, lines: list[bytes], rounds: int
) -> None:
    chance, answers = random.Random(49), 0  # noqa: S311 - guards nothing
    file, read = tmp_path / "0-1-2.jsonl", partial(read_journal, tmp_path)
    for _ in range(rounds):
        file.write_bytes(b"".join(damaged(chance, lines)))
        listed = requests(read())
        assert all(at_s >= 0 for at_s, _, _ in listed.values())
        for asked in ({"request": "r"}, {"request": "skipped"}, {"hashes": NAMES}):
            try:
                answer = explain(read, **asked)
            except KvdockError:
                continue
            answers += 1
            assert explain_prompt(read(), 99, None, answer, "r").verdict
        assert explain_prompt(read(), 99, None, None, "r").verdict
    assert answers > 1.5 * rounds


def test_what_is_no_file_is_not_read(tmp_path: Path, lines: list[bytes]) -> None:
    (tmp_path / "0-1-2.jsonl").write_bytes(b"".join(lines))
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to("/dev/zero")
    assert len(list(read_journal(tmp_path))) == len(lines)


def test_a_line_without_an_end_is_passed_over(
    tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_records, "MOST_LINE_BYTES", 1 << 16)
    data = lines[0] + b"x" * (3 << 16) + b"\n" + lines[1]
    (tmp_path / "0-1-2.jsonl").write_bytes(data)
    assert len(list(read_journal(tmp_path))) == 2
