"""Rows that go straight into a peer's memory, where that is declared."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from kvdock.batch import Batch, Outcome
from kvdock.errors import KvdockError
from kvdock.plugin.store import endpoint_of
from kvdock.testing.cases import claimed, contract_test

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvdock.arrays import Int64Array
    from kvdock.testing.harness import Harness, Setup

_CONNECT_S = 30.0
_LATE_S = 0.3
"""How long to look for bytes that must not come."""


@attrs.define(eq=False)
class Pair:
    """Two pools of one process: rows go from the first to the second."""

    near: Setup
    far: Setup
    peers: list[object] = attrs.field(factory=list)

    def connect(self, endpoint: bytes = b"") -> None:
        """Connect the first pool to an endpoint, that of the second one by default."""
        far = self.far
        endpoint = endpoint or endpoint_of(far.store.peers, far.backend.name)
        deadline_s = self.near.until(_CONNECT_S)
        self.peers.append(self.near.store.peers.connect(endpoint, deadline_s))

    def disconnect(self) -> None:
        """End all connections."""
        for peer in self.peers:
            self.near.store.peers.disconnect(peer)

    def send(
        self, local: Int64Array, remote: Int64Array, sizes: Int64Array
    ) -> npt.NDArray[np.uint8]:
        """Send rows in calls that the plugin takes; return their outcomes."""
        limit = self.near.backend.manifest.max_send_rows or len(local)
        found = [np.zeros(0, np.uint8)]
        for start in range(0, len(local), limit):
            chosen = slice(start, start + limit)
            rows = (local[chosen], remote[chosen], sizes[chosen])
            batch = Batch.send(
                *rows, self.peers[-1], self.near.until(), self.near.pool.name
            )
            result = self.near.call_once(batch)
            found.append(result.outcomes)
        return np.concatenate(found)


@contextmanager
def paired(harness: Harness) -> Iterator[Pair]:
    """Attach the same pool twice, each with memory of its own, and connect them."""
    pair = Pair(harness.plain(), harness.plain())
    try:
        pair.connect()
        yield pair
    finally:
        pair.disconnect()


def block_of(setup: Setup) -> tuple[int, npt.NDArray[np.uint8]]:
    """Return the address of memory that a plugin knows, and its bytes."""
    if setup.staging is not None:
        rows = setup.staging.reshape(-1)
        return int(rows.ctypes.data), rows
    block = max(setup.region.blocks, key=lambda one: one.nbytes)
    raw = (ctypes.c_uint8 * block.nbytes).from_address(block.address)
    return block.address, np.frombuffer(memoryview(raw), np.uint8)


def scattered(
    near: int, far: int, nbytes: int, count: int, seed: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return rows of odd sizes, each in a cell of its own on both sides.

    Some are neighbours on one side and not on the other.
    """
    rng = np.random.default_rng(seed)
    cell = nbytes // count
    sizes = rng.integers(1, cell, count)
    whole = rng.random(count) < 0.5
    sizes[whole] = cell
    places = np.arange(count) * cell
    return near + places, far + rng.permutation(places), sizes.astype(np.int64)


