"""`kvdock store`: golden texts of its reports, and the commands on real files."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import attrs
import numpy as np
import pytest
from golden import check_report

from kvdock import (
    Attachment,
    Batch,
    Dock,
    Namespace,
    Operation,
    Region,
    Shard,
)
from kvdock.config import load_configuration
from kvdock.errors import KvdockError, SettingsError
from kvdock.plugin import Candidate
from kvdock.pools import mha
from kvdock.stores import NamespaceSurvey, PoolSurvey, Verified
from kvdock_cli.commands import store
from kvdock_cli.output import UsageProblem
from kvdock_cli.reports import store as report
from kvdock_segments import (
    Location,
    PosixIOEngine,
    SegmentStore,
    StoreLocation,
    locate,
)
from kvdock_segments.directory_store import DirectoryStore

GOLDEN = Path(__file__).with_name("golden")
DOCUMENTATION = (
    Path(__file__).parents[2] / "docs" / "reference" / "cli-json.md"
).read_text()
RECORDS = [
    b'{"model":"tiny","revision":"7","schema":1}',
    b'{"model":"other","schema":1}',
]
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
CHECKED = Verified(
    namespace=SURVEY.namespace,
    good=998,
    bad=(SPOT,) * 22,
    corrupt_records=3,
    unreadable_segments=(SPOT.record_path,),
    damaged_files=(Path("/store/ns/namespace.json"),),
    forgotten=0,
)
HEALED = attrs.evolve(CHECKED, unreadable_segments=(), damaged_files=(), forgotten=25)
REMOVALS = [
    {
        "survey": SURVEY, "in_use": "", "goes": True, "freed_bytes": 66 << 20,
        "target": "", "pages": None, "kept": 0,
    },
    {
        "survey": BARE, "in_use": "a process has it open", "goes": False,
        "freed_bytes": 0, "target": "", "pages": None, "kept": 0,
    },
]  # fmt: skip
COPIED = [
    {
        "namespace": SURVEY.namespace, "model": "org/model", "copied": 990,
        "present": 8, "damaged": 1, "failed": 1, "copied_bytes": 990 * 65536,
    },
    {
        "namespace": BARE.namespace, "model": "", "copied": 0, "present": 20,
        "damaged": 0, "failed": 0, "copied_bytes": 0,
    },
]  # fmt: skip
TIMED = attrs.evolve(
    SURVEY, pools=(attrs.evolve(POOL, promised_bytes=3 << 20, expiring=40),)
)
RETAINED: list[dict[str, Any]] = [
    {
        "namespace": SURVEY.namespace, "pages": 99, "nbytes": 99 << 16,
        "answers": {"accepted": 90, "clipped": 9},
    },
    {"namespace": BARE.namespace, "pages": 0, "nbytes": 0, "answers": {}},
]  # fmt: skip
REPORTS = {
    "store-ls": report.listing([SURVEY, BARE]),
    "store-ls-unused": report.listing(
        [SURVEY, BARE], [SURVEY], SURVEY.used_ns + 9 * 86400 * 10**9
    ),
    "store-ls-retained": report.listing([TIMED], retained=True),
    "store-retain": report.retained(RETAINED, dry_run=False),
    "store-retain-dry-run": report.retained(
        [RETAINED[0] | {"answers": {}}], dry_run=True
    ),
    "store-stat": report.survey(SURVEY),
    "store-verify": report.checked([CHECKED]),
    "store-verify-heal": report.checked([HEALED]),
    "store-rm": report.removed(REMOVALS, dry_run=False),
    "store-rm-dry-run": report.removed(REMOVALS, dry_run=True),
    "store-gc": report.freed({SURVEY.namespace: 5 << 20}),
    "store-copy": report.copied(COPIED, dry_run=False),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_reads_as_it_did_and_fits(name: str) -> None:
    check_report(GOLDEN / f"{name}.txt", REPORTS[name])


@pytest.mark.parametrize("name", REPORTS)
def test_every_key_of_the_data_is_documented(name: str) -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            found = {key for key in value if len(key) < 64}
            return found.union(*(keys(one) for one in value.values()))
        if isinstance(value, list):
            return set().union(*(keys(one) for one in value))
        return set()

    data = REPORTS[name].as_data()
    assert f"`{data['schema']}`" in DOCUMENTATION
    assert not {key for key in keys(data) if f"`{key}`" not in DOCUMENTATION}


def test_nothing_stored_says_so() -> None:
    assert (
        report.listing([]).text() == report.checked([]).text() == "the store is empty"
    )


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


def flip(root: Path, number: int) -> Location:
    """Change a byte of a page on disk; return where it is."""
    (spot,) = locate(root, key_of(NAMESPACES[0], number))
    with spot.path.open("r+b") as file:
        file.seek(spot.offset + 9)
        file.write(b"\xfe")
    return spot


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
    found, _ = ask(store.stat, root, namespace=NAMESPACES[0][:8])
    assert found["namespace"]["namespace"] == NAMESPACES[0]
    assert found["namespace"]["revision"] == "7"
    with pytest.raises(UsageProblem, match="holds no namespaces that begin"):
        store.stat(str(root), namespace="zz")


def test_a_root_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(KvdockError, match="nowhere is not a store: it is missing"):
        store.ls(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_verifying_finds_the_one_page_that_is_wrong(root: Path, ask: Ask) -> None:
    assert ask(store.verify, root)[1] == 0
    spot = flip(root, 7)
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
    flip(root, 7)
    assert ask(store.verify, root)[0]["namespaces"][0]["forgotten"] == 0
    found, code = ask(store.verify, root, heal=True)
    assert code == 1
    assert sum(one["forgotten"] for one in found["namespaces"]) == 1
    assert len(locate(root, key_of(NAMESPACES[0], 7))) == 0
    assert ask(store.verify, root)[1] == 0


def left(ask: Ask, root: Path) -> set[str]:
    """Return the models that are left."""
    return {one["model"] for one in ask(store.ls, root)[0]["namespaces"]}


Age = Callable[[str, float], None]


@pytest.fixture
def age(monkeypatch: pytest.MonkeyPatch) -> Age:
    """Let the pages of a namespace have been used some seconds ago."""
    survey = DirectoryStore.survey

    def change(namespace: str, age_s: float) -> None:
        def older(of: DirectoryStore, asked: str) -> NamespaceSurvey:
            found = survey(of, asked)
            used_ns = time.time_ns() - int(age_s * 1e9)
            return attrs.evolve(found, used_ns=used_ns) if asked == namespace else found

        monkeypatch.setattr(DirectoryStore, "survey", older)

    return change


def test_a_namespace_is_removed_and_no_other(root: Path, ask: Ask) -> None:
    found, code = ask(store.rm, root, namespace=NAMESPACES[0][:9], yes=True)
    assert code == 0
    (one,) = found["removals"]
    assert (one["goes"], one["in_use"]) == (True, "")
    assert one["freed_bytes"] > 20 * PAGE_BYTES
    assert left(ask, root) == {"other"}
    assert not (root / NAMESPACES[0]).exists()


def test_a_dry_run_says_what_would_go_and_deletes_nothing(
    root: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    found, code = ask(store.rm, root, model="*", dry_run=True)
    assert code == 0
    assert [one["freed_bytes"] for one in found["removals"]] == [0, 0]
    store.rm(str(root), model="*", dry_run=True)
    assert "2 namespaces of 40 pages" in capsys.readouterr().out
    assert left(ask, root) == {"tiny", "other"}


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        ({"model": "tiny"}, {"other"}),
        ({"model": "t*"}, {"other"}),
        ({"model": "tin"}, {"tiny", "other"}),
        ({"older": "1 h"}, {"other"}),
        ({"older": "3 h"}, {"tiny", "other"}),
        ({"older": "1 h", "model": "other"}, {"tiny", "other"}),
    ],
)
def test_model_and_age_narrow_the_choice(
    given: dict[str, str], stays: set[str], root: Path, ask: Ask, age: Age
) -> None:
    age(NAMESPACES[0], 2 * 3600)
    assert ask(store.rm, root, yes=True, **given)[1] == 0
    assert left(ask, root) == stays


DAYS_NS = 10 * 24 * 3600 * 10**9


def test_a_clock_that_is_ahead_makes_no_page_old(
    root: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own file system says that the host's clock is wrong."""
    real_ns = time.time_ns
    monkeypatch.setattr("time.time_ns", lambda: real_ns() + DAYS_NS)
    assert ask(store.rm, root, older="1 h", yes=True)[0]["removals"] == []
    assert ask(store.expire, root, older="1 h", after="0 s")[0]["namespaces"] == []
    assert left(ask, root) == {"tiny", "other"}
    assert {one.name for one in root.iterdir()} == set(NAMESPACES)


