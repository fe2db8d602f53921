"""What backends share that write into peers' memory, with a library of this file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock import AttachConfig, Batch, Block, Outcome
from kvdock.errors import KvdockError
from kvdock.geometry import AddressRanges
from kvdock.peers import connections
from kvdock.peers.connections import (
    ConnectedPool,
    Connection,
    Endpoint,
    PeerConnections,
    Pieces,
    TransferLost,
)

LONG_S = 20.0
NUMBERS = st.integers(1, (1 << 62) - 1)
PIECES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4).map(tuple)
ENDPOINTS = st.builds(
    Endpoint, st.tuples(st.text(), st.text()), NUMBERS, PIECES, st.binary(max_size=20)
)
ENDPOINT = Endpoint(("a", "b"), 64, ((4096, 1),))


@attrs.define(eq=False)
class Wire:
    """A link that moves nothing.

    Args:
        memory: What it knows.
        closes: Whether it can be closed.
    """

    memory: Pieces = ()
    closes: bool = True
    fails: bool = False
    ended: bool = False

    def end(self) -> None:
        self.ended = True

    def close(self, patience_s: float = 0.0) -> bool:
        del patience_s
        self.ended = True
        return self.closes


@attrs.define(eq=False)
class ToPeer(Connection[Wire]):
    pauses_s = (1.0, 4.0)

    reached: list[Wire]
    away: list[float] = attrs.field(factory=list)

    def reach(self, deadline_s: float) -> Wire:
        del deadline_s
        if self.away:
            raise KvdockError(f"{self.peer} is away")
        self.reached.append(Wire())
        return self.reached[-1]


@attrs.define(eq=False)
class Library(PeerConnections[Wire, ToPeer]):
    backend = "library"
    library = "Library"
    endpoint_names = 1

    reached: list[Wire] = attrs.field(factory=list)

    def listen(self, receiver: Wire | None, memory: Pieces) -> Wire:
        same = receiver is not None and receiver.memory == memory
        return receiver if receiver is not None and same else Wire(memory)

    def describe(self, receiver: Wire, memory: Pieces) -> Endpoint:
        del receiver
        return Endpoint(("here",), 64, memory)

    def connection_to(self, endpoint: Endpoint) -> ToPeer:
        (name,) = endpoint.names
        known = (one for one in self.connections if one.peer == name)
        return next(known, None) or ToPeer(name, self.reached)

    @staticmethod
    def parts_of(rows: Any, sizes: Any) -> Iterator[Any]:
        del sizes
        yield rows

    def write(
        self, connection: ToPeer, link: Wire, table: Any, deadline_s: float
    ) -> Outcome:
        del connection, table, deadline_s
        if link.fails:
            raise TransferLost("it broke")
        return Outcome.OK


def pool(config: AttachConfig, address: int = 4096) -> Any:
    return ConnectedPool.of(config, [Block(address, 4096)], Library())


def soon() -> float:
    return time.monotonic() + LONG_S


def batch(peer: object) -> Batch:
    at, size = np.array([4096]), np.array([16])
    return Batch.send(at, at, size, peer, soon(), "kv")


@pytest.fixture
def config() -> AttachConfig:
    return AttachConfig(settings=None, shared={})


@given(ENDPOINTS)
def test_an_endpoint_comes_back_from_its_bytes(endpoint: Endpoint) -> None:
    assert (
        Endpoint.from_bytes(endpoint.to_bytes("some"), "some", 2, metadata=True)
        == endpoint
    )


def test_bytes_behind_an_endpoint_without_metadata_are_rejected() -> None:
    whole = ENDPOINT.to_bytes("some")
    assert not Endpoint.from_bytes(whole, "some", 2, metadata=False).metadata
    more = msgspec.structs.replace(ENDPOINT, metadata=b"more").to_bytes("some")
    for wrong in (whole + b"more", more):
        with pytest.raises(KvdockError, match="not one of the some backend"):
            Endpoint.from_bytes(wrong, "some", 2, metadata=False)


@given(ENDPOINTS, st.data())
def test_a_part_of_an_endpoint_is_rejected(endpoint: Endpoint, data: Any) -> None:
    memory = (*endpoint.memory, (4096, 1))
    whole = msgspec.structs.replace(endpoint, memory=memory).to_bytes("some")
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(KvdockError, match="not one of the some backend"):
        Endpoint.from_bytes(whole[:cut], "some", 2, metadata=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"memory": ((4096, -1),)}, {"memory": ((1 << 62, 1),)}, {"memory": ((1,),)},
        {"memory": (("a", 1),)}, {"memory": None}, {"scratch": -1}, {"scratch": True},
        {"scratch": 1e400}, {"names": (b"a", "b")}, {"names": "ab"}, {"metadata": 1},
    ],
)  # fmt: skip
def test_an_endpoint_with_a_value_out_of_bounds_is_rejected(
    changed: dict[str, Any],
) -> None:
    wrong = msgspec.structs.replace(ENDPOINT, **changed).to_bytes("some")
    with pytest.raises(KvdockError, match="not one of the some backend"):
        Endpoint.from_bytes(wrong, "some", 2, metadata=True)


@pytest.mark.parametrize(("backend", "names"), [("other", 2), ("some", 1), ("some", 3)])
def test_an_endpoint_of_another_backend_is_rejected(backend: str, names: int) -> None:
    found = ENDPOINT.to_bytes("some")
    with pytest.raises(KvdockError, match="not one of"):
        Endpoint.from_bytes(found, backend, names, metadata=True)


def test_pools_of_an_attachment_share_a_connection_until_the_last_leaves(
    config: AttachConfig,
) -> None:
    first, second = pool(config), pool(config, 1 << 20)
    assert first.shared is second.shared
    one, two = (side.connect(side.endpoint(), soon()) for side in (first, second))
    assert one.connection is two.connection
    (link,) = first.shared.reached
    assert first.disconnect(one)
    assert not link.ended
    assert second.disconnect(two)
    assert link.ended
    assert first.send(batch(one)).outcomes.tolist() == [Outcome.UNAVAILABLE]
    assert len(first.shared.reached) == 1, "what was closed stays closed"


def test_what_listens_is_replaced_for_a_later_pool_and_closed_at_a_withdrawal(
    config: AttachConfig,
) -> None:
    first = pool(config)
    first.endpoint()
    before = first.shared._receiver
    pool(config, 1 << 20).endpoint()
    after = first.shared._receiver
    assert after is not before
    before.closes = False
    assert not first.withdraw(), "the first one may still take bytes"
    assert before.ended
    assert after.ended
    before.closes = True
    assert first.withdraw()


def test_a_transfer_that_fails_ends_its_link_and_holds_the_memory(
    config: AttachConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "DRAIN_S", 1e4)
    side = pool(config)
    peer = side.connect(side.endpoint(), soon())
    (link,) = side.shared.reached
    assert side.send(batch(peer)).hold is None
    link.fails = True
    failed = side.send(batch(peer))
    assert failed.outcomes.tolist() == [Outcome.UNAVAILABLE]
    assert link.ended
    assert failed.hold is not None
    assert not failed.hold.released
    assert side.send(batch(peer)).outcomes.tolist() == [Outcome.OK], "on a new link"
    assert not side.disconnect(peer), "its bytes may lie in the sockets of the peer"
    side.release()
    assert failed.hold.released


def test_a_peer_that_is_away_is_left_alone_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        "kvdock.peers.connections.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    peer = ToPeer("peer", [], [1.0])
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        with pytest.raises(KvdockError, match="peer is away"):
            peer.open_link(clock.now + 1)
        clock.now += 0.99 * pause_s
        assert peer.open_link(clock.now + 1) is None
        clock.now += 0.02 * pause_s
    peer.away.clear()
    assert peer.open_link(clock.now + 1) is peer.link is not None


def test_a_failed_connection_leaves_nothing(config: AttachConfig) -> None:
    side = pool(config)
    found = side.endpoint()
    away = ToPeer("here", [], [1.0])
    side.shared.connections.add(away)
    with pytest.raises(KvdockError, match="here is away"):
        side.connect(found, soon())
    assert not side.shared.connections


def test_a_row_outside_of_the_memory_never_reaches_the_library(
    config: AttachConfig,
) -> None:
    side = pool(config)
    peer = side.connect(side.endpoint(), soon())
    peer = attrs.evolve(peer, ranges=AddressRanges.of())
    assert side.send(batch(peer)).outcomes.tolist() == [Outcome.REFUSED]
    assert side.send(batch(object())).outcomes.tolist() == [Outcome.REFUSED]
    assert not side.disconnect(object())
