"""What would crash, hang or corrupt a process does not reach the library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock import (
    AttachConfig,
    Block,
    DType,
    Operation,
    Outcome,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.errors import KvdockError, RegionError
from kvdock.pools import Part, Per
from kvdock_mooncake import client, plugin
from kvdock_mooncake.client import State

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

OK = Outcome.OK
HERE = Path(__file__).parent


def run_script(body: str, *arguments: str, within_s: float = 60) -> str:
    """Run code with a rig in a process of its own, which it may crash."""
    rigs = str(HERE / "conftest.py")
    harness = str(HERE.parents[2] / "tests" / "harness")
    head = f"""
        import importlib.util, os, sys, threading, time
        sys.path.insert(0, {harness!r})
        spec = importlib.util.spec_from_file_location("rigs", {rigs!r})
        rigs = importlib.util.module_from_spec(spec)
        sys.modules["rigs"] = rigs
        spec.loader.exec_module(rigs)
        from kvdock import Outcome
        from kvdock_mooncake.settings import MooncakeSettings
        settings = MooncakeSettings(master=sys.argv[1], segment_bytes=64 << 20)
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def attach_block(rig: Any, settings: Any, offset: int, nbytes: int) -> Any:
    """Attach a piece of a rig's memory as another pool."""
    pool = PoolSpec(
        name="inner",
        kind=PoolKind.MLA,
        parts=(Part("kv", DType.U8, (nbytes,), per=Per.PAGE),),
        layers=(0,),
        page_tokens=1,
    )
    block = Block(int(rig.memory.ctypes.data) + offset, nbytes)
    return plugin.kvdock_register_pool(
        pool=pool,
        region=Region.of(pool, Shard(), (block,), 1),
        config=AttachConfig(
            settings=settings,
            namespace=rig.namespace,
        ),
    )


def test_a_released_pool_is_unavailable_and_crashes_nothing(
    attached: Any, alone: Any
) -> None:
    rig = attached(alone)
    assert rig.put(["before"]) == [OK]
    rig.release()
    assert rig.handle.client.state is State.CLOSED
    for operation in (Operation.PUT, Operation.GET, Operation.EXISTS, Operation.DELETE):
        assert list(rig.run(operation, ["before"]).outcomes) == [Outcome.UNAVAILABLE]
    assert rig.clear(f"{rig.namespace}/") == [Outcome.UNAVAILABLE]
    rig.release()


def test_pools_share_one_client_until_the_last_one_leaves(
    attached: Any, alone: Any
) -> None:
    first = attached(alone)
    second = attached(alone)
    assert first.handle.client is second.handle.client
    first.release()
    assert first.put(["one"]) == [Outcome.UNAVAILABLE]
    assert second.put(["two"]) == [OK]
    assert second.get(["two"]) == [OK]
    second.release()
    assert second.handle.client.state is State.CLOSED


def test_memory_of_a_released_pool_is_no_longer_known(
    attached: Any, alone: Any
) -> None:
    first = attached(alone)
    second = attached(alone)
    first.release()
    batch = first.batch(Operation.PUT, ["stale"])
    done = second.handle.run(batch)
    assert done.outcomes.tolist() == [Outcome.REFUSED]
    second.release()


def test_two_pools_in_the_same_memory_register_it_once(rig: Any, settings: Any) -> None:
    before = rig.handle.client.memory.blocks
    handle = attach_block(rig, settings, 4096, 8192)
    assert rig.handle.client.memory.blocks == before
    handle.close()
    assert rig.handle.client.memory.blocks == before
    assert rig.put(["still-registered"]) == [OK]


def test_overlapping_memory_is_refused_and_leaves_nothing_behind(
    rig: Any, settings: Any
) -> None:
    before = rig.handle.client.memory.blocks
    with pytest.raises(RegionError, match="overlaps"):
        attach_block(rig, settings, 4096, rig.memory.nbytes)
    assert rig.handle.client.memory.blocks == before
    assert rig.put(["goes-on"]) == [OK]


def test_reads_never_prefer_the_path_without_a_lease_check(rig: Any) -> None:
    assert rig.handle.client.put_options.config().prefer_alloc_in_same_node is False


def test_the_warm_up_leaves_no_key_behind(attached: Any, serve: Any) -> None:
    from kvdock_mooncake.settings import MooncakeSettings

    own = MooncakeSettings(master=serve().address, segment_bytes=16 << 20)
    rig = attached(own)
    assert rig.store.remove_by_regex(".*", True) == 0
    rig.release()


