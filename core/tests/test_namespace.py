from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import NamespaceError
from kvdock.namespace import (
    RECORD_NAME,
    Difference,
    Namespace,
    canonical,
    decode_record,
    diff_records,
    flatten_record,
    format_layers,
    load_record,
    namespace_digest,
    namespace_record,
    verify_record,
)
from kvdock.pools.enums import DType, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec

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


def test_a_number_and_its_text_look_different() -> None:
    assert flatten_record({"a": 1, "b": "1", "c": None, "d": "x"}) == {
        "a": "1",
        "b": '"1"',
        "c": "null",
        "d": "x",
    }


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


def test_a_folder_of_another_name_is_only_read(tmp_path: Path) -> None:
    assert load_record(store(tmp_path / "copy", RECORD)) == RECORD


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_not_a_file_is_not_read_as_a_record(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / RECORD_NAME)
    with pytest.raises(NamespaceError, match="no namespace record can be read"):
        load_record(tmp_path)


def test_a_missing_record_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NamespaceError, match=r"namespace\.json: No such file"):
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
