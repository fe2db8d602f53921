from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from shelf import attention, hashes, indexer, memory_at, states

from kvdock.batch import Outcome
from kvdock.geometry.region import Region
from kvdock.pools.enums import Layout
from kvdock.pools.objects import TRAILER_BYTES
from kvdock.pools.shard import Shard
from kvdock.transfer.host_memory import ALIGN_BYTES
from kvdock.transfer.integrity import (
    DATED_TRAILER,
    TRAILER,
    Hasher,
    TrailerBuffers,
    compare_trailers,
    make_dated_trailers,
    make_trailers,
)
from kvdock.transfer.staging import StagingBuffers

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec
    from kvdock.transfer.integrity import Sealed

PAGES = 5
POOLS = [attention(layout=layout) for layout in Layout] + [states(), indexer()]


def region_of(pool: PoolSpec) -> Region:
    generator = np.random.default_rng(7)
    size = pool.page_bytes(Shard()) * PAGES
    memory = generator.integers(0, 256, size, np.uint8)
    return Region.of(pool, Shard(), [memory], PAGES)


def keys_of(region: Region, pages: int) -> list[str]:
    return [
        f"{name}.{at}" for name in hashes(pages) for at in range(len(region.objects))
    ]


def test_a_trailer_is_forty_bytes_everywhere() -> None:
    assert TRAILER.itemsize == TRAILER_BYTES == 40
    [one] = make_trailers(["k"], [5], np.array([0x0102030405060708], np.uint64))
    assert one.tobytes() == (
        b"KVTR\x01\x00\x00\x00"
        + xxhash.xxh3_128_digest(b"k")
        + (5).to_bytes(8, "little")
        + bytes([8, 7, 6, 5, 4, 3, 2, 1])
    )


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.name}-{pool.layout}")
def test_pages_are_hashed_where_they_lie_in_every_layout(pool: PoolSpec) -> None:
    region = region_of(pool)
    pages = np.array([3, 0, 4])
    rows = np.zeros((3, int(region.object_bytes.sum())), np.uint8)
    region.gather(pages, rows)
    ends = np.cumsum(region.object_bytes).tolist()
    starts = [0, *ends[:-1]]
    wanted = [
        [
            xxhash.xxh3_64_intdigest(row[a:b].tobytes())
            for a, b in zip(starts, ends, strict=True)
        ]
        for row in rows
    ]
    assert Hasher.of(region).digests(pages).tolist() == wanted


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("pieces", [1, 2])
def test_objects_of_a_page_differ_in_size(count: int, pieces: int) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 8 * 2000, np.uint8)
    bases = memory.ctypes.data + np.array([[0, 400], [800, 1100]])[:, :pieces]
    sizes = np.array([[300, 250], [299, 800]])[:, :pieces]
    pages = np.arange(count)[::-1]
    wanted = [
        [
            xxhash.xxh3_64_intdigest(
                b"".join(
                    memory[at + 2000 * page :][:size].tobytes()
                    for at, size in zip(row, each, strict=True)
                )
            )
            for row, each in zip(
                (bases - memory.ctypes.data).tolist(), sizes.tolist(), strict=True
            )
        ]
        for page in pages.tolist()
    ]
    hasher = Hasher(bases, np.full_like(bases, 2000), sizes)
    assert hasher.digests(pages).tolist() == wanted


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.name}-{pool.layout}")
def test_the_trailer_is_the_last_piece_of_its_object_in_registered_memory(
    pool: PoolSpec,
) -> None:
    plain = region_of(pool)
    longer = TrailerBuffers.attach_to(plain).region
    assert (longer.object_bytes == plain.object_bytes + TRAILER_BYTES).all()
    for before, after in zip(plain.sizes.tolist(), longer.sizes.tolist(), strict=True):
        pieces = [size for size in before if size]
        assert [size for size in after if size] == [*pieces, TRAILER_BYTES]
    *_, block = longer.blocks
    addresses, sizes = longer.addresses(range(PAGES))
    tails = addresses[np.arange(len(addresses)), (sizes > 0).sum(axis=1) - 1]
    assert len(set(tails.tolist())) == len(tails)
    assert (tails >= block.address).all()
    assert (tails + TRAILER_BYTES <= block.address + block.nbytes).all()


