"""The library's TransferEngine between two real processes, over TCP."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import MappingProxyType

import attrs
import numpy as np
import pytest
from listening import free_range, listening
from peer_contract import BYTES, PeerContract, all_memory, check_mutations, check_trial
from peer_fuzz import Fuzz
from peer_processes import connected, two_processes
from peer_trials import Rank, pools_of

from kvdock import Attachment, Dock, Namespace, Outcome, Region, Shard
from kvdock.config import structure
from kvdock.errors import KvdockError
from kvdock_mooncake.library import Wheel
from kvdock_mooncake.peer_engine import PeerAddress, PeerEngine, why_not
from kvdock_mooncake.peers import MAX_ROWS, Connections
from kvdock_mooncake.settings import MooncakeSettings

# In the network of the other tests: the library keeps threads where it first began.
pytestmark = [pytest.mark.mooncake, pytest.mark.usefixtures("library")]

LOCAL = MappingProxyType({"host": "127.0.0.1"})


@pytest.mark.repeats("test_an_endpoint_that_is_none_is_rejected")
class TestMooncakePeers(PeerContract):
    backend = "mooncake"
    settings = LOCAL
    restarts_within = 4  # the kernel keeps some of them for a minute

    def within(self, endpoints: int) -> dict[str, str]:
        low, high = free_range(2 * endpoints).split("-")
        return {"MC_MIN_RPC_PORT": low, "MC_MAX_RPC_PORT": high}


def test_calls_are_cut_by_rows_and_by_bytes() -> None:
    sizes = np.full(2000, 1000)
    chosen = np.arange(0, 2000, 1)
    parts = list(Connections.parts_of(chosen, sizes))
    assert max(map(len, parts)) == MAX_ROWS
    assert np.array_equal(np.concatenate(parts), chosen)
    large = np.array([100 << 20, 40 << 20, 20 << 20, 20 << 20, 1])
    found = [one.tolist() for one in Connections.parts_of(np.arange(5), large)]
    assert found == [[0], [1, 2], [3, 4]]


def test_an_open_engine_writes_nothing_to_a_peer_with_another_nonce() -> None:
    """The library connects again by itself, to whatever listens on the ports."""
    settings = structure(MooncakeSettings, dict(LOCAL), where="tests")
    memory = np.zeros((2, 4096), np.uint8)
    memory[0] = 7
    here, there = (int(row.ctypes.data) for row in memory)
    sender = PeerEngine.open(settings, ((here, 4096),), listens=False)
    receiver = PeerEngine.open(settings, ((there, 4096),), listens=True)
    try:
        offered = PeerAddress(
            receiver.address, receiver.scratch_address, receiver.nonce
        )
        rows = np.array([here]), np.array([there]), np.array([4096])
        assert sender.reach(offered)
        for other in (
            attrs.evolve(offered, nonce=bytes(16)),
            attrs.evolve(offered, scratch=there),
            attrs.evolve(offered, scratch=1 << 40),
        ):
            assert not sender.write(other, *rows)
            assert not memory[1].any()
        assert sender.write(offered, *rows)
        assert (memory[1] == 7).all()
    finally:
        assert all(engine.close() for engine in (sender, receiver))


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_waiting_for_a_frozen_receiver_leaves_the_core_to_others() -> None:
    """The library's own waiting calls take three quarters of one."""
    for _ in range(5):  # all may have arrived before the receiver is frozen
        with two_processes("mooncake", BYTES, dict(LOCAL)) as (sender, receiver):
            sender.call("set", 7)
            sender.call("begin", 0, *all_memory(connected(sender, receiver)), 30.0)
            until = time.monotonic() + 30.0
            while not receiver.memory[:: 1 << 16].any():
                assert time.monotonic() < until, "nothing lands"
            receiver.stop()
            began, used = time.monotonic(), processor_seconds(sender.process.pid or 0)
            outcomes, _, _ = sender.call("end", 0)
            used = processor_seconds(sender.process.pid or 0) - used
            if set(outcomes) != {Outcome.OK}:
                assert used < (time.monotonic() - began) / 3
                return
    pytest.fail("the receiver was never frozen in the middle")


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


@pytest.mark.slow
def test_changed_messages_are_taken_or_rejected_and_nothing_else() -> None:
    check_mutations("mooncake", 300)


def test_pages_go_to_peers_without_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    given: dict[str, object] = {"host": "127.0.0.1"}
    pools = pools_of("mha", 4, ["page_object"])[:1]
    sender, receiver = (Rank(pools, backend="mooncake", given=given) for _ in range(2))
    try:
        Fuzz("mooncake", sender, receiver, np.random.default_rng(0)).healthy()
        cache = sender.attachment
        assert not cache.exists(["a"]).best
        assert cache.put(["a"], {"kv": [0]}).outcomes["kv"][0] == Outcome.REFUSED
        assert cache.get(["a"], {"kv": [0]}).outcomes["kv"][0] == Outcome.ABSENT
    finally:
        assert all(one.attachment.close() for one in (sender, receiver))


def test_pages_are_not_stored_without_a_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    pool = pools_of("mha", 4, ["page_object"])[0]
    dock = Dock.load(require=["mooncake"], environ={"KVDOCK_PLUGINS": "mooncake"})
    plan = dock.plan([pool], Shard())
    region = Region.of(pool, Shard(), [np.zeros(pool.page_bytes(Shard()), np.uint8)], 1)
    with pytest.raises(KvdockError, match="no master is configured"):
        Attachment.open(dock, plan, Namespace(model="m"), {"kv": region})


@pytest.mark.slow
def test_its_ports_can_be_fenced_but_not_its_addresses() -> None:
    """As the security page says: a range of ports, on all interfaces."""
    ports = {"MC_MIN_RPC_PORT": "21000", "MC_MAX_RPC_PORT": "21063"}
    found = listening("mooncake", {"host": "127.0.0.1"}, **ports)
    assert found
    assert all(21000 <= port <= 21063 for _, port in found)
    assert {host for host, _ in found} <= {"0.0.0.0", "::"}  # noqa: S104 - as it is
