"""The library's TransferEngine between two real processes, over TCP."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
from direct_contract import DirectTransfers, check_trial
from direct_peers import connected, two_processes

from kvdock import Block, Outcome
from kvdock.errors import KvdockError
from kvdock_mooncake.direct import MAX_ROWS, parts_of
from kvdock_mooncake.direct_endpoint import Endpoint
from kvdock_mooncake.direct_engine import why_not
from kvdock_mooncake.library import Wheel

pytestmark = pytest.mark.mooncake

LOCAL = MappingProxyType({"host": "127.0.0.1"})


class TestMooncakeDirect(DirectTransfers):
    backend = "mooncake"
    settings = LOCAL


def test_an_endpoint_comes_back_from_its_bytes() -> None:
    blocks = (Block(1 << 40, 4096), Block(8192, 1))
    found = Endpoint.of("127.0.0.1:5", "tcp", 64, blocks)
    assert Endpoint.from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize("cut", range(0, 105, 7))
def test_a_part_of_an_endpoint_is_rejected(cut: int) -> None:
    blocks = (Block(1 << 40, 4096),) * 4
    whole = Endpoint.of("127.0.0.1:5", "tcp", 64, blocks).to_bytes()
    with pytest.raises(KvdockError, match="not one of the mooncake backend"):
        Endpoint.from_bytes(whole[:cut])


def test_calls_are_cut_by_rows_and_by_bytes() -> None:
    sizes = np.full(2000, 1000)
    chosen = np.arange(0, 2000, 1)
    parts = list(parts_of(chosen, sizes))
    assert max(map(len, parts)) == MAX_ROWS
    assert np.array_equal(np.concatenate(parts), chosen)
    large = np.array([100 << 20, 40 << 20, 20 << 20, 20 << 20, 1])
    found = [one.tolist() for one in parts_of(np.arange(5), large)]
    assert found == [[0], [1, 2], [3, 4]]


def test_more_rows_than_the_library_takes_at_once_arrive() -> None:
    with two_processes("mooncake", 1 << 22, dict(LOCAL)) as (sender, receiver):
        sender.call("fill", 1)
        base = connected(sender, receiver)
        rows = np.arange(3000) * 1000
        outcomes, _, _ = sender.call("send", rows, base + rows, np.full(3000, 1000))
        assert set(outcomes) == {Outcome.OK}
        whole = slice(0, 3_000_000)
        assert np.array_equal(sender.memory[whole], receiver.memory[whole])


def test_a_release_that_does_not_wait_for_the_receiver_is_refused() -> None:
    name = "mooncake-transfer-engine-non-cuda"
    assert "before it has arrived" in why_not(Wheel(name, "0.3.11.post1"))
    assert not why_not(Wheel(name, "0.3.13.post1"))


def test_confirmations_that_are_turned_off_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    name = "mooncake-transfer-engine-non-cuda"
    assert "MC_TCP_PROTO=1" in why_not(Wheel(name, "0.3.13.post1"))


@pytest.mark.slow
def test_requests_between_random_layouts_arrive_without_a_wrong_byte() -> None:
    check_trial("mooncake", 40)
