from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import KvdockError, NamespaceError
from kvdock.generations import Generation, run_of
from kvdock.namespace import (
    RECORD_NAME,
    Difference,
    Namespace,
    canonical,
    decode_record,
    diff_records,
    format_layers,
    load_record,
    namespace_digest,
    namespace_record,
    verify_record,
)
from kvdock.pools.enums import DType, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec
from kvdock.stores import QUIET_S, delete_former

KV = PoolSpec(
    name="kv",
    kind=PoolKind.MLA,
    parts=(Part("kv", DType.BF16, (576,)), Part("scale", DType.F32, (1,))),
    layers=range(61),
    page_tokens=64,
    anchor=True,
)

RECORD = namespace_record(Namespace(model="m"), [KV])


def test_a_record_is_read_back_as_it_was_written() -> None:
    read = decode_record(canonical(RECORD))
    assert read == RECORD
    assert hashlib.sha256(canonical(RECORD)).hexdigest() == namespace_digest(read)


def test_a_difference_names_the_field_and_both_values() -> None:
    parts = (attrs.evolve(KV.parts[0], dtype=DType.FP8_E4M3), KV.parts[1])
    other = namespace_record(
        Namespace(model="m", lora="a"),
        [attrs.evolve(KV, parts=parts, layers=range(62))],
    )
    assert diff_records(RECORD, other) == (
        Difference("lora", '""', "a"),
        Difference("pools.kv.layers", "0-60", "0-61"),
        Difference("pools.kv.parts.kv.dtype", "bf16", "fp8_e4m3"),
    )


def test_a_pool_that_only_one_has_differs_in_all_its_fields() -> None:
    draft = attrs.evolve(KV, name="draft", anchor=False, draft=True)
    other = namespace_record(Namespace(model="m"), [KV, draft])
    found = diff_records(RECORD, other)
    assert {one.left for one in found} == {"-"}
    assert Difference("pools.draft.kind", "-", "mla") in found


def test_another_order_of_parts_is_a_difference() -> None:
    other = namespace_record(
        Namespace(model="m"), [attrs.evolve(KV, parts=KV.parts[::-1])]
    )
    assert diff_records(RECORD, other) == (
        Difference("pools.kv.parts.order", "kv, scale", "scale, kv"),
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["model", "lora", "salt", "page_format"]),
            st.sampled_from(
                ["", "1", "a", "{}", '{"a": 1}', '{"a": {}}', '{"a":1}', '{"a": [{}]}']
            ),
        ),
        max_size=3,
    )
)
def test_nothing_differs_exactly_where_the_digests_are_equal(
    changes: list[tuple[str, str]],
) -> None:
    namespace = attrs.evolve(
        Namespace(model="m"), **{k: v for k, v in changes if v or k != "model"}
    )
    other = namespace_record(namespace, [KV])
    same = namespace_digest(other) == namespace_digest(RECORD)
    assert same == (not diff_records(RECORD, other))


def test_what_an_engine_wrote_as_json_is_compared_line_by_line() -> None:
    left, right = (
        namespace_record(Namespace(model="m", page_format=text), [KV])
        for text in (
            '{"block_size": 16, "layers": {"is A": ["one"]}}',
            '{"block_size": 32, "layers": {"is A": ["one"]}}',
        )
    )
    assert diff_records(left, right) == (
        Difference("page_format.block_size", "16", "32"),
    )


