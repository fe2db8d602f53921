"""The demo without a model: its pages, its damage and its report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from golden import check_report

from kvdock import NO_PAGE, Dock
from kvdock.errors import KvdockError, PluginError
from kvdock.testing import Oracle
from kvdock_cli.demo import pages, trial
from kvdock_cli.demo.trial import Step
from kvdock_cli.reports import demo as report
from kvdock_cli.reports._report import rendered
from kvdock_cli.reports._style import Style


def step(phase: str, count: int, wrong: int = 0) -> Step:
    found = {
        "pages": count, "pools": {"kv": count}, "bytes": 1 << 20, "seconds": 0.5,
        "wrong": wrong, "pid": 7,
    }  # fmt: skip
    return Step(phase=phase, found=found, pages=48, pools={"kv": 48})


def test_every_process_makes_the_same_pages_and_no_two_are_alike() -> None:
    names = pages.hashes("x")
    assert names == pages.hashes("x")
    one = pages.content("kv", names[0], 4096)
    assert np.array_equal(one, pages.content("kv", names[0], 4096))
    assert not np.array_equal(one, pages.content("draft", names[0], 4096))
    assert not np.array_equal(one, pages.content("kv", names[1], 4096))


def test_states_are_stored_behind_every_eighth_page_alone() -> None:
    pools = {pool.name: pool for pool in pages.pools()}
    states = pages.positions(pools["mamba"], 48)
    assert [*np.flatnonzero(states != NO_PAGE)] == [7, 15, 23, 31, 39, 47]
    assert NO_PAGE not in pages.positions(pools["draft"], 48)


def test_damage_changes_one_bit_of_an_object_that_is_stored() -> None:
    stored = {"a": bytes(range(100))}

    class Kept(Oracle):
        def peek(self, key: str) -> bytes | None:
            return stored.get(key)

        def poke(self, key: str, offset: int, data: bytes) -> None:
            whole = bytearray(stored[key])
            whole[offset : offset + len(data)] = data
            stored[key] = bytes(whole)

    trial.damage(Kept(), "a")
    changed = zip(stored["a"], range(100), strict=True)
    assert [(one ^ other).bit_count() for one, other in changed].count(1) == 1
    with pytest.raises(KvdockError, match="b is not stored"):
        trial.damage(Kept(), "b")


def test_pages_that_are_missing_or_wrong_fail_the_demo() -> None:
    assert step("store", 48).ok
    assert not step("store", 47).ok
    assert not step("restore", 48, wrong=1).ok
    good = [step("store", 48), step("restore", 48)]
    bad = [*good[:1], step("restore", 48, wrong=1)]
    assert "no wrong byte came back" in report.report("file", good, [("kv", 1)]).text()
    assert "FAILED" in report.report("file", bad, [("kv", 1)]).text(Style(60))
    assert report.report("file", bad, [("kv", 1)]).ok is False


def test_a_store_without_room_is_an_error_with_the_room_that_there_is(
    tmp_path: Path,
) -> None:
    with pytest.raises(KvdockError, match=r"only 3 of 48 pages .* free") as caught:
        trial._check_room("file", tmp_path, step("store", 3))
    assert "--dir" in caught.value.fix


def test_the_head_says_where_pages_are_kept_and_what_was_started() -> None:
    assert "Backend a in /x. Each line" in rendered(report.head("a", "/x", ""))
    shown = rendered(report.head("a", "", "started a server"))
    assert "Backend a. Each line" in shown
    assert shown.endswith("\nStarted a server.")


def test_a_backend_whose_pages_cannot_be_damaged_is_refused_by_name() -> None:
    dock = Dock.load(require=("s3", "mooncake"))
    assert trial.choose(dock, "s3") == ("s3", "")
    assert trial.choose(dock, "") == ("file", "root")
    with pytest.raises(PluginError, match="no oracle") as caught:
        trial.choose(dock, "mooncake")
    assert "file" in caught.value.fix


def test_every_key_of_the_report_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli-json.md"
    data = report.report("file", [step("store", 48)], [("kv", 1)]).as_data()
    text = page.read_text()
    found = json.loads(json.dumps(data))
    for key in {*found, *found["steps"][0]} - {"schema"}:
        assert f"`{key}`" in text


def test_the_report_reads_as_it_did_and_fits() -> None:
    steps = [step("store", 48), step("restore", 48), step("restore", 3, wrong=1)]
    made = report.report("file", steps, [("kv", 40), ("draft", 44)])
    check_report(Path(__file__).with_name("golden") / "demo.txt", made)