def test_pages_of_a_clock_that_was_ahead_are_deleted_by_their_hashes(
    root: Path, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tmp_path / "names"
    names.write_text(f"{3:032x}.kv")
    real_ns = time.time_ns
    monkeypatch.setattr("time.time_ns", lambda: real_ns() - DAYS_NS)
    found, code = ask(store.rm, root, hashes=names, yes=True)
    assert (code, [one["pages"] for one in found["removals"]]) == (0, [1, 1])


def test_what_a_process_has_open_is_kept_unless_forced(root: Path, ask: Ask) -> None:
    place = StoreLocation(
        root=root,
        namespace=NAMESPACES[0],
        pool="kv",
        object_bytes=(PAGE_BYTES,),
        record=RECORDS[0],
    )
    with SegmentStore(place, PosixIOEngine()):
        found, code = ask(store.rm, root, model="*", yes=True)
        assert code == 1
        by_model = {one["survey"]["model"]: one for one in found["removals"]}
        assert by_model["tiny"]["in_use"] == "a process has it open"
        assert not by_model["tiny"]["goes"]
        assert left(ask, root) == {"tiny"}
        with pytest.raises(KvdockError, match="kept: a process has it open"):
            store.open_store(str(root), ()).clear(NAMESPACES[0], unused=True)
        found, code = ask(store.rm, root, model="*", yes=True, force=True)
        assert (code, found["removals"][0]["goes"]) == (0, True)
    assert (
        ask(store.stat, root, namespace=NAMESPACES[0])[0]["namespace"]["pools"][0][
            "pages"
        ]
        == 0
    )


def test_removing_needs_a_choice_and_an_answer(
    root: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageProblem, match="nothing says what to delete"):
        store.rm(str(root), yes=True)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageProblem, match="no terminal to ask"):
        store.rm(str(root), namespace=NAMESPACES[0])
    assert ask(store.rm, root, model="none")[0]["removals"] == []
    assert left(ask, root) == {"tiny", "other"}


