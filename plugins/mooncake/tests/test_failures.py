"""Masters and owners that go away, against real ones on loopback."""

from __future__ import annotations

import os
import signal
import socket
import time
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
from stalls import timed

from kvdock import Outcome
from kvdock.child_processes import free_port
from kvdock.errors import KvdockError
from kvdock_mooncake.client import State
from kvdock_mooncake.error_codes import NOT_READY
from kvdock_mooncake.server import start_owner
from kvdock_mooncake.settings import MooncakeSettings

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

OK = Outcome.OK
MISSES = {Outcome.ABSENT, Outcome.UNAVAILABLE, Outcome.REFUSED, Outcome.TIMEOUT}


def test_a_master_that_is_away_at_the_start_is_an_error_within_seconds(
    attached: Any,
) -> None:
    def attach() -> None:
        with pytest.raises(KvdockError, match="no Mooncake master answers") as told:
            attached(MooncakeSettings(master=f"127.0.0.1:{free_port()}"))
        assert "MOONCAKE_MASTER" in told.value.fix

    timed(attach, 3)


def test_a_master_that_accepts_and_never_answers_is_an_error_within_its_timeout(
    attached: Any, library: Any
) -> None:
    del library
    with socket.create_server(("127.0.0.1", 0)) as hole:
        address = f"127.0.0.1:{hole.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(KvdockError, match="could not join") as told:
            attached(MooncakeSettings(master=address, segment_bytes=0))
        assert "RPC port of a mooncake_master" in told.value.fix
        assert time.monotonic() - began < 10


def test_a_standalone_client_that_is_none_is_an_error_that_says_so(
    attached: Any, serve: Any
) -> None:
    with pytest.raises(KvdockError, match="could not join") as told:
        attached(MooncakeSettings(standalone=serve().address))
    assert "`standalone` names the port of a mooncake_client" in told.value.fix


def test_a_killed_master_means_misses_and_a_restarted_one_is_found_again(
    attached: Any, serve: Any, eventually: Any
) -> None:
    first = serve()
    rig = attached(
        MooncakeSettings(master=first.address, segment_bytes=64 << 20, lease_s=0.0)
    )
    wanted = rig.fill(41)
    names = [f"m-{i}" for i in range(8)]
    assert rig.put(names) == [OK] * 8
    first.process.kill()
    first.process.wait()
    began = time.monotonic()
    assert set(rig.get(names)) <= MISSES
    assert time.monotonic() - began < 10
    # One call has waited for it: the others do not.
    for call in (rig.get, rig.put, rig.exists, rig.delete):
        assert timed(partial(call, names), 0.5) == [Outcome.UNAVAILABLE] * 8
    clear = partial(rig.clear, f"{rig.namespace}/")
    assert timed(clear, 0.5) == [Outcome.UNAVAILABLE]
    again = serve(port=first.port)
    assert again.address == first.address
    eventually(lambda: rig.put(names) == [OK] * 8)
    rig.memory[:] = 0
    assert rig.get(names) == [OK] * 8
    assert np.array_equal(rig.memory, wanted)
    rig.release()


def test_a_frozen_master_means_misses_until_it_goes_on(
    attached: Any, serve: Any, freeze: Any, eventually: Any
) -> None:
    server = serve()
    rig = attached(MooncakeSettings(master=server.address, segment_bytes=64 << 20))
    assert rig.put(["frozen"]) == [OK]
    freeze(server.process.pid)
    try:
        began = time.monotonic()
        assert rig.get(["frozen"]) == [Outcome.UNAVAILABLE]
        assert time.monotonic() - began < 10
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    eventually(lambda: rig.get(["frozen"]) == [OK])
    rig.release()


def test_leaving_a_cluster_whose_master_is_gone_does_not_wait_for_it(
    attached: Any, serve: Any, eventually: Any
) -> None:
    server = serve()
    rig = attached(MooncakeSettings(master=server.address, segment_bytes=16 << 20))
    server.process.kill()
    server.process.wait()
    timed(rig.release, 3)
    assert rig.put(["gone"]) == [Outcome.UNAVAILABLE]
    assert rig.handle.client.memory.blocks == ()
    serve(port=server.port)
    eventually(lambda: rig.handle.client.state == State.CLOSED)


