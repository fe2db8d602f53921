"""A store that an earlier version wrote is read by this one, byte for byte."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import stored_sample
from stored_sample import DIGEST, POOLS, RANKS, Rank

from kvdock import Shard
from kvdock_segments import DirectoryStore
from kvdock_segments.index_file import read_contents
from kvdock_segments.paths import IndexName

DATA = Path(__file__).with_name("data")
EXPECTED = {
    name: json.loads((DATA / f"{name}.json").read_text())
    for name in stored_sample.SAMPLES
}
NAMES = [pool.name for pool in POOLS]


@pytest.fixture(params=stored_sample.SAMPLES)
def sample(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path, sample: str) -> Path:
    """Unpack the sample; return its root directory."""
    with tarfile.open(DATA / f"{sample}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "store"
    root.chmod(0o700)
    return root


def opened(root: Path, shard: Shard) -> Iterator[Rank]:
    one = Rank.open(root, shard)
    yield one
    one.attachment.close()


@pytest.fixture(params=RANKS, ids=lambda shard: f"rank {shard.tp_rank} of 2")
def rank(request: pytest.FixtureRequest, root: Path) -> Iterator[Rank]:
    yield from opened(root, request.param)


@pytest.fixture
def whole(root: Path) -> Iterator[Rank]:
    """One rank that holds what the two of the sample hold together."""
    yield from opened(root, Shard())


def all_found(rank: Rank, pool: str) -> list[int]:
    """Return every page that is found, once each is proven right."""
    found = []
    for numbers in stored_sample.generations():
        there = rank.found(pool, numbers)
        assert rank.right(pool, numbers) == there
        found += there
    return found


@pytest.mark.parametrize("pool", NAMES)
def test_every_page_is_found_and_right_and_evicted_ones_are_absent(
    rank: Rank, pool: str, sample: str
) -> None:
    at = next(iter(rank.memory.values())).shard.tp_rank
    wanted = EXPECTED[sample][f"{pool}.{at}"]
    assert all_found(rank, pool) == wanted


def test_heads_that_two_ranks_stored_are_read_by_one(whole: Rank, sample: str) -> None:
    held = EXPECTED[sample]
    both = set(held["cross.0"]) & set(held["cross.1"])
    assert all_found(whole, "cross") == sorted(both)
    # States and undivided heads belong to ranks of one size.
    assert not all_found(whole, "mamba")
    assert not all_found(whole, "draft")


def test_the_sample_has_evicted_pages_and_recycled_segments(
    root: Path, sample: str
) -> None:
    everything = stored_sample.GENERATIONS * stored_sample.GENERATION
    held = EXPECTED[sample].values()
    assert sum(len(pages) < everything for pages in held) > len(NAMES)
    files = [path.name for path in (root / DIGEST).glob("*/*")]
    assert any(".00000002." in name for name in files)
    assert {Path(name).suffix for name in files} == {".dat", ".idx", ".open"}


def test_the_namespace_has_its_name(rank: Rank) -> None:
    assert rank.attachment.namespace == DIGEST


def test_pages_go_on_being_stored_beside_what_is_there(root: Path) -> None:
    more = range(1000, 1000 + stored_sample.GENERATION)
    ranks = [Rank.open(root, shard) for shard in RANKS]
    for rank in ranks:
        rank.put(more)
    for rank in ranks:
        for pool in NAMES:
            assert rank.right(pool, more) == list(more)
            for numbers in stored_sample.generations():
                rank.right(pool, numbers)
        rank.attachment.close()


def versions(root: Path) -> set[int]:
    """Return the versions of the index files that are there."""
    return {
        int.from_bytes(path.read_bytes()[8:12], "little")
        for state in ("idx", "open")
        for path in (root / DIGEST).glob(f"*/*.{state}")
    }


def test_each_version_has_a_sample_and_is_converted_when_it_is_written(
    root: Path, sample: str
) -> None:
    version = 1 + stored_sample.SAMPLES.index(sample)
    assert versions(root) == {version}
    first = Rank.open(root, RANKS[0])
    assert versions(root) == {version}
    before = all_found(first, "kv")
    first.put(range(1000, 1000 + stored_sample.GENERATION))
    first.attachment.close()
    assert 2 in versions(root)
    again = Rank.open(root, RANKS[0])
    assert len(set(all_found(again, "kv")) & set(before)) > len(before) // 4
    assert again.right("kv", range(1000, 1064)) == list(range(1000, 1064))
    again.attachment.close()
    (found,) = DirectoryStore(root).namespaces()
    assert DirectoryStore(root).verify(found).ok


def test_fields_that_nothing_writes_yet_are_read(root: Path, sample: str) -> None:
    if sample == stored_sample.SAMPLES[0]:
        pytest.skip("version 1 has no such fields")
    report = DirectoryStore(root).verify(DIGEST)
    assert report.ok
    assert report.failed_slots == 1
    index = min((root / DIGEST).glob("kv.*/*.idx"))
    name = IndexName.parse(index.name)
    assert name
    with index.open("rb") as file:
        size = index.with_name(name.data).stat().st_size
        contents = read_contents(file.fileno(), name, size)
    assert contents
    marked = contents.records[contents.records["tenant"] == 7]
    assert (marked["key_id"] == 9).all()
    assert sorted(marked["expire_at"].tolist()) == [0, 0, 1, 1, 2**32 - 1, 2**32 - 1]
    assert sorted(marked["keep_until"].tolist())[-3:] == [1, 2**32 - 1, 2**32 - 1]