@pytest.mark.parametrize("order", get_args(store.Order))
def test_a_listing_is_sorted_and_reversed(
    order: store.Order, root: Path, ask: Ask, age: Age
) -> None:
    age(NAMESPACES[1], 3600)
    (extra,) = (root / NAMESPACES[1]).glob("kv.*")
    (extra / "0123456789abcdef.dat").write_bytes(bytes(1 << 20))
    shown = [
        [
            one["model"]
            for one in ask(store.ls, root, sort=order, **more)[0]["namespaces"]
        ]
        for more in ({}, {"reverse": True})
    ]
    assert shown[0] == shown[1][::-1]
    if order != "pages":  # both have as many
        assert shown[0] == ["other", "tiny"]


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
    assert ask(store.stat, root, namespace=NAMESPACES[0])[1] == 0
    changing: list[tuple[Callable[..., int], list[str], dict[str, Any]]] = [
        (store.verify, [], {"heal": True}),
        (store.gc, [], {}),
        (store.rm, [], {"namespace": NAMESPACES[0], "yes": True}),
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

    listed = DirectoryStore.namespaces

    def listed_first(found: DirectoryStore) -> tuple[str, ...]:
        names = listed(found)
        shutil.rmtree(found.root / gone, ignore_errors=True)
        return names

    monkeypatch.setattr(DirectoryStore, "namespaces", listed_first)
    assert command(str(root), json=True) == 0
    printed = capsys.readouterr().out
    assert stays in printed
    assert gone not in printed


@pytest.mark.parametrize(
    "command",
    [store.ls, store.stat, store.verify, store.gc, partial(store.rm, namespace="aa")],
)
def test_an_empty_root_is_not_the_current_directory(
    command: Callable[..., int],
    root: Path,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(SettingsError, match="'' is not a path"):
        command("")
    assert ask(store.ls, ".")[1] == 0


def test_what_a_record_holds_cannot_write_to_a_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = b'{"model":"\\u001b[31mred\\nline","revision":"\\u202e"}'
    namespace = hashlib.sha256(record).hexdigest()
    (root / namespace).mkdir(mode=0o700)
    (root / namespace / "namespace.json").write_bytes(record)
    assert store.ls(str(root)) == store.stat(str(root), namespace=namespace) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert r"\x1b[31mred\nline" in printed
    terminal = io.StringIO("no\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(UsageProblem, match="nothing was deleted"):
        store.rm(str(root), namespace=namespace, force=True)
    assert "\x1b" not in capsys.readouterr().err


def test_a_provider_that_rejects_a_target_does_not_keep_it_from_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: Any = object()

    def reject(target: str, _: object) -> None:
        raise SettingsError(f"{target} is not mine")

    openers: dict[str, Any] = {"a": reject, "b": lambda *_: None, "c": lambda *_: taken}
    found = [
        Candidate(name=name, value="x:y", distribution="d", version="1")
        for name in openers
    ]
    monkeypatch.setattr(store, "usable_entry_points", lambda _: found)
    monkeypatch.setattr(store, "import_entry_point", lambda one: openers[one.name])
    assert store.open_store("proto://place", ()) is taken
    found.pop()
    with pytest.raises(SettingsError, match="is not mine"):
        store.open_store("proto://place", ())


@pytest.mark.parametrize("url", ["http://[::1", "ftp://x/y", "proto://place"])
def test_a_url_of_no_installed_backend_is_named(url: str) -> None:
    with pytest.raises(UsageProblem, match="no installed backend keeps a store"):
        store.open_store(url, ())


def counts_of(found: dict[str, Any]) -> dict[str, list[int]]:
    """Return what was copied, present, damaged and failed, by model."""
    words = ("copied", "present", "damaged", "failed")
    return {one["model"]: [one[word] for word in words] for one in found["namespaces"]}


def test_what_is_copied_is_verified_and_what_is_there_is_left_out(
    root: Path, ask: Ask, tmp_path: Path
) -> None:
    flip(root, 7)
    archive = tmp_path / "archive"
    found, code = ask(store.copy, root, archive, dry_run=True)
    assert (counts_of(found)["tiny"], code) == ([20, 0, 0, 0], 0)
    assert not archive.exists()
    found, code = ask(store.copy, root, archive, model="ti*")
    assert (counts_of(found), code) == ({"tiny": [19, 0, 1, 0]}, 1)
    assert found["namespaces"][0]["copied_bytes"] == 19 * PAGE_BYTES
    found, code = ask(store.copy, root, archive)
    assert counts_of(found) == {"tiny": [0, 19, 1, 0], "other": [20, 0, 0, 0]}
    assert ask(store.verify, archive)[1] == 0
    listed, _ = ask(store.ls, archive)
    assert {one["model"]: one["recorded"] for one in listed["namespaces"]} == {
        "tiny": True,
        "other": True,
    }
    # And back: what an engine stored is found where its records were copied to.
    shutil.rmtree(root)
    assert ask(store.copy, archive, root)[1] == 0
    for number in range(20):
        (spot,) = locate(root, key_of(NAMESPACES[1], number))
        with spot.path.open("rb") as file:
            file.seek(spot.offset)
            expected = np.arange(20 * PAGE_BYTES, dtype=np.uint8)
            start = number * PAGE_BYTES
            got = file.read(PAGE_BYTES)
            assert got == expected[start : start + PAGE_BYTES].tobytes()


@pytest.mark.parametrize(("rate", "takes_s"), [("40 KiB", 1.0), ("", 0.0)])
def test_a_copy_keeps_to_its_rate_and_what_is_there_costs_nothing_of_it(
    root: Path,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rate: str,
    takes_s: float,
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(store, "time", clock)
    seconds = takes_s * 40 * PAGE_BYTES / 40960
    ask(store.copy, root, tmp_path / "archive", rate=rate)
    assert sum(slept) == pytest.approx(seconds)
    ask(store.copy, root, tmp_path / "archive", rate=rate)
    assert sum(slept) == pytest.approx(seconds)


def test_a_copy_without_any_rate_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="at a rate of 0"):
        store.copy(str(root), str(tmp_path / "archive"), rate="0")


def test_pages_are_copied_by_age_and_by_name(
    root: Path, ask: Ask, tmp_path: Path
) -> None:
    found, _ = ask(store.copy, root, tmp_path / "old", older="1 h")
    assert counts_of(found) == {"tiny": [0] * 4, "other": [0] * 4}
    found, _ = ask(store.copy, root, tmp_path / "new", newer="1 h")
    assert counts_of(found)["tiny"] == [20, 0, 0, 0]
    names = tmp_path / "names"
    names.write_text(f"{3:032x}.kv\n{key_of(NAMESPACES[1], 5)}\n")
    found, _ = ask(store.copy, root, tmp_path / "few", hashes=names)
    assert counts_of(found) == {"tiny": [1, 0, 0, 0], "other": [2, 0, 0, 0]}
    with pytest.raises(UsageProblem, match="same store"):
        store.copy(str(root), f"{root}/")


def test_a_copied_page_is_found_by_an_engine_on_the_other_store(
    ask: Ask, tmp_path: Path
) -> None:
    pool = mha("kv", layers=[0, 1], heads=2, head_dim=8, page_tokens=4, anchor=True)
    pages = [f"{page:064x}" for page in range(8)]
    memory = np.random.default_rng(3).integers(
        0, 256, (8, pool.page_bytes(Shard())), np.uint8
    )
    before = memory.copy()

    def engine(root: Path) -> Attachment:
        given = {"file": {"root": str(root)}}
        dock = Dock.load(only=["file"], settings=given, environ={})
        plan = dock.plan([pool], Shard(), ["file"], settings=given)
        regions = {"kv": Region.of(pool, Shard(), [memory], 8)}
        return Attachment.open(dock, plan, Namespace(model="m"), regions, given)

    with engine(tmp_path / "one") as cache:
        assert cache.put(pages, {"kv": range(8)}).pages == 8
    found, code = ask(store.copy, tmp_path / "one", tmp_path / "two")
    assert (counts_of(found), code) == ({"m": [8, 0, 0, 0]}, 0)
    memory[:] = 0
    with engine(tmp_path / "two") as cache:
        assert cache.get(pages, {"kv": range(8)}).pages == 8
        assert np.array_equal(memory, before)


QUOTA = ("quota=1 MiB",)


def promised(ask: Ask, root: Path) -> dict[str, tuple[int, int]]:
    """Return model to bytes that are promised and objects that expire."""
    found, _ = ask(store.ls, root, retained=True)
    return {
        one["model"]: (
            sum(pool["promised_bytes"] for pool in one["pools"]),
            sum(pool["expiring"] for pool in one["pools"]),
        )
        for one in found["namespaces"]
    }


def test_stored_pages_are_promised_from_the_command_line(
    root: Path, ask: Ask, tmp_path: Path
) -> None:
    assert promised(ask, root) == {}
    which = {"keep": "2 h", "set_": QUOTA}
    found, code = ask(
        store.retain, root, namespace=NAMESPACES[0][:8], dry_run=True, **which
    )
    assert (found["namespaces"][0]["pages"], code) == (20, 0)
    assert promised(ask, root) == {}
    names = tmp_path / "names"
    names.write_text(f"{3:032x}.kv\n{key_of(NAMESPACES[1], 5)}\n{'f' * 32}.kv\n")
    found, code = ask(store.retain, root, hashes=names, **which)
    assert (code, found["ok"]) == (0, True)
    assert [one["answers"] for one in found["namespaces"]] == [
        {"accepted": pages}
        for pages in sorted((1, 2), reverse=NAMESPACES[0] > NAMESPACES[1])
    ]
    assert promised(ask, root) == {"tiny": (4096, 0), "other": (8192, 0)}
    # An engine's budget counts them, and a smaller one has no room for more.
    found, code = ask(
        store.retain, root, namespace=NAMESPACES[0], keep="1 h", set_=("quota=64 KiB",)
    )
    assert (code, found["namespaces"][0]["answers"]) == (
        1,
        {"accepted": 8, "clipped": 12},
    )
    found, _ = ask(store.retain, root, older="1 h", **which)
    assert found["namespaces"] == []


def test_stored_pages_expire_by_the_command_line_and_are_overwritten(
    root: Path, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spot,) = locate(root, key_of(NAMESPACES[0], 7))
    names = tmp_path / "names"
    names.write_text(key_of(NAMESPACES[0], 7))
    found, code = ask(
        store.expire, root, namespace=NAMESPACES[0], hashes=names, after="0 s"
    )
    assert (code, found["namespaces"][0]["answers"]) == (0, {"accepted": 1})
    assert promised(ask, root) == {"tiny": (0, 1)}
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + 6)
    ask(store.gc, root)
    assert not spot.path.read_bytes()[spot.offset :][: spot.nbytes].strip(b"\0")
    assert promised(ask, root) == {}
    assert (
        ask(store.stat, root, namespace=NAMESPACES[0])[0]["namespace"]["pools"][0][
            "pages"
        ]
        == 19
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: store.retain("r", namespace="n"), "for how long"),
        (lambda: store.retain("r", namespace="n", keep="1 h"), "share of the quota"),
        (lambda: store.retain("r", keep="1 h", set_=QUOTA), "which pages"),
        (lambda: store.expire("r", namespace="n"), "says when"),
        (lambda: store.expire("r", after="0 s"), "which pages"),
    ],
)
def test_what_is_meant_must_be_said(call: Callable[[], int], said: str) -> None:
    with pytest.raises(UsageProblem, match=said):
        call()