def test_only_what_was_sealed_under_this_key_passes() -> None:
    region = region_of(attention())
    trailers = TrailerBuffers.attach_to(region)
    keys, pages = keys_of(region, 3), np.array([1, 2, 4])
    fine = np.zeros(3, np.uint8)
    trailers.write(keys, pages)
    assert trailers.verify(keys, pages, fine).tolist() == [0, 0, 0]
    swapped = trailers.verify([keys[1], keys[0], keys[2]], pages, fine)
    assert swapped.tolist() == [Outcome.CORRUPT, Outcome.CORRUPT, 0]
    trailers.clear(pages[:1])
    assert trailers.verify(keys, pages, fine).tolist() == [Outcome.CORRUPT, 0, 0]


@given(
    pool=st.sampled_from(POOLS),
    pages=st.permutations(range(PAGES)).flatmap(
        lambda every: st.integers(0, PAGES).map(lambda count: every[:count])
    ),
    wrong=st.none() | st.tuples(st.integers(0, 15), st.integers(0, TRAILER_BYTES - 1)),
)
def test_trailers_are_compared_one_by_one_as_in_arrays(
    pool: PoolSpec, pages: list[int], wrong: tuple[int, int] | None
) -> None:
    region = region_of(pool)
    trailers = TrailerBuffers.attach_to(region)
    keys, each = keys_of(region, len(pages)), len(region.objects)
    trailers.write(keys, np.array(pages, np.int64))
    if wrong and pages:
        which, at = wrong
        slots = trailers.slots[which % each]
        raw = bytearray(slots[pages[which % len(pages)]].tobytes())
        raw[at] ^= 0x80
        slots[pages[which % len(pages)]] = np.frombuffer(bytes(raw), TRAILER)[0]
    fine = np.zeros(len(keys), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrailerBuffers, "all_right", lambda *_: False)
        general = trailers.verify(keys, np.array(pages, np.int64), fine)
    assert trailers.all_right(keys, np.array(pages, np.int64)) == (not general.any())


def test_what_the_backend_calls_a_miss_stays_that_miss() -> None:
    region = region_of(attention())
    trailers = TrailerBuffers.attach_to(region)
    keys, pages = keys_of(region, 3), np.array([0, 1, 2])
    trailers.write(keys, pages)
    said = np.array([Outcome.ABSENT, Outcome.OK, Outcome.TIMEOUT], np.uint8)
    assert trailers.verify(keys, pages, said).tolist() == said.tolist()


def test_another_length_under_the_same_key_says_so() -> None:
    keys = ["a", "b", "c"]
    digests = np.zeros(3, np.uint64)
    found = make_trailers(keys, [9, 10, 11], digests)
    wanted = make_trailers(keys, [10, 10, 10], digests)
    assert compare_trailers(found, wanted).tolist() == [
        Outcome.SHORT,
        Outcome.OK,
        Outcome.LONG,
    ]


@given(st.integers(0, TRAILER_BYTES - 1), st.integers(1, 255))
def test_any_altered_byte_of_a_trailer_is_seen(at: int, flip: int) -> None:
    wanted = make_trailers(["key"], [64], np.array([12345], np.uint64))
    raw = bytearray(wanted.tobytes())
    raw[at] ^= flip
    found = np.frombuffer(bytes(raw), TRAILER)
    assert compare_trailers(found, wanted)[0] != Outcome.OK


def dated(at: float, **more: int) -> tuple[Sealed, Sealed]:
    """Return the trailer of an object that expires then, and the expected one."""
    digest = np.array([0x0102030405060708], np.uint64)
    found = make_dated_trailers(["k"], [5], digest, expire_at=int(at), **more)
    return found, make_trailers(["k"], [5], digest)


def test_a_trailer_of_format_2_is_forty_bytes_everywhere() -> None:
    assert DATED_TRAILER.itemsize == TRAILER_BYTES
    found, _ = dated(0x55667788, tenant=0x11223344)
    one, two = 0x1122334400000000 | 0x024B, 5 << 32 | 0x55667788
    bound = one * 0x9E6C63D0976B2D1B + two * 0xD1342543DE82EF95
    digest = 0x0102030405060708 ^ bound % 2**64
    assert found.tobytes() == (
        one.to_bytes(8, "little")
        + two.to_bytes(8, "little")
        + xxhash.xxh3_128_digest(b"k")
        + digest.to_bytes(8, "little")
    )


