"""Whether the master is there, as a connection shows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from stalls import timed

from kvdock.child_processes import free_port
from kvdock.errors import SettingsError
from kvdock_mooncake import master as room
from kvdock_mooncake.master import ClusterError, Master
from kvdock_mooncake.settings import MooncakeSettings


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_free_port_at_the_address_is_an_error_with_a_way_out() -> None:
    unused = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=f"no Mooncake master answers at {unused}"):
        Master(unused).connect()
    with pytest.raises(SettingsError, match="is not host:port"):
        Master("nonsense").connect()


def test_a_standalone_client_that_is_away_is_not_called_a_master() -> None:
    unused = f"127.0.0.1:{free_port()}"
    settings = MooncakeSettings(master="127.0.0.1:1", standalone=unused)
    with pytest.raises(ClusterError, match=f"client answers at {unused}") as told:
        Master.of(settings).connect()
    assert "mooncake_client" in told.value.fix
    assert "`standalone` (MOONCAKE_CLIENT)" in told.value.fix


@pytest.mark.parametrize("separator", [";", ","])
def test_one_of_several_etcd_servers_is_enough(
    listener: socket.socket, separator: str
) -> None:
    unused = f"127.0.0.1:{free_port()}"
    both = separator.join((unused, address(listener)))
    Master(f"etcd://{both}").connect()
    with pytest.raises(ClusterError, match="no etcd answers"):
        Master(f"etcd://{unused}{separator}{unused}").connect()


def test_an_address_of_another_scheme_is_not_looked_at() -> None:
    assert Master("k8s://somewhere").addresses == ()
    Master("k8s://somewhere").connect()


def test_a_lost_master_is_away_until_it_is_back(
    listener: socket.socket, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Master(address(listener))
    looks: list[bool] = []
    there = [False]

    def answers(self: Master, within_s: float) -> bool:
        assert self is one
        assert within_s < 1
        looks.append(there[0])
        return there[0]

    monkeypatch.setattr(Master, "answers", answers)
    assert not one.is_down()
    one.mark_down()
    for _ in range(40):
        assert one.is_down()
        clock[0] += 0.1
    assert 6 <= len(looks) <= 8, "it is looked for now and then, not by every call"
    there[0] = True
    clock[0] += 1
    assert not one.is_down()
    assert not one.is_down()
    assert len(looks) <= 9


def test_one_that_listens_and_never_answers_is_tried_less_and_less(
    listener: socket.socket, clock: list[float]
) -> None:
    one = Master(address(listener))
    waits = []
    for _ in range(7):
        one.mark_down()
        began = clock[0]
        while one.is_down():
            clock[0] += 0.25
        waits.append(clock[0] - began)
    assert waits == [0.5, 1, 2, 4, 8, 8, 8]
    one.mark_up()
    one.mark_down()
    clock[0] += 0.5
    assert not one.is_down()


def test_while_one_caller_looks_the_others_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, go = threading.Event(), threading.Event()

    def answers(self: Master, within_s: float) -> bool:
        del self, within_s
        looking.set()
        return go.wait(60)

    monkeypatch.setattr(Master, "answers", answers)
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.0)
    one = Master("127.0.0.1:1")
    one.mark_down()
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 60.0)
    seen: list[bool] = []
    caller = threading.Thread(target=lambda: seen.append(one.is_down()))
    caller.start()
    assert looking.wait(60)
    assert timed(one.is_down, 1)
    go.set()
    caller.join(60)
    assert seen == [False]