def test_what_each_tenant_takes_is_shown_over_all_namespaces(
    root: Path, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "kvdock.toml"
    settings.write_text(
        '[tenants.acme]\nsalt = "of-acme"\nquota = "1 MiB"\n'
        '[tenants.default]\nquota = "2 MiB"\n'
    )
    monkeypatch.setenv("KVDOCK_CONFIG", str(settings))
    before, _ = ask(store.stat, root, tenants=True)
    core = load_configuration().core
    given = {"file": {"root": str(tmp_path / "new"), "free_space": 0}}
    pool = mha("kv", layers=[0, 1], heads=2, head_dim=8, page_tokens=4, anchor=True)
    memory = np.zeros((8, pool.page_bytes(Shard())), np.uint8)
    dock = Dock.load(only=["file"], settings=given, environ={})
    plan = dock.plan([pool], Shard(), ["file"], settings=given)
    regions = {"kv": Region.of(pool, Shard(), [memory], 8)}
    pages = [f"{n:032x}" for n in range(8)]
    for salt in ("of-acme", ""):
        namespace = Namespace(model="m", salt=salt)
        with Attachment.open(dock, plan, namespace, regions, given, core=core) as cache:
            assert cache.put(pages, {"kv": range(8)}).pages == 8
            acme = cache.for_tenant("acme")
            assert acme.put(pages[:3], {"kv": range(3)}).pages == 3
    found, code = ask(store.stat, tmp_path / "new", tenants=True)
    each = memory.nbytes // 8
    used = {name: one["used_bytes"] for name, one in found["tenants"].items()}
    assert (used, code) == ({"default": 8 * each, "acme": 14 * each}, 0)
    assert found["tenants"]["acme"]["quota_bytes"] == 1 << 20
    assert before["tenants"]["acme"]["used_bytes"] == 0
    assert before["tenants"]["default"]["used_bytes"] > 0
    every = b"".join(p.read_bytes() for p in (tmp_path / "new").rglob("*.idx"))
    names = "".join(map(str, (tmp_path / "new").rglob("*")))
    for secret in ("acme", "of-acme"):
        assert secret.encode() not in every
        assert secret not in names