def test_a_cluster_without_memory_is_joined_and_stores_nothing(
    attached: Any, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from kvdock_mooncake.settings import MooncakeSettings

    rig = attached(MooncakeSettings(master=serve().address, segment_bytes=0))
    assert "stores nothing" in caplog.text
    assert rig.put(["nowhere"]) == [Outcome.REFUSED]
    assert rig.exists(["nowhere"]) == [Outcome.ABSENT]
    rig.release()


def test_a_trial_lends_nothing_and_says_where_memory_is_missing(
    attached: Any, serve: Any, tmp_path: Path
) -> None:
    from kvdock_mooncake.settings import MooncakeSettings

    address = serve("-enable_offload=true").address
    own = MooncakeSettings(
        master=address, segment_bytes=16 << 20, ssd_offload=True, ssd_path=str(tmp_path)
    )
    with pytest.raises(KvdockError, match=f"{address} has no memory") as told:
        attached(own, trial=True)
    assert "mooncake_client" in told.value.fix
    assert not any(tmp_path.iterdir())
    lender = attached(MooncakeSettings(master=address, segment_bytes=16 << 20))
    rig = attached(own, trial=True)
    assert rig.handle.client.settings.segment_bytes == 0
    assert rig.put(["tried"]) == rig.get(["tried"]) == [OK]
    rig.release()
    lender.release()


def test_a_forked_child_gets_an_answer_and_the_parent_goes_on(master: Any) -> None:
    run_script(
        """
        rig = rigs.attach(settings)
        assert rig.put(["parent"]) == [Outcome.OK]
        child = os.fork()
        if not child:
            began = time.monotonic()
            ok = rig.get(["parent"]) == [Outcome.UNAVAILABLE]
            rig.release()
            os._exit(0 if ok and time.monotonic() - began < 10 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert rig.get(["parent"]) == [Outcome.OK]
        rig.release()
        """,
        master.address,
    )


def test_attaching_in_a_forked_child_is_refused_before_it_hangs(master: Any) -> None:
    run_script(
        """
        from kvdock.errors import KvdockError
        rig = rigs.attach(settings)
        child = os.fork()
        if not child:
            began = time.monotonic()
            try:
                rigs.attach(settings)
            except KvdockError as error:
                ok = "forked after" in error.what and "spawn" in error.fix
            else:
                ok = False
            os._exit(0 if ok and time.monotonic() - began < 10 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert rig.put(["parent"]) == [Outcome.OK]
        rig.release()
        """,
        master.address,
    )


def test_a_child_of_a_process_that_only_imported_the_library_attaches(
    master: Any,
) -> None:
    run_script(
        """
        from kvdock_mooncake.library import load
        load()
        child = os.fork()
        if not child:
            rig = rigs.attach(settings)
            ok = rig.put(["child"]) == rig.get(["child"]) == [Outcome.OK]
            rig.release()
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        """,
        master.address,
    )


def test_releasing_under_load_crashes_nothing(master: Any) -> None:
    run_script(
        """
        rig = rigs.attach(settings)
        names = list(range(8))
        rig.put(names)
        stop, seen = threading.Event(), set()
        def load():
            while not stop.is_set():
                seen.update(rig.get(names))
                seen.update(rig.put(names))
                seen.update(rig.exists(names))
        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        while Outcome.OK not in seen:
            time.sleep(0.001)
        rig.release()
        while Outcome.UNAVAILABLE not in seen:
            time.sleep(0.001)
        stop.set()
        for thread in threads:
            thread.join()
        assert seen <= {Outcome.OK, Outcome.UNAVAILABLE}, seen
        assert rig.handle.client.state == "closed"
        """,
        master.address,
    )


def test_clients_of_two_kinds_come_and_go_in_one_process(master: Any) -> None:
    run_script(
        """
        import attrs
        first = rigs.attach(settings)
        other = rigs.attach(attrs.evolve(settings, segment_bytes=0))
        assert first.handle.client is not other.handle.client
        assert other.put(["one"]) == first.put(["two"]) == [Outcome.OK]
        other.release()
        again = rigs.attach(attrs.evolve(settings, segment_bytes=0))
        assert again.handle.client is other.handle.client
        assert first.get(["one"]) == again.get(["two"]) == [Outcome.OK]
        first.release()
        assert first.handle.client.state == "closed"
        assert again.handle.client.state == "ready"
        again.release()
        assert again.exists(["two"]) == [Outcome.UNAVAILABLE]
        """,
        master.address,
    )


def test_what_blocks_keeps_its_memory_and_the_store_until_it_has_ended(
    attached: Any,
    serve: Any,
    start_peer: Any,
    freeze: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen owner blocks a read for up to 60 s; late bytes must land safely."""
    from kvdock_mooncake.settings import MooncakeSettings

    monkeypatch.setattr(client, "_DRAIN_S", 0.2)
    address = serve("-client_ttl=60").address
    owner = start_peer(master=address, segment_bytes="64 MiB")
    rig = attached(MooncakeSettings(master=address, segment_bytes=0))
    wanted = rig.fill(31)
    assert rig.put(["held"]) == [OK]
    rig.memory[:] = 0
    freeze(owner.process.pid)
    outcomes: list[list[int]] = []
    reader = threading.Thread(target=lambda: outcomes.append(rig.get(["held"])))
    try:
        reader.start()
        eventually(lambda: rig.handle.client._calls)
        began = time.monotonic()
        rig.release()
        assert time.monotonic() - began < 5
        assert reader.is_alive()
        assert rig.handle.client.state == State.READY
        assert rig.handle.member.blocks[0] in rig.handle.client.memory.blocks
        assert rig.put(["more"]) == [Outcome.UNAVAILABLE]
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)
        reader.join(90)
    assert outcomes == [[OK]]
    assert np.array_equal(rig.memory[0], wanted[0])
    assert rig.handle.client.state == State.READY
    assert rig.memory.ctypes.data not in {
        block.address for block in rig.handle.client.memory.blocks
    }


@pytest.mark.slow
def test_leaving_a_frozen_master_does_not_stop_the_interpreter(
    attached: Any, serve: Any, freeze: Any, eventually: Any
) -> None:
    from kvdock_mooncake.settings import MooncakeSettings

    server = serve()
    rig = attached(MooncakeSettings(master=server.address, segment_bytes=16 << 20))
    longest, done = [0.0], threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not done.wait(0.02):
            now = time.monotonic()
            longest[0], last = max(longest[0], now - last), now

    watcher = threading.Thread(target=watch)
    freeze(server.process.pid)
    watcher.start()
    try:
        began = time.monotonic()
        rig.release()
        assert time.monotonic() - began < 8
    finally:
        done.set()
        watcher.join()
        os.kill(server.process.pid, signal.SIGCONT)
    assert longest[0] < 2
    eventually(lambda: rig.handle.client.state is State.CLOSED)


@pytest.mark.parametrize(
    "mode", [pytest.param("frozen", marks=pytest.mark.slow), "cleared"]
)
def test_a_process_ends_with_status_0_although_calls_are_made_in_the_background(
    serve: Any, mode: str
) -> None:
    server = serve("-default_kv_lease_ttl=2500")
    run_script(
        """
        import attrs, signal
        from kvdock import Batch, Operation
        from kvdock_mooncake import plugin
        rig = rigs.attach(attrs.evolve(settings, lease_s=2.5))
        assert rig.put(["read"]) == rig.get(["read"]) == [Outcome.OK]
        if sys.argv[3] == "frozen":
            os.kill(int(sys.argv[2]), signal.SIGSTOP)
            rig.release()
            time.sleep(0.2)
        else:
            until = time.monotonic() + 0.05
            clear = Batch(Operation.CLEAR, [f"{rig.namespace}/"], deadline_s=until)
            rig.handle.run(clear)
            # A call under way whenever the process ends.
            client = rig.handle.client
            inside = threading.Event()
            def removes(store):
                inside.set()
                for _ in range(2000):
                    store.is_exist(rig.key("none"))
                return -1
            threading.Thread(
                target=lambda: client.removes(rig.handle.member, removes), daemon=True
            ).start()
            assert inside.wait(60)
        """,
        server.address,
        str(server.process.pid),
        mode,
    )
    server.process.kill()


def test_a_trial_says_that_an_owner_is_not_reached(
    attached: Any, serve: Any, start_peer: Any
) -> None:
    from kvdock_mooncake.settings import MooncakeSettings

    address = serve("-client_ttl=60").address
    start_peer(master=address, segment_bytes="16 MiB").kill()
    own = MooncakeSettings(master=address)
    with pytest.raises(KvdockError, match=f"{address} stores no page") as told:
        attached(own, trial=True)
    assert "-client_ttl" in told.value.fix
