"""Clearing a namespace that leases outlast."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
from stalls import timed

from kvdock import Batch, Operation, Outcome
from kvdock_mooncake.client import State
from kvdock_mooncake.error_codes import MASTER_SILENT
from kvdock_mooncake.namespace_state import NamespaceState

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

OK = Outcome.OK
THREAD = "kvdock-clear"


@pytest.fixture
def patient(serve: Any, alone: Any) -> Any:
    """Settings for a master whose leases outlast what a clear waits for."""
    lease = "-default_kv_lease_ttl=2500"
    return attrs.evolve(alone, master=serve(lease).address, lease_s=2.5)


def removers() -> int:
    return sum(one.name == THREAD for one in threading.enumerate())


def clear(rig: Any, within_s: float = 8.0) -> list[int]:
    until = time.monotonic() + within_s
    batch = Batch(Operation.CLEAR, [f"{rig.namespace}/"], deadline_s=until)
    return list(rig.handle.run(batch).outcomes)


def test_what_a_lease_keeps_is_gone_for_the_process_that_cleared_and_soon_for_all(
    attached: Any, patient: Any, eventually: Any
) -> None:
    rig = attached(patient)
    other = attached(patient, namespace="c" + rig.namespace[1:])
    wanted = rig.fill(51)
    assert rig.put(["read", "unread"]) == [OK, OK]
    assert rig.get(["read"]) == [OK]
    assert timed(partial(clear, rig), 2) == [OK]
    keys = [rig.key("read"), rig.key("unread")]
    assert rig.store.batch_is_exist(keys) == [1, 0], "the lease keeps one"
    assert rig.exists(["read"]) == rig.get(["read"]) == [Outcome.ABSENT]
    # Its key would keep the bytes of before.
    assert rig.put(["read"]) == [Outcome.REFUSED]
    assert other.put(["read"]) == [OK]
    eventually(lambda: not rig.handle.state.clearing)
    assert rig.exists(["read"]) == [Outcome.ABSENT]
    rig.memory[:] = wanted
    assert rig.put(["read"]) == rig.get(["read"]) == [OK]
    assert other.exists(["read"]) == [OK]
    assert not removers()
    other.release()
    rig.release()


def test_a_clear_without_leases_lasts_no_longer_than_its_calls(
    attached: Any, patient: Any
) -> None:
    rig = attached(patient)
    assert rig.put(["unread"]) == [OK]
    assert clear(rig, 0.5) == [OK]
    assert not rig.handle.state.clearing
    assert rig.store.is_exist(rig.key("unread")) == 0
    rig.release()


def test_the_last_pool_ends_a_clear_and_the_next_one_goes_on_with_it(
    attached: Any, patient: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Lends nothing: such a client is kept for the next pool.
    lender = attached(patient)
    own = attrs.evolve(patient, segment_bytes=0)
    rig = attached(own)
    assert rig.put(["left"]) == rig.get(["left"]) == [OK]
    assert clear(rig, 0.05) == [OK]
    assert removers() == 1
    rig.release()
    eventually(lambda: not removers())
    assert "before the leases of a cleared namespace" in caplog.text
    again = attached(own)
    assert again.handle.client is rig.handle.client
    assert again.exists(["left"]) == [Outcome.ABSENT]
    eventually(lambda: not again.handle.state.clearing)
    assert again.store.is_exist(rig.key("left")) == 0
    again.release()
    lender.release()


def test_a_client_that_lends_is_shut_although_a_clear_is_not_through(
    attached: Any, patient: Any, eventually: Any
) -> None:
    rig = attached(patient)
    assert rig.put(["lent"]) == rig.get(["lent"]) == [OK]
    assert clear(rig, 0.05) == clear(rig, 0.05) == [OK]
    assert removers() == 1
    rig.release()
    eventually(lambda: rig.handle.client.state is State.CLOSED)
    eventually(lambda: not removers())


def test_two_ranks_that_clear_leave_nothing_although_one_read_later(
    attached: Any, patient: Any, eventually: Any
) -> None:
    """Or the first to open would find the page, and keep it with its own lease."""
    lender = attached(patient)
    none = attrs.evolve(patient, segment_bytes=0)
    first = attached(none)
    second = attached(attrs.evolve(none, setup_timeout_s=19))
    assert first.handle.client is not second.handle.client
    assert first.put(["both"]) == first.get(["both"]) == [OK]
    time.sleep(0.5)
    assert second.get(["both"]) == [OK]
    assert clear(first) == clear(second) == [OK]
    found: set[int] = set()

    def opened() -> bool:
        found.update(first.exists(["both"]), second.exists(["both"]))
        return not (first.handle.state.clearing or second.handle.state.clearing)

    eventually(opened)
    opened()
    assert found == {Outcome.ABSENT}
    assert lender.store.is_exist(first.key("both")) == 0
    for rig in (first, second, lender):
        rig.release()


class Raising:
    """A store that raises in one of its calls until it is switched off."""

    def __init__(self, store: Any, call: str) -> None:
        self.store, self.call, self.calls = store, call, 0
        self.raising = True

    def __getattr__(self, name: str) -> Any:
        if name == self.call and self.raising:
            self.calls += 1
            raise RuntimeError("an unexpected error")
        return getattr(self.store, name)


def test_a_clear_that_fails_leaves_its_namespace_open(
    attached: Any, patient: Any
) -> None:
    rig = attached(patient)
    store = rig.store
    rig.handle.client._store = Raising(store, "remove_by_regex")
    with pytest.raises(RuntimeError, match="unexpected"):
        clear(rig)
    rig.handle.client._store = store
    assert rig.put(["open"]) == rig.get(["open"]) == [OK]
    rig.release()


def test_a_removal_in_the_background_goes_on_after_a_call_that_raised(
    attached: Any, patient: Any, eventually: Any
) -> None:
    rig = attached(patient)
    store = rig.store
    assert rig.put(["kept"]) == rig.get(["kept"]) == [OK]
    assert clear(rig, 0.05) == [OK]
    faulty = rig.handle.client._store = Raising(store, "remove_by_regex")
    eventually(lambda: faulty.calls > 1)
    assert removers() == 1
    faulty.raising = False
    eventually(lambda: not rig.handle.state.clearing)
    assert store.is_exist(rig.key("kept")) == 0
    rig.release()


def test_a_read_that_raised_may_have_been_given_leases(
    attached: Any, patient: Any
) -> None:
    rig = attached(patient)
    store = rig.store
    rig.handle.client._store = Raising(store, "batch_get_into")
    with pytest.raises(RuntimeError, match="unexpected"):
        rig.get(["unknown"])
    assert rig.handle.state.leased_for_s() > 0
    rig.handle.client._store = store
    rig.release()


PAGES, CALL_PAGES = 60_000, 2_000


class Recording:
    """A store that records the answers of one of its calls."""

    def __init__(self, store: Any, call: str) -> None:
        self.store, self.call = store, call
        self.answers: list[int] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        return partial(self._record, method) if name == self.call else method

    def _record(self, method: Any, *arguments: Any) -> int:
        self.answers.append(int(method(*arguments)))
        return self.answers[-1]


def test_a_clear_that_takes_the_master_longer_than_a_call_may_is_no_outage(
    attached: Any, serve: Any, alone: Any, eventually: Any, monkeypatch: Any
) -> None:
    """Many pages go although no call waits for it, and lookups are answered on."""
    lent = attrs.evolve(alone, master=serve().address)
    lender = attached(lent, row_bytes=64)
    addresses = np.full((CALL_PAGES, 1), lender.memory.ctypes.data, np.int64)
    sizes = np.full((CALL_PAGES, 1), 64, np.int64)
    for start in range(0, PAGES, CALL_PAGES):
        keys = [lender.key(page) for page in range(start, start + CALL_PAGES)]
        put = Batch(Operation.PUT, keys, addresses, sizes)
        assert not lender.handle.run(put).outcomes.any()
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "100")
    rig = attached(attrs.evolve(lent, segment_bytes=0), row_bytes=64)
    other = attached(
        attrs.evolve(lent, segment_bytes=0), namespace="d" + rig.namespace[1:]
    )
    assert other.handle.client is rig.handle.client
    store = rig.store
    removals = rig.handle.client._store = Recording(store, "remove_by_regex")
    assert clear(rig) == [OK]
    assert removals.answers[0] == MASTER_SILENT, "the master was quick enough"
    assert other.exists(["page"]) == rig.exists([0]) == [Outcome.ABSENT]
    eventually(lambda: not rig.handle.state.clearing)
    for start in range(0, PAGES, CALL_PAGES):
        keys = [lender.key(page) for page in range(start, start + CALL_PAGES)]
        assert not any(lender.store.batch_is_exist(keys))
    assert not removers()
    rig.handle.client._store = store
    for each in (rig, other, lender):
        each.release()


def test_a_clear_while_the_master_hangs_says_so_in_time(
    attached: Any, serve: Any, alone: Any, freeze: Any
) -> None:
    master = serve()
    rig = attached(attrs.evolve(alone, master=master.address))
    freeze(master.process.pid)
    try:
        assert timed(partial(clear, rig), 8) == [Outcome.UNAVAILABLE]
        assert not rig.handle.state.clearing
    finally:
        master.process.send_signal(signal.SIGCONT)
    rig.release()


def test_a_clear_does_not_overtake_the_calls_that_had_begun() -> None:
    """A read that is under way may still be given leases."""
    state = NamespaceState("ab" * 32, 10.0)
    assert state.acquire()
    assert state.leased_for_s() > 0
    state.clearing = True
    assert not state.acquire()
    state.release()
    assert state.leased_for_s() == 0
    state.note_lease()
    assert 10 < state.leased_for_s() <= 11
