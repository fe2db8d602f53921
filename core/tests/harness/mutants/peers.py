"""Mutants that write into a peer's memory, and not quite where or when they should."""

from __future__ import annotations

import ctypes
import json
import threading
from typing import TYPE_CHECKING, cast

import numpy as np
from peer_reference import PeerHandle, Receiver

from mutants.mutant import PeerMutant

if TYPE_CHECKING:
    from peer_reference import Peer
    from reference import Handle

    from kvdock.arrays import Int64Array
    from kvdock.batch import Batch
    from kvdock.geometry.region import Block


class SwappedRows(PeerMutant):
    """Sends two rows of one size to each other's place."""

    image_of = "descriptors sorted on one side only: tokens of two pages trade places"
    caught_by = "test_rows_arrive_at_their_addresses_and_nowhere_else"

    def rows(
        self, local: Int64Array, remote: Int64Array, sizes: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        same = np.flatnonzero(sizes[1:] == sizes[:-1])[:1]
        swapped = remote.copy()
        swapped[same], swapped[same + 1] = remote[same + 1], remote[same]
        return local, swapped, sizes


class TokenOffByOne(PeerMutant):
    """Begins to read one byte after the row."""

    image_of = "page to token expansion that counts tokens from 1"
    caught_by = "test_rows_arrive_at_their_addresses_and_nowhere_else"

    def rows(
        self, local: Int64Array, remote: Int64Array, sizes: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        return np.append(local[:-1] + 1, local[-1:]), remote, sizes


class JoinOverAGap(PeerMutant):
    """Joins rows that are neighbours here, and not at the peer."""

    image_of = "runs merged by the sender's addresses alone, over another token's slot"
    caught_by = "test_rows_arrive_at_their_addresses_and_nowhere_else"

    def rows(
        self, local: Int64Array, remote: Int64Array, sizes: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        near = np.flatnonzero(local[:-1] + sizes[:-1] == local[1:]) + 1
        joined = remote.copy()
        joined[near] = remote[near - 1] + sizes[near - 1]
        return local, joined, sizes


class _Early(Receiver):
    """Answers before the bytes are where they belong."""

    def land(self, address: int, data: memoryview) -> None:
        arguments = (address, bytes(data), len(data))
        threading.Timer(0.02, ctypes.memmove, arguments).start()


class ArrivalTooEarly(PeerMutant):
    """Reports rows as written that are still on their way."""

    image_of = "a completion for a posted send, taken for one of a finished write"
    caught_by = "test_a_row_that_is_ok_is_there"

    def receiver(self, blocks: tuple[Block, ...]) -> Receiver:
        return _Early(blocks)


class FreedTooEarly(PeerMutant):
    """Says that an endpoint is closed, and goes on taking rows."""

    image_of = "deregistered memory taken for a fence: late UCX writes still landed"
    caught_by = "test_nothing_lands_once_an_endpoint_is_said_to_be_closed"

    def withdraw(self, handle: PeerHandle) -> bool:
        """Close nothing."""
        del handle
        return True


class WhoeverListens(PeerMutant):
    """Takes whatever listens on a port for the one that was offered."""

    image_of = "UCX connects to a port, and writes to addresses of another agent"
    caught_by = "test_an_endpoint_of_before_a_withdrawal_reaches_no_later_one"
    _port = 0

    def receiver(self, blocks: tuple[Block, ...]) -> Receiver:
        found = Receiver(blocks, self._port, token=b"anybody's token.")
        _, self._port, _ = json.loads(found.endpoint)
        return found


class OpenedAgain(PeerMutant):
    """Opens a connection that was lost again by itself."""

    image_of = "a pooled connection that the library opens again, to another engine"
    caught_by = "test_an_endpoint_of_before_a_withdrawal_reaches_no_later_one"
    _last: Receiver | None = None

    def receiver(self, blocks: tuple[Block, ...]) -> Receiver:
        self._last = Receiver(blocks)
        return self._last

    def send(self, handle: Handle, peer: Peer, batch: Batch) -> Int64Array:
        try:
            return super().send(handle, peer, batch)
        except OSError:
            assert self._last is not None
            own, endpoint = cast("PeerHandle", handle), self._last.endpoint
            again = self.connect(own, endpoint, batch.deadline_s)
            return super().send(handle, again, batch)
