"""`kvdock store`: golden texts of its reports, and the commands on real files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock import Batch, Operation
from kvdock.errors import KvdockError, NamespaceError, SettingsError
from kvdock.segments import (
    Location,
    NamespaceSurvey,
    PoolSurvey,
    PosixIOEngine,
    SegmentStore,
    StoreLocation,
    VerifyReport,
    locate,
    namespaces,
)
from kvdock_cli.commands import store
from kvdock_cli.output import UsageProblem
from kvdock_cli.reports import store as report
from kvdock_cli.reports._style import Style

GOLDEN = Path(__file__).with_name("golden")
DOCUMENTATION = (
    Path(__file__).parents[2] / "docs" / "reference" / "cli-json.md"
).read_text()
RECORDS = [b'{"model":"tiny","revision":"7"}', b'{"model":"other"}']
NAMESPACES = [hashlib.sha256(record).hexdigest() for record in RECORDS]
PAGE_BYTES = 4096

POOL = PoolSurvey(
    pool="kv",
    object_bytes=65536,
    segments=3,
    pages=1000,
    stored_bytes=65_536_000,
    file_bytes=66 << 20,
    corrupt_records=2,
)
SURVEY = NamespaceSurvey(
    namespace="0123456789abcdef" * 4,
    model="org/model",
    revision="r1",
    recorded=True,
    used_ns=1_700_000_000_000_000_000,
    pools=(POOL,),
)
BARE = NamespaceSurvey(
    namespace="f" * 64, model="", revision="", recorded=False, used_ns=0, pools=()
)
SPOT = Location(
    pool="kv",
    path=Path("/store/ns/kv.65536/0001.dat"),
    offset=131072,
    nbytes=65536,
    slot_bytes=65536,
    checksum=1,
    record_path=Path("/store/ns/kv.65536/0001.00000001.idx"),
    record_offset=256,
)
CHECKED = VerifyReport(
    namespace=SURVEY.namespace,
    good=998,
    bad=(SPOT,) * 22,
    corrupt_records=3,
    unreadable_segments=(SPOT.record_path,),
    damaged_files=(Path("/store/ns/namespace.json"),),
    forgotten=0,
)
HEALED = attrs.evolve(CHECKED, unreadable_segments=(), damaged_files=(), forgotten=25)
TEXTS = {
    "store-ls": report.listing_text([SURVEY, BARE]),
    "store-stat": report.survey_text(SURVEY),
    "store-verify": report.checked_text([CHECKED]),
    "store-verify-heal": report.checked_text([HEALED]),
    "store-gc": report.freed_text([(SURVEY.namespace, 5 << 20)]),
}
DATA: dict[str, dict[str, Any]] = {
    "store-ls": report.listing_data([SURVEY, BARE]),
    "store-stat": report.survey_data(SURVEY),
    "store-verify": report.checked_data([CHECKED]),
    "store-gc": report.freed_data("gc", [(SURVEY.namespace, 5 << 20)]),
    "store-clear": report.freed_data("clear", [(SURVEY.namespace, 5 << 20)]),
}


@pytest.mark.parametrize("width", [60, 76, 100])
def test_a_narrow_terminal_gets_the_first_digits_of_a_digest(width: int) -> None:
    shown = report.survey_text(BARE, Style(width))
    assert max(map(len, shown.splitlines())) <= width
    assert ("f" * 64 in shown) == (width > 75)
    assert "f" * 12 in shown


@pytest.mark.parametrize("name", TEXTS)
def test_a_report_reads_as_it_did(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("KVDOCK_GOLDEN") == "write":
        path.write_text(TEXTS[name] + "\n")
    assert TEXTS[name] + "\n" == path.read_text()


@pytest.mark.parametrize("name", DATA)
def test_every_key_of_the_data_is_documented(name: str) -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            found = {key for key in value if len(key) < 64}
            return found.union(*(keys(one) for one in value.values()))
        if isinstance(value, list):
            return set().union(*(keys(one) for one in value))
        return set()

    assert f"`kvdock.{name}/1`" in DOCUMENTATION
    assert not {key for key in keys(DATA[name]) if f"`{key}`" not in DOCUMENTATION}


def test_nothing_stored_says_so() -> None:
    assert report.listing_text([]) == report.checked_text([]) == "the store is empty"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with two namespaces of twenty pages each."""
    for namespace, record in zip(NAMESPACES, RECORDS, strict=True):
        memory = np.arange(20 * PAGE_BYTES, dtype=np.uint8).reshape(20, PAGE_BYTES)
        at = memory.ctypes.data + np.arange(20).reshape(-1, 1) * PAGE_BYTES
        place = StoreLocation(
            root=tmp_path / "store",
            namespace=namespace,
            pool="kv",
            object_bytes=(PAGE_BYTES,),
            record=record,
        )
        with SegmentStore(place, PosixIOEngine()) as opened:
            keys = [key_of(namespace, number) for number in range(20)]
            sizes = np.full(at.shape, PAGE_BYTES)
            opened.run(Batch(Operation.PUT, keys, at, sizes))
    return tmp_path / "store"


