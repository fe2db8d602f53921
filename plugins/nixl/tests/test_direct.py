"""NIXL's UCX backend between two real processes."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
from direct_contract import DirectTransfers, check_trial
from direct_peers import connected, two_processes

from kvdock import Block, Outcome
from kvdock.errors import KvdockError
from kvdock_nixl.direct_endpoint import Endpoint
from kvdock_nixl.ucx_transports import FENCED_TRANSPORTS, is_fenced


class TestNixlDirect(DirectTransfers):
    backend = "nixl"
    settings = MappingProxyType({"root": "/nowhere"})


@pytest.mark.parametrize("transports", [FENCED_TRANSPORTS, "tcp,self", "rc,tcp"])
def test_these_transports_end_with_the_receiver(transports: str) -> None:
    assert is_fenced(transports)


@pytest.mark.parametrize(
    "transports", ["", "all", "cma,tcp", "^cma", "sm,self", "tcp,xpmem"]
)
def test_with_these_a_sender_writes_by_itself(transports: str) -> None:
    assert not is_fenced(transports)


def test_copies_by_the_sender_are_no_promise_at_a_withdrawal() -> None:
    """`cma` alone: the receiver's agent takes no part in what lands."""
    given: dict[str, object] = {"root": "/nowhere", "ucx_transports": "cma,tcp,self"}
    with two_processes("nixl", 1 << 20, given) as (sender, receiver):
        base = connected(sender, receiver)
        assert sender.call("send", [0], [base], [10])[0] == [Outcome.OK]
        assert receiver.call("withdraw") is False
        assert receiver.call("withdraw") is False, "for another pool the same"


def test_nixl_counts_every_byte_that_is_sent() -> None:
    with two_processes("nixl", 1 << 20, {"root": "/nowhere"}) as (sender, receiver):
        base = connected(sender, receiver)
        before = sender.call("counted")
        rows = np.arange(100) * 1000
        outcomes, _, _ = sender.call("send", rows, base + rows, np.full(100, 999))
        assert set(outcomes) == {Outcome.OK}
        assert sender.call("counted") - before == 100 * 999


def test_an_endpoint_comes_back_from_its_bytes() -> None:
    blocks = (Block(1 << 40, 4096), Block(8192, 1))
    found = Endpoint.of("agent", 64, blocks, b"\x00\n[1]")
    assert Endpoint.from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize("cut", range(0, 90, 7))
def test_a_part_of_an_endpoint_is_rejected(cut: int) -> None:
    whole = Endpoint.of("agent", 64, (Block(1 << 40, 4096),) * 4, b"").to_bytes()
    with pytest.raises(KvdockError, match="not one of the nixl backend"):
        Endpoint.from_bytes(whole[:cut])


@pytest.mark.slow
def test_requests_between_random_layouts_arrive_without_a_wrong_byte() -> None:
    check_trial("nixl", 40)
