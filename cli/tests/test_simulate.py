"""`kvdock simulate` on small traces whose figures can be counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.events import requested_by
from kvdock.journal import Journal, JournalRecord, JournalSettings
from kvdock.journal.records import encode
from kvdock.pools import Part
from kvdock_cli.main import _run
from kvdock_cli.simulation.traces import Trace, read_trace

Simulate = Callable[..., tuple[int, str]]
FIRST, SECOND = [1, 2, 3, 4], [1, 2, 9]
"""Requests: the second one shares two blocks with the first."""


@pytest.fixture
def simulate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Simulate:
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["kvdock", "simulate", *map(str, words)])
        code = _run(as_json="--json" in words)
        assert isinstance(code, int)
        said = capsys.readouterr()
        return code, said.out or said.err

    return command


def written(path: Path, *requests: Sequence[int]) -> Path:
    """Write a trace, with a request each second."""
    rows = [
        {"timestamp": 1000 * at, "hash_ids": list(one)}
        for at, one in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def blocks(trace: Trace) -> list[list[int]]:
    return [one.tolist() for one in trace.requests]


def data(simulate: Simulate, *words: object) -> Any:
    code, said = simulate(*words, "--json")
    assert code == 0, said
    return json.loads(said)


def test_both_forms_of_a_trace_are_the_same(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.write_text(
        '{"timestamp": 0, "ranges": [[1, 4]]}\n'
        '{"timestamp": 1000, "ranges": [[1, 2], [9, 9]]}\n'
    )
    plain = read_trace(written(tmp_path / "plain", FIRST, SECOND))
    assert blocks(read_trace(runs)) == blocks(plain) == [[0, 1, 2, 3], [0, 1, 4]]
    assert (plain.unique, plain.blocks, plain.seconds) == (5, 7, 1.0)
    assert len(read_trace(runs, 1).requests) == 1


def test_a_request_of_a_journal_has_what_was_looked_up_and_then_stored(
    tmp_path: Path,
) -> None:
    def record(operation: str, pages: str, **more: Any) -> JournalRecord:
        given = {"at_s": 5.0, "pool": "kv", "request": "", **more}
        outcomes = (("ok", len(pages.split())),)
        return JournalRecord(
            version=1, operation=operation, namespace="n", pages=pages,
            outcomes=outcomes, **given,
        )  # fmt: skip

    later = [record("exists", "a b e", request="two", at_s=7.0)]
    first = [
        record("exists", "a b c", request="one"),
        record("exists", "a b c s", request="one", pool="swa"),
        record("exists", "a b c r", request="one", rank="1"),
        record("exists", "c", request="one", backend="far"),
        record("get", "a", request="one"),
        # Written back for no request: it belongs to what was looked up with it.
        record("put", "c d", at_s=6.0),
        record("put", "x y", at_s=8.0),
    ]
    # The file of another process is older and has what came later.
    (tmp_path / "a.jsonl").write_bytes(encode(later))
    (tmp_path / "b.jsonl").write_bytes(encode(first))
    trace = read_trace(tmp_path)
    # a b c d, then a b e, then what no request looked up.
    sizes = [len(one) for one in trace.requests]
    assert sizes == [4, 3, 2]
    assert blocks(trace)[0][:2] == blocks(trace)[1][:2]
    assert (trace.unique, trace.seconds) == (7, 3.0)


def test_the_journal_of_an_attachment_is_a_trace(
    tmp_path: Path, simulate: Simulate
) -> None:
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (16,))], layers=[0],
        page_tokens=16, anchor=True,
    )  # fmt: skip
    settings = {"file": {"root": tmp_path / "store", "free_space": 0}}
    dock = Dock.load(require=["file"])
    journal = Journal(JournalSettings(dir=tmp_path / "journal"))
    dock.add_observer("journal", journal)
    regions = {"kv": Region.of(pool, Shard(), [np.ones((8, 256), np.uint8)], 8)}
    plan = dock.plan([pool], Shard(), prefer=["file"])
    with Attachment.open(dock, plan, Namespace(model="m"), regions, settings) as cache:
        for number, request in enumerate((FIRST, SECOND, FIRST)):
            hashes = [f"{one:064x}" for one in request]
            with requested_by(str(number)):
                best = cache.exists(hashes).best
            if best < len(hashes):
                cache.put(hashes[best:], {"kv": range(best, len(hashes))})
    journal.flush(20)
    (row,) = data(simulate, tmp_path / "journal", "--sizes", "0:0:0")["rows"]
    assert row["hits"] == pytest.approx(6 / 11)


def test_hosts_have_tiers_of_their_own_and_one_far_tier(
    tmp_path: Path, simulate: Simulate
) -> None:
    trace = written(tmp_path / "trace", FIRST, FIRST, SECOND)
    words = (trace, "--sizes", "0:0:0", "--hosts", "1,2", "--block", "1 KiB")
    found = data(simulate, *words, "--spread", "round")
    one, two = found["rows"]
    assert [row["hosts"] for row in found["rows"]] == [1, 2]
    # Of 11 blocks 4 and 1 are computed, wherever they were asked for.
    assert one["hits"] == two["hits"] == pytest.approx(6 / 11)
    assert one["tiers"]["memory"]["read_bytes"] == 6 * 1024
    assert one["tiers"]["far"]["read_bytes"] == 0
    # The second host loads from far what the first one stored.
    assert two["tiers"]["far"]["read_bytes"] == 4 * 1024
    assert two["tiers"]["memory"]["read_bytes"] == 2 * 1024
    for row in found["rows"]:
        far = row["tiers"]["far"]
        assert (far["written_bytes"], far["written_bytes_per_s"]) == (5120, 2560)
        assert row["saved_s"] + row["computed_s"] == pytest.approx(11 * 64 / 8000)
    # The second request of the first prompt goes where the first one went.
    by_prefix = data(simulate, *words, "--rate", "3")["rows"][1]["tiers"]["far"]
    assert by_prefix["read_bytes"] <= 2 * 1024
    assert by_prefix["written_bytes_per_s"] == 5120


def test_sizes_are_swept_and_the_first_that_pays_is_named(
    tmp_path: Path, simulate: Simulate
) -> None:
    loop = [range(40), range(100, 140)] * 30
    trace = written(tmp_path / "trace", *loop)
    sizes = ("--sizes", "0.1,0.8,1:1", "--sizes", "1 KiB:80 KiB", "--tiers", "a,b")
    words = (trace, *sizes, "--block", "1 KiB")
    found = data(simulate, *words)
    assert [row["sizes"] for row in found["rows"]] == [
        "0.1:1", "0.8:1", "1:1", "1 KiB:80 KiB",
    ]  # fmt: skip
    near = [row["tiers"]["a"]["share"] for row in found["rows"]]
    assert near[0] < near[1] < near[2]
    assert found["pays"] == [{"hosts": 1, "sizes": "1:1"}]
    code, said = simulate(*words)
    assert code == 0
    assert " ".join(said.split()).endswith(
        "1 host, 1:1: beyond it, which loads 96.7% of the blocks and 96.7% from a "
        "host's own tiers, no size gains much."
    )
    assert said.splitlines()[2].split() == [
        "HOSTS", "SIZES", "HITS", "A", "B", "B", "READ", "B", "WRITTEN", "SAVED",
    ]  # fmt: skip


def test_rules_of_tiers_hold(tmp_path: Path, simulate: Simulate) -> None:
    trace = written(tmp_path / "trace", FIRST, FIRST, FIRST)
    rules = json.dumps([{"backend": "near", "write": "never"}, {"backend": "far"}])
    words = (trace, "--sizes", "0:0", "--tiers", rules, "--block", "1 B")
    (row,) = data(simulate, *words)["rows"]
    # Loaded from far at the first use, promoted at the second, near at none.
    assert row["tiers"]["far"]["read_bytes"] == 8
    assert row["tiers"]["near"] == {
        "share": 0.0, "read_bytes": 0, "written_bytes": 4,
        "read_bytes_per_s": 0.0, "written_bytes_per_s": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gone",), "gone cannot be read: No such file or directory"),
        (("bad",), "line 1 of bad is no request of a trace"),
        (("empty",), "empty has no requests"),
        (("trace", "--sizes", "1:1"), "has 2 parts for 3 tiers"),
        (("trace", "--sizes", "1:1:many"), "'many' is not a size in bytes"),
        (("trace", "--sizes", "1:1:2"), "2 is not a share of the different blocks"),
        (("trace", "--sizes", "1:1:nan"), "nan is not a share of the different blocks"),
        (("trace", "--hosts", "0"), "--hosts '0' is not a number from 1 to 1000"),
        (("trace", "--hosts", "1001"), "is not a number from 1 to 1000"),
        (("trace", "--rate", "0"), "--rate are above 0"),
        (("trace", "--tiers", "a,a"), "'a' is given twice"),
    ],
)
def test_bad_input_is_named(
    words: Sequence[str], said: str, tmp_path: Path, simulate: Simulate
) -> None:
    written(tmp_path / "trace", FIRST)
    (tmp_path / "bad").write_text('{"hash_ids": ["word"]}\n')
    (tmp_path / "empty").write_text("")
    code, found = simulate(*words)
    assert code == 2, found
    assert said in " ".join(found.split())


def test_a_folder_without_a_journal_is_said(tmp_path: Path, simulate: Simulate) -> None:
    code, said = simulate(tmp_path)
    assert (code, "holds no journal" in said) == (1, True)
