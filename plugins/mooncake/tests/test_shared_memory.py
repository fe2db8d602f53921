"""Pools in the memory of a client process that outlives the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest

from kvdock import (
    AttachConfig,
    Attachment,
    Dock,
    DType,
    HostMemory,
    KvdockError,
    Namespace,
    Outcome,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.config import CoreSettings, structure
from kvdock.pools import Part, Per
from kvdock.routing.verdicts import TransferMode
from kvdock_mooncake import plugin
from kvdock_mooncake.client import Client, State
from kvdock_mooncake.pool import PoolHandle
from kvdock_mooncake.server import Server, start_owner
from kvdock_mooncake.settings import MooncakeSettings
from kvdock_mooncake.shared_clients import _CLIENTS

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

OK = Outcome.OK
PAGES, PAGE_BYTES = 8, 64 << 10
HASHES = [f"{page:064x}" for page in range(PAGES)]
KV = PoolSpec(
    name="kv",
    kind="mla",
    parts=(Part("kv", DType.U8, (PAGE_BYTES,), per=Per.PAGE),),
    layers=(0,),
    page_tokens=1,
    anchor=True,
)
Given = Mapping[str, object]


@pytest.fixture(scope="module")
def owner(serve: Any) -> Iterator[Server]:
    """A standalone client that owns 64 MiB."""
    owner = start_owner(serve().address, 64 << 20)
    yield owner
    owner.stop()


@pytest.fixture(scope="module")
def given(owner: Server) -> Given:
    """Settings of a process that goes through it."""
    return {"standalone": owner.address, "standalone_bytes": 32 << 20, "lease_s": 0.5}


@pytest.fixture(scope="module")
def standalone(given: Given) -> MooncakeSettings:
    """The same where the hooks are called directly."""
    return structure(MooncakeSettings, given, where="tests")


def allocate(settings: MooncakeSettings, nbytes: int) -> HostMemory:
    found = plugin.kvdock_allocate(nbytes, AttachConfig(settings=settings))
    assert found is not None
    return found


def pieces() -> int:
    """Return how much memory this process shares with others."""
    maps = File("/proc/self/maps").read_text()
    return sum("mooncake_shm" in line for line in maps.splitlines())


def opened(
    given: Given, memory: Any, core: CoreSettings, owner: str
) -> tuple[Attachment, TransferMode]:
    dock = Dock.load(require=("mooncake",))
    settings = {"mooncake": given}
    plan = dock.plan(
        [KV],
        Shard(),
        ("mooncake",),
        needs=RouteRequirements(integrity=core.integrity, allocator=owner),
        settings=settings,
    )
    region = Region.of(KV, Shard(), (memory,), PAGES)
    space = Namespace(model=f"shared {core.integrity} {core.calls.staging} {owner}")
    attachment = Attachment.open(dock, plan, space, {"kv": region}, settings, core=core)
    return attachment, plan.anchor.mode


WAYS = list(product(("auto", "off"), ("routed", "always"), ("mooncake", "")))


@pytest.mark.parametrize(("integrity", "staging", "allocator"), WAYS)
def test_an_attachment_goes_through_a_client_that_owns_the_memory(
    given: Given, integrity: str, staging: str, allocator: str
) -> None:
    """With pools in its memory, and with pools in any other memory."""
    core = structure(
        CoreSettings,
        {"integrity": integrity, "calls": {"staging": staging}, "self_test": True},
        where="tests",
    )
    dock = Dock.load(require=("mooncake",))
    nbytes = PAGES * PAGE_BYTES
    memory = dock.allocate("mooncake", nbytes, given) if allocator else None
    view = np.frombuffer(memory.buffer if memory else bytearray(nbytes), np.uint8)
    attachment, path = opened(given, view, core, allocator)
    assert path is (TransferMode.ZERO_COPY if allocator else TransferMode.STAGED)
    with attachment:
        view[:] = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)
        wanted, places = view.copy(), {"kv": np.arange(PAGES)}
        assert attachment.put(HASHES, places).pages == PAGES
        assert attachment.exists(HASHES).best == PAGES
        view[:] = 0
        assert attachment.get(HASHES, places).pages == PAGES
        assert np.array_equal(view, wanted)
    assert np.array_equal(view, wanted), "an engine's memory outlives the attachment"
    if memory:
        memory.give_back()


def test_memory_that_came_back_is_handed_out_again(given: Given) -> None:
    """The library never frees any: each piece is a file for good."""
    core = CoreSettings()
    view = np.zeros(PAGES * PAGE_BYTES, np.uint8)
    for round_ in range(4):
        attachment, _ = opened(given, view, core, "")
        attachment.close()
        if not round_:
            before = pieces()
    assert pieces() <= before


def test_a_plan_without_the_settings_is_refused_with_what_to_do(given: Given) -> None:
    dock = Dock.load(require=("mooncake",))
    plan = dock.plan([KV], Shard(), ("mooncake",))
    assert plan.anchor.mode is TransferMode.ZERO_COPY
    view = np.zeros(PAGES * PAGE_BYTES, np.uint8)
    regions = {"kv": Region.of(KV, Shard(), (view,), PAGES)}
    with pytest.raises(KvdockError, match="does not register") as told:
        Attachment.open(dock, plan, Namespace(model="m"), regions, {"mooncake": given})
    assert "Dock.plan(settings=...)" in str(told.value)


def test_the_environment_names_a_client_as_well(
    owner: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    dock = Dock.load(require=("mooncake",))
    monkeypatch.setenv("MOONCAKE_CLIENT", owner.address)
    assert dock.plan([KV], Shard(), ("mooncake",)).anchor.mode is TransferMode.STAGED


def test_pages_in_shared_memory_are_stored_and_outlive_the_attachment(
    standalone: MooncakeSettings, rig: Any, attached: Any
) -> None:
    del attached
    memory = allocate(standalone, 1 << 20)
    pool = rig.pool
    region = Region.of(pool, Shard(), (memory.buffer[: rig.memory.nbytes],), 8)
    config = AttachConfig(settings=standalone, namespace=rig.namespace)
    handle = plugin.kvdock_register_pool(pool=pool, region=region, config=config)
    mine = type(rig)(
        handle, memory.buffer[: rig.memory.nbytes].reshape(rig.memory.shape), pool
    )
    wanted = mine.fill(61)
    names = [f"shared-{i}" for i in range(8)]
    assert mine.put(names) == [OK] * 8
    handle.close()
    assert isinstance(handle, PoolHandle)
    assert handle.client.state == State.READY

    handle = plugin.kvdock_register_pool(pool=pool, region=region, config=config)
    assert isinstance(handle, PoolHandle)
    mine.handle = handle
    mine.memory[:] = 0
    assert mine.get(names, cuts=2) == [OK] * 8
    assert np.array_equal(mine.memory, wanted)
    memory.give_back()
    assert handle.client.state == State.READY, "a pool lies in it"
    assert mine.get(names) == [OK] * 8
    handle.close()
    assert handle.client.state is State.CLOSED  # type: ignore[comparison-overlap] # a call changes it


def test_other_memory_is_refused_with_the_way_to_get_the_right_one(
    standalone: MooncakeSettings, attached: Any
) -> None:
    with pytest.raises(KvdockError, match="does not register") as told:
        attached(standalone)
    assert "Dock.allocate" in told.value.fix


def test_a_client_without_room_is_an_error_and_leaves_nothing_open(
    standalone: MooncakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Client] = []
    take = Client.take

    def full(client: Client, nbytes: int) -> int:
        opened.append(client)
        return take(client, nbytes) if nbytes < 4096 else 0

    monkeypatch.setattr(Client, "take", full)
    with pytest.raises(KvdockError, match=r"no 1\.0 MiB more"):
        allocate(standalone, (1 << 20) + 1)
    assert opened[0].state == State.CLOSED


def test_without_a_standalone_client_any_memory_will_do() -> None:
    settings = MooncakeSettings(master="127.0.0.1:1")
    assert plugin.kvdock_allocate(4096, AttachConfig(settings=settings)) is None


class Deaf:
    """A store whose standalone client was frozen when memory was given back."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def unregister_buffer(self, address: int) -> int:
        del address
        return -900


