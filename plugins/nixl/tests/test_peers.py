"""NIXL's UCX backend between two real processes."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from listening import free_range, listening
from peer_contract import PeerContract, check_mutations, check_trial
from peer_fuzz import Fuzz
from peer_processes import connected, two_processes
from peer_trials import Rank, pools_of

from kvdock import Attachment, Dock, Namespace, Outcome, Region, Shard
from kvdock.errors import KvdockError
from kvdock_nixl.ucx_transports import FENCED_TRANSPORTS, is_fenced


class TestNixlPeers(PeerContract):
    backend = "nixl"
    settings = MappingProxyType({"root": "/nowhere"})

    def within(self, endpoints: int) -> dict[str, str]:
        ports = free_range(endpoints)
        return {"UCX_TCP_PORT_RANGE": ports, "UCX_NET_DEVICES": "lo"}


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


@pytest.mark.slow
def test_a_receiver_that_exits_ends_its_connections_first() -> None:
    """The interpreter destroys its agent afterwards, without a call of ours."""
    with two_processes("nixl", 1 << 20, {"root": "/nowhere"}) as (sender, receiver):
        base = connected(sender, receiver)
        receiver.call("leave")
        assert sender.call("send", [0], [base], [10])[0] == [Outcome.UNAVAILABLE]
        assert not receiver.memory.any()


@pytest.mark.slow
def test_nixl_counts_every_byte_that_is_sent() -> None:
    with two_processes("nixl", 1 << 20, {"root": "/nowhere"}) as (sender, receiver):
        base = connected(sender, receiver)
        before = sender.call("counted")
        rows = np.arange(100) * 1000
        outcomes, _, _ = sender.call("send", rows, base + rows, np.full(100, 999))
        assert set(outcomes) == {Outcome.OK}
        assert sender.call("counted") - before == 100 * 999


@pytest.mark.slow
def test_requests_between_random_layouts_arrive_without_a_wrong_byte() -> None:
    check_trial("nixl", 40)


@pytest.mark.slow
def test_changed_messages_are_taken_or_rejected_and_nothing_else() -> None:
    check_mutations("nixl", 300)


def test_pages_go_to_peers_without_a_root() -> None:
    pools = pools_of("mha", 4, ["page_object"])[:1]
    sender, receiver = (Rank(pools, backend="nixl", given={}) for _ in range(2))
    try:
        Fuzz("nixl", sender, receiver, np.random.default_rng(0)).healthy()
        cache = sender.attachment
        assert not cache.exists(["a"]).best
        assert cache.put(["a"], {"kv": [0]}).outcomes["kv"][0] == Outcome.REFUSED
        assert cache.get(["a"], {"kv": [0]}).outcomes["kv"][0] == Outcome.ABSENT
    finally:
        assert all(one.attachment.close() for one in (sender, receiver))


def test_pages_are_not_stored_without_a_root() -> None:
    pool = pools_of("mha", 4, ["page_object"])[0]
    dock = Dock.load(require=["nixl"], environ={"KVDOCK_PLUGINS": "nixl"})
    plan = dock.plan([pool], Shard())
    memory = np.zeros(pool.page_bytes(Shard()), np.uint8)
    region = Region.of(pool, Shard(), [memory], 1)
    with pytest.raises(KvdockError, match="setting 'root' is missing"):
        Attachment.open(dock, plan, Namespace(model="m"), {"kv": region})


@pytest.mark.slow
def test_its_ports_and_addresses_can_be_fenced(tmp_path: Path) -> None:
    """As the security page says."""
    fence = {"UCX_TCP_PORT_RANGE": "22000-22063", "UCX_NET_DEVICES": "lo"}
    settings = {"root": str(tmp_path), "free_space": 0}
    found = listening("nixl", settings, **fence)
    assert found
    assert all(22000 <= port <= 22063 for _, port in found)
    assert {host for host, _ in found} == {"127.0.0.1"}