def key_of(namespace: str, number: int) -> str:
    return f"{namespace}/{number:032x}.kv"


Ask = Callable[..., tuple[dict[str, Any], int]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command for its JSON and its exit code."""

    def run(
        command: Callable[..., int], *words: object, **options: object
    ) -> tuple[dict[str, Any], int]:
        code = command(*map(str, words), json=True, **options)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found, code

    return run


def test_namespaces_are_listed_with_their_models(root: Path, ask: Ask) -> None:
    found, code = ask(store.ls, root)
    assert code == 0
    assert {one["model"]: one["pools"][0]["pages"] for one in found["namespaces"]} == {
        "tiny": 20,
        "other": 20,
    }


def test_a_namespace_is_named_by_its_first_digits(root: Path, ask: Ask) -> None:
    found, _ = ask(store.stat, root, NAMESPACES[0][:8])
    assert found["namespace"]["namespace"] == NAMESPACES[0]
    assert found["namespace"]["revision"] == "7"
    with pytest.raises(NamespaceError, match="no namespace begins"):
        store.stat(str(root), "zz")


def test_a_root_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(KvdockError, match="nowhere is not a store: it is missing"):
        store.ls(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_verifying_finds_the_one_page_that_is_wrong(root: Path, ask: Ask) -> None:
    assert ask(store.verify, root)[1] == 0
    (spot,) = locate(root, key_of(NAMESPACES[0], 7))
    with spot.path.open("r+b") as file:
        file.seek(spot.offset + 9)
        file.write(b"\xfe")
    found, code = ask(store.verify, root)
    assert code == 1
    by_name = {one["namespace"]: one for one in found["namespaces"]}
    assert by_name[NAMESPACES[0]]["good"] == 19
    assert [bad["offset"] for bad in by_name[NAMESPACES[0]]["bad"]] == [spot.offset]
    assert by_name[NAMESPACES[1]]["bad"] == []
    assert ask(store.verify, root, namespace=NAMESPACES[1][:6])[1] == 0


def test_what_verifying_forgets_is_stored_by_the_next_write(
    root: Path, ask: Ask
) -> None:
    (spot,) = locate(root, key_of(NAMESPACES[0], 7))
    with spot.path.open("r+b") as file:
        file.seek(spot.offset + 9)
        file.write(b"\xfe")
    assert ask(store.verify, root)[0]["namespaces"][0]["forgotten"] == 0
    found, code = ask(store.verify, root, heal=True)
    assert code == 1
    assert sum(one["forgotten"] for one in found["namespaces"]) == 1
    assert len(locate(root, key_of(NAMESPACES[0], 7))) == 0
    assert ask(store.verify, root)[1] == 0


def test_clearing_takes_one_namespace_and_no_other(root: Path, ask: Ask) -> None:
    found, code = ask(store.clear, root, NAMESPACES[0], yes=True)
    assert code == 0
    assert found["freed_bytes"][NAMESPACES[0]] > 20 * PAGE_BYTES
    left, _ = ask(store.ls, root)
    pages = {
        one["namespace"]: sum(pool["pages"] for pool in one["pools"])
        for one in left["namespaces"]
    }
    assert pages == {NAMESPACES[0]: 0, NAMESPACES[1]: 20}


def test_clearing_without_anybody_to_ask_needs_yes(
    root: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageProblem, match="no terminal to ask"):
        store.clear(str(root), NAMESPACES[0])
    assert ask(store.verify, root)[0]["namespaces"][0]["good"] == 20


def test_collecting_brings_a_namespace_down_to_a_size(root: Path, ask: Ask) -> None:
    folder = next((root / NAMESPACES[0]).glob("kv.*"))
    (folder / "0123456789abcdef.dat").write_bytes(b"left by a crash")
    found, _ = ask(store.gc, root)
    assert found["freed_bytes"][NAMESPACES[0]] == len(b"left by a crash")
    found, _ = ask(store.gc, root, namespace=NAMESPACES[0], to="0")
    assert found["freed_bytes"][NAMESPACES[0]] > 20 * PAGE_BYTES
    left, _ = ask(store.ls, root)
    assert [one["namespace"] for one in left["namespaces"]] == [NAMESPACES[1]]


def test_a_size_without_a_namespace_is_refused(root: Path) -> None:
    with pytest.raises(UsageProblem, match="every model"):
        store.gc(str(root), to="1 GiB")


def test_what_others_may_write_is_changed_only_when_told(root: Path, ask: Ask) -> None:
    root.chmod(0o777)
    assert ask(store.ls, root)[1] == ask(store.verify, root)[1] == 0
    assert ask(store.stat, root, NAMESPACES[0])[1] == 0
    changing: list[tuple[Callable[..., int], list[str], dict[str, Any]]] = [
        (store.verify, [], {"heal": True}),
        (store.gc, [], {}),
        (store.clear, [NAMESPACES[0]], {"yes": True}),
    ]
    for command, words, options in changing:
        with pytest.raises(KvdockError, match=r"may be written by.*shared_root"):
            command(str(root), *words, **options)
    assert ask(store.verify, root)[0]["namespaces"][0]["good"] == 20
    for command, words, options in changing:
        assert ask(command, root, *words, shared_root=True, **options)[1] == 0


@pytest.mark.parametrize("command", [store.ls, store.verify, store.gc])
def test_a_namespace_that_goes_meanwhile_spoils_no_other(
    command: Callable[..., int],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone, stays = sorted(NAMESPACES)

    def listed_first(home: Path) -> tuple[str, ...]:
        found = namespaces(home)
        shutil.rmtree(home / gone, ignore_errors=True)
        return found

    monkeypatch.setattr("kvdock.segments.inspect.namespaces", listed_first)
    assert command(str(root), json=True) == 0
    printed = capsys.readouterr().out
    assert stays in printed
    assert gone not in printed


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (store.ls, []),
        (store.stat, ["aa"]),
        (store.verify, []),
        (store.gc, []),
        (store.clear, ["aa"]),
    ],
)
def test_an_empty_root_is_not_the_current_directory(
    command: Callable[..., int],
    more: list[str],
    root: Path,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(SettingsError, match="'' is not a path"):
        command("", *more)
    assert ask(store.ls, ".")[1] == 0


def test_what_a_record_holds_cannot_write_to_a_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = b'{"model":"\\u001b[31mred\\nline","revision":"\\u202e"}'
    namespace = hashlib.sha256(record).hexdigest()
    (root / namespace).mkdir(mode=0o700)
    (root / namespace / "namespace.json").write_bytes(record)
    assert store.ls(str(root)) == store.stat(str(root), namespace) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert r"\x1b[31mred\nline" in printed
    terminal = io.StringIO("no\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(UsageProblem, match="nothing was deleted"):
        store.clear(str(root), namespace)
    assert "\x1b" not in capsys.readouterr().err