def test_what_has_expired_is_absent_and_anything_else_is_found() -> None:
    now = time.time()
    for expire_at, wanted in ((0, 0), (now + 60, 0), (now - 1, Outcome.ABSENT)):
        assert compare_trailers(*dated(expire_at)).tolist() == [wanted]
        assert compare_trailers(*dated(expire_at, tenant=9)).tolist() == [wanted]


def test_what_is_sealed_is_not_taken_for_plain_bytes() -> None:
    assert compare_trailers(*dated(0, key_id=7)).tolist() == [Outcome.CORRUPT]


def test_trailers_of_both_formats_may_come_together() -> None:
    keys, digests = ["a", "b", "c"], np.array([1, 2, 3], np.uint64)
    wanted = make_trailers(keys, [9, 9, 9], digests)
    found = wanted.copy()
    found[1:] = make_dated_trailers(keys[1:], [9, 8], digests[1:], tenant=1)
    assert compare_trailers(found, wanted).tolist() == [0, 0, Outcome.SHORT]


@given(st.integers(0, TRAILER_BYTES - 1), st.integers(1, 255))
def test_any_altered_byte_of_a_trailer_of_format_2_is_seen(at: int, flip: int) -> None:
    found, wanted = dated(2**32 - 1, tenant=3)
    raw = bytearray(found.tobytes())
    raw[at] ^= flip
    altered = np.frombuffer(bytes(raw), TRAILER)
    assert compare_trailers(altered, wanted)[0] not in (Outcome.OK, Outcome.ABSENT)


@pytest.mark.parametrize("trailers", [True, False])
@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.name}-{pool.layout}")
def test_a_staging_row_holds_each_object_in_one_run(
    pool: PoolSpec, *, pieces: bool, trailers: bool
) -> None:
    region = region_of(pool)
    staging = StagingBuffers(region, 2, 3, trailers=trailers, pieces=pieces)
    tail = TRAILER_BYTES if trailers else 0
    assert (staging.region.object_bytes == region.object_bytes + tail).all()
    assert staging.region.pages == 6
    block = staging.region.blocks[0]
    assert block.address % ALIGN_BYTES == 0
    addresses, sizes = staging.region.addresses(range(6))
    for row, lengths in zip(addresses.tolist(), sizes.tolist(), strict=True):
        at = row[0]
        for address, length in zip(row, lengths, strict=True):
            assert not length or address == at
            at += length
        assert at <= block.address + block.nbytes


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.name}-{pool.layout}")
def test_staged_objects_are_verified_as_those_in_place_are(pool: PoolSpec) -> None:
    pool = attrs.evolve(pool, head_group=1) if pool.by_head else pool
    region = region_of(pool)
    staging = StagingBuffers(region, 2, 3, trailers=True)
    trailers, area = staging.trailers, staging.acquire(0.0)
    assert trailers is not None
    assert area is not None
    objects = len(region.objects)
    keys, numbers = keys_of(region, 3), area.numbers(3)
    generator = np.random.default_rng(1)
    for at in range(objects):
        payload = area.payload(at, 3)
        payload[:] = generator.integers(0, 256, payload.shape)
    trailers.write(keys, numbers)
    # Behind each payload, in the very row that the backend stores.
    in_place = make_trailers(
        keys, np.tile(region.object_bytes, 3), trailers.hasher.digests(numbers).ravel()
    )
    for row, (addresses, sizes) in enumerate(
        zip(*staging.region.addresses(numbers), strict=True)
    ):
        end = int(addresses[0] + sizes[0])
        stored = memory_at(end - TRAILER_BYTES, TRAILER_BYTES)
        assert bytes(stored) == in_place[row].tobytes()
    fine = np.zeros(3 * objects, np.uint8)
    assert not trailers.verify(keys, numbers, fine).any()
    area.payload(objects - 1, 3)[1, 0] ^= 1
    wrong = trailers.verify(keys, numbers, fine).reshape(3, objects)
    assert np.argwhere(wrong).tolist() == [[1, objects - 1]]
    trailers.clear(numbers)
    assert (trailers.verify(keys, numbers, fine) == Outcome.CORRUPT).all()
