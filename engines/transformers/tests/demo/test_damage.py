"""Pages are found on disk and harmed, however they are laid out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock_transformers.demo.damage import Harm, inflict
from kvdock_transformers.demo.records import PoolRecord

PAGE_BYTES = 256


def page_bytes_of(page: int) -> bytes:
    return bytes((page * 7 + i * (page + 1)) % 256 for i in range(PAGE_BYTES))


PAGES = {page: page_bytes_of(page) for page in range(4)}


def record(page_bytes: int, ends: dict[int, tuple[bytes, bytes]]) -> PoolRecord:
    return PoolRecord(
        stored=tuple(ends),
        loaded_pages=0,
        page_bytes=page_bytes,
        ends=tuple((head.hex(), tail.hex()) for head, tail in ends.values()),
    )


STORED = {
    "kv": record(
        PAGE_BYTES, {page: (data[:16], data[-16:]) for page, data in PAGES.items()}
    )
}


@pytest.fixture
def one_file_each(tmp_path: Path) -> Path:
    for page, data in PAGES.items():
        (tmp_path / f"{page}.page").write_bytes(b"head" + data + b"tail")
    return tmp_path


@pytest.fixture
def one_file_for_all(tmp_path: Path) -> Path:
    (tmp_path / "segment").write_bytes(b"head".join(PAGES.values()))
    return tmp_path


def test_a_flip_changes_one_byte_of_its_page(one_file_each: Path) -> None:
    damage = inflict(one_file_each, STORED, [("kv", 2, Harm.FLIP)])
    data = (one_file_each / "2.page").read_bytes()[4:-4]
    assert sum(a != b for a, b in zip(data, PAGES[2], strict=True)) == 1
    assert damage.lost == {("kv", 2)}


def test_a_truncated_file_ends_within_its_page(one_file_each: Path) -> None:
    damage = inflict(one_file_each, STORED, [("kv", 1, Harm.TRUNCATE)])
    assert len((one_file_each / "1.page").read_bytes()) < PAGE_BYTES
    assert damage.lost == {("kv", 1)}


def test_a_deleted_file_is_gone(one_file_each: Path) -> None:
    damage = inflict(one_file_each, STORED, [("kv", 0, Harm.DELETE)])
    assert not (one_file_each / "0.page").exists()
    assert damage.lost == {("kv", 0)}


def test_an_extended_file_leaves_its_page_in_doubt(one_file_each: Path) -> None:
    damage = inflict(one_file_each, STORED, [("kv", 3, Harm.EXTEND)])
    assert len((one_file_each / "3.page").read_bytes()) > PAGE_BYTES + 8
    assert not damage.lost
    assert damage.doubtful == {("kv", 3)}


def test_truncating_a_shared_file_loses_all_pages_behind(
    one_file_for_all: Path,
) -> None:
    damage = inflict(one_file_for_all, STORED, [("kv", 1, Harm.TRUNCATE)])
    assert damage.lost == {("kv", 1), ("kv", 2), ("kv", 3)}


def test_a_page_deleted_from_a_shared_file_leaves_the_others(
    one_file_for_all: Path,
) -> None:
    damage = inflict(one_file_for_all, STORED, [("kv", 1, Harm.DELETE)])
    content = (one_file_for_all / "segment").read_bytes()
    assert [data in content for data in PAGES.values()] == [True, False, True, True]
    assert damage.lost == {("kv", 1)}


def test_all_harms_of_a_shared_file_are_done(one_file_for_all: Path) -> None:
    harms = [(3, Harm.TRUNCATE), (2, Harm.EXTEND), (1, Harm.DELETE), (0, Harm.FLIP)]
    targets = [("kv", page, harm) for page, harm in harms]
    damage = inflict(one_file_for_all, STORED, targets)
    content = (one_file_for_all / "segment").read_bytes()
    assert [data in content for data in PAGES.values()] == [False, False, True, False]
    assert damage.lost == {("kv", 0), ("kv", 1), ("kv", 3)}


def test_surplus_behind_a_shared_file_casts_doubt_on_its_last_page_alone(
    one_file_for_all: Path,
) -> None:
    damage = inflict(one_file_for_all, STORED, [("kv", 1, Harm.EXTEND)])
    assert not damage.lost
    assert damage.doubtful == {("kv", 3)}


def test_pages_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"the same" + bytes(100) + b"one!")
    (tmp_path / "b").write_bytes(b"the same" + bytes(100) + b"two!")
    pages = {"kv": record(112, {0: (b"the same", b"two!")})}
    inflict(tmp_path, pages, [("kv", 0, Harm.DELETE)])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_page_that_is_nowhere_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert inflict(tmp_path, STORED, [("kv", 0, Harm.FLIP)]).done == ()
