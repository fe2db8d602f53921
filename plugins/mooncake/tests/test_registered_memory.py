"""The table of registered memory, against sets of single bytes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock import Block
from kvdock.errors import RegionError
from kvdock_mooncake.registered_memory import KnownMemory

BASE = 1000
blocks = st.builds(Block, st.integers(BASE, BASE + 90), st.integers(1, 20))
piece = st.tuples(st.integers(BASE - 5, BASE + 110), st.integers(0, 25))


def covers(memory: KnownMemory, pieces: list[tuple[int, int]]) -> bool:
    table = np.array(pieces, np.int64).reshape(-1, 1, 2)
    return memory.covers(table[:, :, 0], table[:, :, 1])


@given(st.lists(blocks, max_size=6), st.lists(piece, min_size=1, max_size=4))
def test_a_batch_is_covered_if_every_piece_lies_in_one_range(
    wanted: list[Block], pieces: list[tuple[int, int]]
) -> None:
    memory = KnownMemory()
    registered: list[Block] = []
    for block in wanted:
        try:
            memory.add(block, registered.append)
        except RegionError:
            assert any(
                known.address < block.address + block.nbytes
                and block.address < known.address + known.nbytes
                for known in registered
            )
    assert list(memory.blocks) == sorted(registered, key=lambda one: one.address)
    expected = all(
        not size
        or any(
            known.address <= at and at + size <= known.address + known.nbytes
            for known in registered
        )
        for at, size in pieces
    )
    assert covers(memory, pieces) is expected


@given(st.lists(blocks, min_size=1, max_size=6))
def test_a_range_is_registered_once_and_unregistered_with_its_last_user(
    wanted: list[Block],
) -> None:
    memory = KnownMemory()
    calls: list[tuple[str, Block]] = []
    users: list[Block] = []
    for block in wanted:
        try:
            users.append(memory.add(block, lambda one: calls.append(("in", one))))
        except RegionError:
            continue
    for known in users:
        assert known in memory.blocks
        memory.remove(known, lambda one: calls.append(("out", one)))
    assert memory.blocks == ()
    ins = [one for way, one in calls if way == "in"]
    outs = [one for way, one in calls if way == "out"]
    assert sorted(ins, key=hash) == sorted(outs, key=hash)
    assert set(ins) == set(users)
    assert len(ins) == len(set(ins))


@given(st.lists(blocks, max_size=4), st.lists(st.tuples(*[st.integers(0, 400)] * 2)))
def test_one_row_of_sizes_for_all_is_judged_like_the_same_sizes_in_full(
    wanted: list[Block], rows: list[tuple[int, int]]
) -> None:
    memory = KnownMemory()
    for block in wanted:
        with contextlib.suppress(RegionError):
            memory.add(block, lambda _: None)
    addresses = BASE + np.array(rows, np.int64).reshape(-1, 2)
    for row in ([8, 24], [0, 40], [-1, 8], [2**63 - 1, 8]):
        sizes = np.broadcast_to(np.array(row, np.int64), addresses.shape)
        assert memory.covers(addresses, sizes) is memory.covers(addresses, sizes.copy())


def test_sizes_that_would_wrap_around_are_not_covered() -> None:
    memory = KnownMemory()
    memory.add(Block(BASE, 100), lambda _: None)
    assert not covers(memory, [(BASE, 2**63 - 1)])
    assert not covers(memory, [(BASE, -1)])
    memory.add(Block(BASE + 200, 100), lambda _: None)
    assert not covers(memory, [(BASE + 200, 2**63 - 1)])
    assert not covers(memory, [(BASE + 200, -8)])


def test_a_refused_registration_is_not_known() -> None:
    memory = KnownMemory()

    def refuse(_: Block) -> None:
        raise RegionError("no")

    with pytest.raises(RegionError):
        memory.add(Block(BASE, 10), refuse)
    assert memory.blocks == ()
    assert not covers(memory, [(BASE, 1)])
