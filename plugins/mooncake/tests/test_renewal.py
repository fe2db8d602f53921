from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdock import (
    Operation,
    Outcome,
)
from kvdock.errors import KvdockError
from kvdock_mooncake import client
from kvdock_mooncake.client import State
from kvdock_mooncake.connect import join

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

OK = Outcome.OK


class Wedged:
    """A store whose transfers fail while its master goes on answering."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.register_buffer = store.register_buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def batch_get_into(self, keys: list[str], *where: Any) -> list[int]:
        del where
        return [-800] * len(keys)


def test_a_store_that_nothing_leaves_any_more_is_replaced(
    attached: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attached(alone)
    wanted = rig.fill(32)
    assert rig.put(["wedged"]) == [OK]
    now = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("kvdock_mooncake.health.time", clock)
    before = rig.handle.client._store = Wedged(rig.store)
    for _ in range(4):
        # What an engine does: look, read, compute it, store it again.
        assert rig.store is before
        assert rig.exists(["wedged"]) == [OK]
        assert rig.get(["wedged"]) == [Outcome.UNAVAILABLE]
        assert rig.put(["wedged"]) == [OK]
        now[0] += 11
    assert rig.store is not before
    rig.memory[:] = wanted
    assert rig.put(["renewed"]) == [OK]
    rig.memory[:] = 0
    assert rig.get(["renewed"]) == [OK]
    assert np.array_equal(rig.memory[0], wanted[0])
    rig.release()


def test_a_refused_attachment_leaves_no_thread_that_waits(
    attached: Any, settings: Any
) -> None:
    import attrs

    names = {thread.name for thread in threading.enumerate()}
    bad = attrs.evolve(settings, master="127.0.0.1:1")
    with pytest.raises(KvdockError, match="no Mooncake master answers"):
        attached(bad)
    assert {thread.name for thread in threading.enumerate()} <= names | {"MainThread"}


class OwnerLost(Wedged):
    """A store whose reads are of pages on the disk of an owner that has died."""

    def batch_get_into(self, keys: list[str], *where: Any) -> list[int]:
        del where
        return [-900] * len(keys)


def test_an_owner_that_has_died_with_its_disk_is_not_taken_for_the_master(
    attached: Any, alone: Any
) -> None:
    rig = attached(alone)
    assert rig.put(["there"]) == [OK]
    store = rig.store
    rig.handle.client._store = OwnerLost(store)
    assert rig.get(["spilled"]) == [Outcome.UNAVAILABLE]
    assert rig.exists(["there"]) == [OK]
    rig.handle.client._store = store
    assert rig.get(["there"]) == [OK]
    rig.release()


class Spare:
    """A store that has joined again: takes memory or not, and can be closed."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.closed = status, 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        del address, nbytes
        return self.status

    def close(self) -> int:
        self.closed += 1
        return 0


def stick(rig: Any, monkeypatch: pytest.MonkeyPatch, joined: Any) -> None:
    """Let the end of the next call replace the store by what `joined` returns."""
    monkeypatch.setattr(client, "join", joined)
    health = rig.handle.client.health
    health._failing_since[Operation.GET] = 0.0
    health.is_stuck = True


def test_a_renewal_that_fails_in_any_way_leaves_the_old_store_in_use(
    attached: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attached(alone)
    before, unfit = rig.store, Spare(-600)

    def nameless(*_: Any) -> Any:
        raise socket.gaierror("the name is not known")

    for joined in (nameless, lambda *_: unfit):
        stick(rig, monkeypatch, joined)
        assert rig.exists(["none"]) == [Outcome.ABSENT]
        assert rig.handle.client.state is State.READY
        assert rig.store is before
    assert unfit.closed == 1
    assert rig.put(["on"]) == rig.get(["on"]) == [OK]
    rig.release()


def test_a_store_that_is_joined_after_the_last_pool_has_left_is_closed(
    attached: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attached(alone)
    joining, go, spare = threading.Event(), threading.Event(), Spare()

    def joined(*_: Any) -> Spare:
        joining.set()
        assert go.wait(60)
        return spare

    stick(rig, monkeypatch, joined)
    caller = threading.Thread(target=lambda: rig.exists(["none"]))
    caller.start()
    assert joining.wait(60)
    rig.release()
    assert rig.handle.client.state is State.CLOSED
    go.set()
    caller.join(20)
    assert spare.closed == 1
    assert rig.handle.client.state is State.CLOSED


def test_a_new_store_prefers_its_own_segment(
    attached: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attrs

    rig = attached(attrs.evolve(alone, preferred_segment="self"))
    before = rig.store
    stick(rig, monkeypatch, join)
    assert rig.exists(["none"]) == [Outcome.ABSENT]
    assert rig.store is not before
    own = rig.store.get_hostname()
    assert rig.handle.client.put_options.config().preferred_segment == own
    rig.release()