def test_memory_that_stays_registered_is_not_handed_out_again(
    standalone: MooncakeSettings,
) -> None:
    """It would be registered again without an error, and move nothing."""
    nbytes = (1 << 20) + 8192
    memory = allocate(standalone, nbytes)
    address = memory.buffer.ctypes.data
    (client,) = (one for one in _CLIENTS.values() if one.settings == standalone)
    client._store = Deaf(client._store)
    memory.give_back()
    assert client.state is State.CLOSED
    memory = allocate(standalone, nbytes)
    assert memory.buffer.ctypes.data != address
    memory.give_back()


def test_memory_that_a_frozen_client_may_still_write_to_is_not_handed_out_again(
    given: Given,
) -> None:
    settings = structure(MooncakeSettings, given, where="tests")
    config = AttachConfig(settings=settings, namespace="5e" * 32)
    nbytes = 4096 * 3

    def allocate() -> Any:
        memory = plugin.kvdock_allocate(nbytes=nbytes, config=config)
        assert memory is not None
        return memory

    first = allocate()
    address = np.asarray(first.buffer).ctypes.data
    first.give_back()
    again = allocate()
    assert np.asarray(again.buffer).ctypes.data == address
    (client,) = [one for one in _CLIENTS.values() if one.settings == settings]
    hold = client.held.add(nbytes)
    again.give_back()
    assert not hold.released
    other = allocate()
    assert np.asarray(other.buffer).ctypes.data != address
    other.give_back()