class PeerTests:
    """Rows that go straight into a peer's memory."""

    @contract_test(claimed("peers"), proves="peers")
    def test_rows_arrive_at_their_addresses_and_nowhere_else(
        self, harness: Harness
    ) -> None:
        with paired(harness) as pair:
            near, source = block_of(pair.near)
            far, target = block_of(pair.far)
            nbytes = min(len(source), len(target))
            for seed, count in enumerate((1, 7, nbytes // 8)):
                source[:] = np.random.default_rng(seed).integers(1, 256, len(source))
                target[:] = 0
                rows = scattered(near, far, nbytes, count, seed)
                outcomes = pair.send(*rows)
                assert (outcomes == Outcome.OK).all(), f"{count} rows: {outcomes}"
                expected = np.zeros_like(target)
                for local, remote, size in zip(*rows, strict=True):
                    at = int(local) - near
                    expected[int(remote) - far :][: int(size)] = source[
                        at : at + int(size)
                    ]
                wrong = np.flatnonzero(target != expected)
                assert not len(wrong), (
                    f"{len(wrong)} bytes of {count} rows are not what was sent, the "
                    f"first at offset {wrong[0]}"
                )

    @contract_test(claimed("peers"), proves="peers")
    def test_a_row_that_is_ok_is_there(self, harness: Harness) -> None:
        with paired(harness) as pair:
            near, source = block_of(pair.near)
            far, target = block_of(pair.far)
            nbytes = min(len(source), len(target))
            one = np.array([near]), np.array([far]), np.array([nbytes])
            for turn in range(1, 40):
                source[:] = turn
                (outcome,) = pair.send(*one)
                assert outcome == Outcome.OK
                # Without a pause: on that answer the receiver reads its slots.
                late = np.count_nonzero(target[:nbytes] != turn)
                assert not late, f"{late} bytes were not there when their row was OK"

    @contract_test(claimed("peers"), proves="peers")
    def test_nothing_lands_once_an_endpoint_is_said_to_be_closed(
        self, harness: Harness
    ) -> None:
        with paired(harness) as pair:
            near, source = block_of(pair.near)
            far, target = block_of(pair.far)
            source[:], target[:] = 7, 0
            if pair.far.store.peers.withdraw() is not True:
                pytest.skip("it does not say that nothing lands afterwards")
            outcomes = pair.send(np.array([near]), np.array([far]), np.array([8]))
            assert (outcomes != Outcome.OK).all(), "a closed endpoint took a row"
            until_s = time.monotonic() + _LATE_S
            while time.monotonic() < until_s:
                assert not target.any(), "bytes landed after the endpoint was closed"
                time.sleep(0.01)
            # A new endpoint works.
            pair.connect()
            outcomes = pair.send(np.array([near]), np.array([far]), np.array([8]))
            assert (outcomes == Outcome.OK).all()
            assert (target[:8] == source[:8]).all()

    @contract_test(claimed("peers"), proves="peers")
    def test_an_endpoint_of_before_a_withdrawal_reaches_no_later_one(
        self, harness: Harness
    ) -> None:
        with paired(harness) as pair:
            near, _ = block_of(pair.near)
            far, target = block_of(pair.far)
            rows = np.array([near]), np.array([far]), np.array([8])
            old = pair.far.store.peers.endpoint()
            if pair.far.store.peers.withdraw() is not True:
                pytest.skip("it does not say that nothing lands afterwards")
            # From here on its pages are another request's, and so is the endpoint.
            target[:] = 3
            pair.far.store.peers.endpoint()
            found = [pair.send(*rows)]
            with suppress(KvdockError):
                pair.connect(old)
                found.append(pair.send(*rows))
            assert all((one != Outcome.OK).all() for one in found), (
                "a row for an endpoint that was withdrawn went to the next one"
            )
            until_s = time.monotonic() + _LATE_S
            while time.monotonic() < until_s:
                assert (target == 3).all(), "bytes landed in pages given to others"
                time.sleep(0.01)

    @contract_test(claimed("peers"))
    def test_a_peer_that_is_gone_is_not_ok_and_not_waited_for(
        self, harness: Harness
    ) -> None:
        with paired(harness) as pair:
            near, _ = block_of(pair.near)
            far, _ = block_of(pair.far)
            pair.far.release()
            outcomes = pair.send(np.array([near]), np.array([far]), np.array([8]))
            assert (outcomes != Outcome.OK).all(), "a pool that is released took a row"

    @contract_test(claimed("peers"))
    def test_an_endpoint_that_is_none_is_refused_in_time(
        self, harness: Harness
    ) -> None:
        setup = harness.plain()
        for endpoint in (b"", b"no endpoint", b"\xff" * 64):
            with pytest.raises(KvdockError):
                setup.store.peers.connect(endpoint, setup.until(1.0))
