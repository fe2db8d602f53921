"""A server that misbehaves costs misses and a bounded time, never wrong bytes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from object_server import Fault, ObjectServer

from kvdock import KvdockError, Operation, Outcome
from kvdock.config import CoreSettings, Deadlines
from kvdock.config.core import BreakerSettings
from kvdock_s3.outcomes import explain

GET_S = 1.0
SLACK_S = 0.5
QUICK = CoreSettings(deadlines=Deadlines(get=GET_S, put=GET_S, exists=GET_S))

BAD_BODIES = [
    Fault.TRUNCATED,
    Fault.RESET,
    Fault.DRIPPING,
    Fault.STALLED,
    Fault.SILENT,
    Fault.SHORT,
    Fault.LONG,
    Fault.FLIPPED,
    Fault.OTHER_OBJECT,
    Fault.INTERNAL,
    Fault.SLOW_DOWN,
    Fault.FORBIDDEN,
]


@pytest.mark.parametrize("fault", BAD_BODIES)
def test_a_page_that_cannot_be_read_is_a_miss_in_time_and_spoils_no_other(
    server: ObjectServer, engine: Callable[..., Any], fault: Fault
) -> None:
    mine = engine(QUICK)
    assert set(mine.put()) == {Outcome.OK}
    server.fail(fault, "GET", containing=mine.hashes[3])
    began = time.monotonic()
    outcomes = mine.get()
    assert time.monotonic() - began < GET_S + SLACK_S
    assert outcomes[3] != Outcome.OK
    assert {*outcomes[:3], *outcomes[4:]} == {Outcome.OK}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Fault.SHORT, Outcome.SHORT),
        (Fault.LONG, Outcome.LONG),
        (Fault.INTERNAL, Outcome.UNAVAILABLE),
        (Fault.SLOW_DOWN, Outcome.UNAVAILABLE),
        (Fault.FORBIDDEN, Outcome.ERROR),
        (Fault.STALLED, Outcome.TIMEOUT),
        (Fault.SILENT, Outcome.TIMEOUT),
    ],
)
def test_what_went_wrong_has_an_outcome_and_the_memory_is_not_touched(
    server: ObjectServer,
    engine: Callable[..., Any],
    fault: Fault,
    outcome: Outcome,
) -> None:
    mine = engine()
    mine.handle.run(mine.batch(Operation.PUT, [mine.key(0)], GET_S))
    server.fail(fault, "GET")
    mine.memory[:] = 7
    batch = mine.batch(Operation.GET, [mine.key(0)], GET_S)
    result = mine.handle.run(batch)
    assert result.outcomes.tolist() == [outcome]
    assert (mine.memory == 7).all()


@pytest.mark.parametrize(
    "fault", [Fault.TRUNCATED, Fault.RESET, Fault.INTERNAL, Fault.SLOW_DOWN]
)
def test_a_read_that_fails_once_is_repeated(
    server: ObjectServer, engine: Callable[..., Any], fault: Fault
) -> None:
    mine = engine()
    mine.put()
    server.fail(fault, "GET", containing=mine.hashes[3], times=1)
    assert set(mine.get()) == {Outcome.OK}


@pytest.mark.parametrize("fault", [Fault.HUNG_UP, Fault.INTERNAL, Fault.SLOW_DOWN])
def test_a_write_that_fails_once_is_repeated(
    server: ObjectServer, engine: Callable[..., Any], fault: Fault
) -> None:
    mine = engine()
    server.fail(fault, "PUT", containing=mine.hashes[3], times=1)
    assert set(mine.put()) == {Outcome.OK}
    assert set(mine.get()) == {Outcome.OK}


def test_a_write_whose_answer_is_lost_is_stored(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine()
    server.fail(Fault.ANSWER_LOST, "PUT", containing=mine.hashes[3], times=1)
    assert set(mine.put()) == {Outcome.OK}
    assert set(mine.get()) == {Outcome.OK}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Fault.INTERNAL, Outcome.UNAVAILABLE),
        (Fault.FORBIDDEN, Outcome.ERROR),
        (Fault.CONFLICT, Outcome.REFUSED),
        (Fault.SILENT, Outcome.TIMEOUT),
        (Fault.HUNG_UP, Outcome.UNAVAILABLE),
    ],
)
def test_a_page_that_is_not_stored_is_not_called_stored(
    server: ObjectServer,
    engine: Callable[..., Any],
    fault: Fault,
    outcome: Outcome,
) -> None:
    mine = engine(QUICK)
    rule = server.fail(fault, "PUT", containing=mine.hashes[3])
    began = time.monotonic()
    outcomes = mine.put()
    assert time.monotonic() - began < GET_S + SLACK_S
    assert outcomes[3] == outcome
    assert {*outcomes[:3], *outcomes[4:]} == {Outcome.OK}
    server.rules.remove(rule)
    assert mine.get()[3] == Outcome.ABSENT


def test_a_server_that_comes_back_is_used_again(
    server: ObjectServer,
    engine: Callable[..., Any],
    eventually: Callable[..., Any],
) -> None:
    mine = engine(
        CoreSettings(breaker=BreakerSettings(failures=3, backoff=0.1, max_backoff=0.2))
    )
    assert set(mine.put()) == {Outcome.OK}
    server.stop()
    for _ in range(3):
        assert Outcome.OK not in mine.get()
    assert mine.attachment.breakers()["s3"][Operation.GET] == "open"
    before = len(server.requests)
    began = time.monotonic()
    for _ in range(20):
        assert Outcome.OK not in mine.get()
    assert time.monotonic() - began < GET_S
    server.start()
    eventually(lambda: set(mine.get()) == {Outcome.OK})
    assert len(server.requests) > before


def test_a_server_that_is_killed_again_and_again_serves_no_wrong_byte(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine(
        CoreSettings(breaker=BreakerSettings(failures=99, abandoned_calls=99)),
        retries=0,
    )
    good = 0
    for turn in range(12):
        if turn % 3 == 0:
            server.stop()
            server.start()
        mine.memory[:] = mine.right
        mine.put()
        good += mine.get().count(Outcome.OK)
    assert good > 0


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that takes no connection and refuses none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for one in waiting:
            one.close()


def test_an_address_that_does_not_answer_costs_one_connect_timeout(
    engine: Callable[..., Any], client: Any, black_hole: str
) -> None:
    mine = engine()
    dead = client(endpoint=black_hole, connect_timeout=0.2)
    mine.handle.shared.client = dead
    keys = [mine.key(page) for page in range(8)] * 8

    def lookup() -> float:
        began = time.monotonic()
        result = mine.handle.run(mine.batch(Operation.EXISTS, keys, 5.0))
        assert Outcome.OK not in result.outcomes
        return time.monotonic() - began

    # Without it, a call would take the 5 s of its deadline.
    assert 0.15 < lookup() < 2.5
    assert min(lookup() for _ in range(4)) < 0.15


def test_attaching_to_a_dead_endpoint_is_an_error_that_names_it(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    server.stop()
    began = time.monotonic()
    with pytest.raises(KvdockError, match="no connection") as raised:
        engine()
    assert time.monotonic() - began < 5.0
    assert "endpoint" in raised.value.fix


def test_a_store_that_is_full_declines(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine()
    server.fail(Fault.FULL, "PUT")
    assert set(mine.put()) == {Outcome.REFUSED}


def test_one_object_that_cannot_be_deleted_keeps_no_other(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine()
    mine.put()
    server.fail(Fault.FORBIDDEN, "DELETEMANY", containing=mine.hashes[3])
    keys = [mine.key(page) for page in range(8)]
    outcomes = mine.handle.run(mine.batch(Operation.DELETE, keys, 5.0)).outcomes
    assert outcomes[3] == Outcome.ERROR
    assert {*outcomes[:3], *outcomes[4:]} == {Outcome.OK}


def test_a_certificate_that_is_not_accepted_is_called_that() -> None:
    """As the client of obstore 0.12 says it of a server with its own certificate."""
    said = """Generic S3 error: Error performing HEAD https://localhost:1/b/x in 2ms - \
HTTP error: error sending request

Debug source:
Generic { source: HttpError { kind: Connect, source: hyper_util::client::legacy::Error(
Connect, Custom { kind: InvalidData, error: InvalidCertificate(Other(OtherError(
CaUsedAsEndEntity))) }) } }"""
    failure = explain(RuntimeError(said))
    assert failure.outcome is Outcome.UNAVAILABLE
    assert "certificate is not accepted" in failure.sentence


def test_a_damaged_object_that_may_not_be_deleted_is_replaced_by_the_next_put(
    server: ObjectServer, engine: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    mine = engine()
    assert set(mine.put()) == {Outcome.OK}
    name = f"tests/{mine.key(3)}"
    flipped = bytearray(server.objects[name].data)
    flipped[100] ^= 1
    server.objects[name] = attrs.evolve(server.objects[name], data=bytes(flipped))
    server.fail(Fault.FORBIDDEN, "DELETE", "DELETEMANY")
    assert mine.get()[3] != Outcome.OK

    def healed() -> bool:
        mine.memory[:] = mine.right
        assert set(mine.put()) == {Outcome.OK}
        return set(mine.get()) == {Outcome.OK}

    eventually(healed)