def test_thousands_of_pieces_for_one_peer_neither_block_nor_wedge(
    attached: Any, serve: Any, start_peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured without the guards: a call of 60 s, and a store dead for ever."""
    # Without the library's own remedy, so that the bound of calls is what holds.
    monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "1024")
    # A busy machine reads them for longer than a lease of the other tests.
    address = serve("-default_kv_lease_ttl=30000").address
    start_peer(master=address, segment_bytes="256 MiB")
    rig = attached(
        MooncakeSettings(master=address, segment_bytes=0), rows=4096, row_bytes=4096
    )
    wanted = rig.fill(42)
    names = [f"piece-{i}" for i in range(4096)]
    # Time for a busy machine: without the guards a call never ends well.
    assert rig.put(names, within_s=50.0) == [OK] * 4096
    rig.memory[:] = 0
    assert rig.get(names, cuts=4, within_s=50.0) == [OK] * 4096
    assert np.array_equal(rig.memory, wanted)
    rig.release()


def test_an_owner_killed_under_load_costs_hits_and_never_a_wrong_byte(
    serve: Any, start_peer: Any, eventually: Any
) -> None:
    """Two engines on three owners; one owner ends without a word."""
    # A dead peer holds a call for a second: the lease has to last longer.
    lease = "-default_kv_lease_ttl=5000"
    address = serve("-client_ttl=2", lease).address
    owners = [start_peer(master=address, segment_bytes="64 MiB") for _ in range(3)]
    engines = [start_peer(master=address, segment_bytes=0) for _ in range(2)]
    pages = (0, 128)
    assert set(engines[0].ask(do="put", pages=pages)["outcomes"]) == {OK}
    told = engines[1].ask(do="get", pages=pages)
    assert (set(told["outcomes"]), told["wrong"]) == ({OK}, 0)
    engines[1].send(do="get", pages=pages)
    owners[0].kill()
    told = engines[1].hear()
    assert told["wrong"] == 0
    assert set(told["outcomes"]) <= MISSES | {OK}
    told = engines[1].ask(do="get", pages=pages)
    assert told["wrong"] == 0
    assert set(told["outcomes"]) <= MISSES | {OK}
    assert 0 < told["outcomes"].count(OK) < 128

    def gone() -> Any:
        there = engines[0].ask(do="exists", pages=pages)["outcomes"]
        return 0 < there.count(OK) < 128 and set(there) <= {OK, Outcome.ABSENT}

    eventually(gone, within_s=30)
    eventually(
        lambda: set(engines[0].ask(do="put", pages=pages)["outcomes"]) == {OK},
        within_s=30,
    )
    told = engines[1].ask(do="get", pages=pages)
    assert (set(told["outcomes"]), told["wrong"]) == ({OK}, 0)


def test_a_writer_killed_in_a_put_costs_misses_until_the_master_gives_its_keys_up(
    attached: Any, serve: Any, start_peer: Any, freeze: Any, eventually: Any
) -> None:
    # A frozen owner must not count as lost meanwhile.
    master = serve("-client_ttl=60")
    owner = start_owner(master.address, 64 << 20)
    rig = attached(
        MooncakeSettings(master=master.address, segment_bytes=0, lease_s=0.0),
        row_bytes=65536,
    )
    wanted = rig.fill(43)
    writer = start_peer(master=master.address, segment_bytes=0)
    key = rig.key("0")
    freeze(owner.process.pid)
    try:
        writer.send(do="put", pages=[0, 1])
        place = int(rig.memory.ctypes.data)
        begun = lambda: rig.store.get_into(key, place, 65536) == NOT_READY  # noqa: E731
        eventually(begun)
        writer.kill()
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)
    # Such a key looks like one that another process stores: the
    # put is called a success. Later it is a miss, and at worst that.
    assert rig.exists(["0"]) == [Outcome.ABSENT]
    assert rig.put(["0"]) == [OK]
    assert rig.get(["0"]) == [Outcome.ABSENT]

    def whole() -> bool:
        rig.memory[:] = wanted
        rig.put(["0"])
        rig.memory[:] = 0
        return bool(rig.get(["0"]) == [OK])

    eventually(whole, within_s=30)
    assert np.array_equal(rig.memory[0], wanted[0])
    rig.release()
    owner.stop()


def test_concurrent_puts_of_one_key_leave_one_whole_value(
    serve: Any, start_peer: Any
) -> None:
    address = serve().address
    peers = [start_peer(master=address, segment_bytes="64 MiB") for _ in range(2)]
    for _ in range(3):
        for peer in peers:
            peer.send(do="put", pages=[0, 64])
        for peer in peers:
            peer.hear()
    for peer in peers:
        told = peer.ask(do="get", pages=[0, 64])
        assert (set(told["outcomes"]), told["wrong"]) == ({OK}, 0)


def test_a_peer_that_leaves_properly_ends_with_status_0(
    serve: Any, start_peer: Any
) -> None:
    peer = start_peer(master=serve().address, segment_bytes="16 MiB")
    assert peer.end() == 0


def test_replicas_and_pins_are_passed_on(attached: Any, settings: Any) -> None:
    from kvdock_mooncake.settings import Pin

    own = attrs.evolve(settings, pin=Pin.SOFT, replicas=2, preferred_segment="self")
    rig = attached(own)
    config = rig.handle.client.put_options.config()
    assert config.replica_num == 2
    assert config.preferred_segment == rig.store.get_hostname()
    assert not config.with_hard_pin
    assert rig.put(["pinned"]) == [OK]
    assert rig.get(["pinned"]) == [OK]
    rig.release()