def test_layers_are_shown_as_ranges() -> None:
    assert format_layers([]) == ""
    assert format_layers([0]) == "0"
    assert format_layers([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_a_record_is_verified_against_the_digest_it_stands_for() -> None:
    digest = namespace_digest(RECORD)
    verify_record(RECORD, digest)
    with pytest.raises(NamespaceError, match="must not be used"):
        verify_record({**RECORD, "lora": "other"}, digest)


def store(folder: Path, record: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / RECORD_NAME).write_bytes(canonical(record))
    return folder


def test_a_folder_of_a_digest_holds_the_record_of_that_digest(tmp_path: Path) -> None:
    folder = store(tmp_path / namespace_digest(RECORD), RECORD)
    assert load_record(folder) == RECORD
    assert load_record(folder / RECORD_NAME) == RECORD
    (folder / RECORD_NAME).write_bytes(canonical({**RECORD, "model": "other"}))
    with pytest.raises(NamespaceError, match="altered or misplaced"):
        load_record(folder)


def test_a_folder_of_a_digest_is_known_by_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store(tmp_path / namespace_digest(RECORD), {**RECORD, "model": "other"})
    (tmp_path / "link").symlink_to(folder)
    elsewhere = store(tmp_path / "elsewhere", RECORD)
    (tmp_path / ("0" * 64)).symlink_to(elsewhere)
    monkeypatch.chdir(folder)
    for path in (".", RECORD_NAME, "../link", f"../{'0' * 64}"):
        with pytest.raises(NamespaceError, match="altered or misplaced"):
            load_record(Path(path))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_not_a_file_is_not_read_as_a_record(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / RECORD_NAME)
    with pytest.raises(NamespaceError, match="no namespace record can be read"):
        load_record(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", "is not JSON"),
        (b"[1]", "is not a namespace record"),
        (b"{}", "is not a namespace record"),
        (b'{"schema": 99}', "has schema 99, this kvdock knows 1"),
        (b'{"schema": 1}' + b" " * (1 << 20), "too large"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_record_is_refused(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / RECORD_NAME).write_bytes(data)
    with pytest.raises(NamespaceError, match=message):
        load_record(tmp_path)


def record(generation: str) -> dict[str, object]:
    return namespace_record(Namespace(model="m", generation=generation), [KV])


def test_no_generation_leaves_records_as_they_were() -> None:
    assert "generation" not in record("")
    # What engines have stored since before there were generations.
    assert namespace_digest(record("")).startswith("0a75e8c4eac7760d")


def test_a_generation_is_the_same_for_the_same_run_version_and_files() -> None:
    same = Generation(run="policy", version="7")
    assert same.text == Generation(version="7", run="policy").text
    others = [
        Generation(run="policy", version="8"),
        Generation(run="other", version="7"),
        Generation(run="policy", version="7", weights="files"),
        Generation(version="7"),
        Generation.private(),
        Generation.private(),
    ]
    digests = {namespace_digest(record(one.text)) for one in (same, *others)}
    assert len(digests) == 1 + len(others)


def test_a_record_says_which_generation_it_is_of() -> None:
    one = Generation(run="policy", version="7", weights="files")
    assert Generation.of(record(one.text)) == one
    for text in ("", "7", "[]", '{"run": "policy"}', '{"version": ""}'):
        assert Generation.of(record(text)) is None
    (difference,) = diff_records(
        record(one.text),
        record(Generation(run="policy", version="8", weights="files").text),
    )
    assert difference.field == "generation.version"


def test_a_setting_names_a_run_or_none() -> None:
    assert run_of("run: policy ") == "policy"
    assert run_of("private") == ""
    for wrong in ("", "run:", "policy"):
        with pytest.raises(KvdockError, match="generations is"):
            run_of(wrong)


class Shelf:
    """What `delete_former` asks of a store."""

    def __init__(
        self, *stored: tuple[str, int, bool], shows_users: bool = True
    ) -> None:
        self.stored = {f"{one[0]}-{one[1]}": one for one in stored}
        self.shows_users = shows_users

    def now_ns(self) -> int:
        return int(QUIET_S * 1e9) + 100

    def namespaces(self) -> list[str]:
        return sorted(self.stored)

    def record(self, namespace: str) -> dict[str, object]:
        text = self.stored[namespace][0]
        return record(text) if text else {}

    def in_use(self, namespace: str) -> str:
        return "open" if self.stored[namespace][2] else ""

    def survey(self, namespace: str) -> Any:
        return SimpleNamespace(used_ns=self.stored[namespace][1])

    def clear(self, namespace: str, *, unused: bool = False) -> int:
        assert unused == self.shows_users
        if namespace.endswith("-13"):  # opened since it was asked for
            raise KvdockError("a process has it open")
        del self.stored[namespace]
        return 10

    def collect(self, namespace: str) -> int:
        return 0 if namespace in self.stored else 1


def version(number: str, run: str = "policy") -> str:
    return Generation(run=run, version=number).text


@pytest.mark.parametrize(
    ("keep", "left"), [(0, ()), (1, (4,)), (2, (4, 3)), (9, (1, 2, 3, 4))]
)
def test_of_a_run_the_last_used_versions_stay_and_private_ones_go(
    keep: int, left: tuple[int, ...]
) -> None:
    stays = [
        ("", 20, False),
        (version("8"), 21, True),
        (version("1", "other"), 22, False),
    ]
    mine = [(version(f"{used}"), used, False) for used in (1, 2, 3, 4)]
    gone = [
        (Generation.private().text, 11, False),
        (Generation.private().text, 12, False),
    ]
    shelf = Shelf(*stays, *mine, *gone, (Generation.private().text, 13, False))
    assert delete_former(shelf, "policy", keep) > 0  # type: ignore[arg-type]  # what it asks of a store
    assert {used for _, used, _ in shelf.stored.values()} == {20, 21, 22, 13, *left}


def test_where_none_shows_what_is_open_only_what_is_left_or_quiet_goes() -> None:
    texts = [Generation.private().text for _ in range(4)]
    private = [(texts[0], 90, False), (texts[1], 101, False), (texts[2], 102, False)]
    here = (texts[3], 91, False)
    versions = [(version(f"{at}"), at, False) for at in (92, 93, 103, 104)]
    back = (version("back"), 94, False)
    shelf = Shelf(*private, here, *versions, back, shows_users=False)
    delete_former(
        shelf,  # type: ignore[arg-type]  # what it asks of a store
        "policy",
        1,
        left={f"{texts[1]}-101"},
        present={f"{texts[3]}-91", f"{version('back')}-94"},
    )
    # Of the run 104 is the last, and 103 was written just now.
    assert {used for _, used, _ in shelf.stored.values()} == {102, 91, 103, 104, 94}


def test_people_see_the_run_and_the_version() -> None:
    assert str(Generation(run="policy", version="7")) == "policy 7"
    assert str(Generation(version="abc")) == "private abc"
