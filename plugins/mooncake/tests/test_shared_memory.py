"""Pools in the memory of a client process that outlives the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvdock import AttachConfig, Outcome, Region, Shard
from kvdock.errors import KvdockError, RegionError
from kvdock_mooncake import plugin
from kvdock_mooncake.client import Client, State
from kvdock_mooncake.server import start_owner
from kvdock_mooncake.settings import MooncakeSettings
from kvdock_mooncake.shared_memory import allocate

pytestmark = pytest.mark.mooncake

OK = Outcome.OK


@pytest.fixture
def standalone(serve: Any) -> Iterator[MooncakeSettings]:
    """Settings for a standalone client that owns 64 MiB."""
    owner = start_owner(serve().address, 64 << 20)
    yield MooncakeSettings(standalone=owner.address, standalone_bytes=32 << 20)
    owner.stop()


def test_pages_in_shared_memory_are_stored_and_outlive_the_attachment(
    standalone: MooncakeSettings, rig: Any, attached: Any
) -> None:
    del attached
    memory = allocate(standalone, 1 << 20)
    pool = rig.pool
    region = Region.of(pool, Shard(), (memory.array[: rig.memory.nbytes],), 8)
    config = AttachConfig(settings=standalone, namespace=rig.namespace)
    handle = plugin.kvdock_register_pool(pool=pool, region=region, config=config)
    mine = type(rig)(
        handle, memory.array[: rig.memory.nbytes].reshape(rig.memory.shape), pool
    )
    wanted = mine.fill(61)
    names = [f"shared-{i}" for i in range(8)]
    assert mine.put(names) == [OK] * 8
    plugin.kvdock_release(handle)
    assert handle.client.state == State.READY

    handle = plugin.kvdock_register_pool(pool=pool, region=region, config=config)
    mine.handle = handle
    mine.memory[:] = 0
    assert mine.get(names, cuts=2) == [OK] * 8
    assert np.array_equal(mine.memory, wanted)
    plugin.kvdock_release(handle)
    memory.release()
    assert handle.client.state == State.CLOSED


def test_other_memory_is_refused_with_the_way_to_get_the_right_one(
    standalone: MooncakeSettings, attached: Any
) -> None:
    with pytest.raises(RegionError, match="does not register") as told:
        attached(standalone)
    assert "shared_memory.allocate" in told.value.fix


def test_a_client_without_room_is_an_error_and_leaves_nothing_open(
    standalone: MooncakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Client] = []
    take = Client.take

    def full(client: Client, nbytes: int) -> int:
        opened.append(client)
        return take(client, nbytes) if nbytes < 4096 else 0

    monkeypatch.setattr(Client, "take", full)
    with pytest.raises(RegionError, match=r"no 1\.0 MiB left"):
        allocate(standalone, 1 << 20)
    assert opened[0].state == State.CLOSED


def test_without_a_standalone_client_there_is_none() -> None:
    with pytest.raises(KvdockError, match="standalone"):
        allocate(MooncakeSettings(master="127.0.0.1:1"), 4096)
