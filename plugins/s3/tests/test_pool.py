"""Batches of one pool, past the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from object_server import Fault, ObjectServer

from kvdock import Batch, Operation, Outcome

OTHER = "f" * 64


def test_a_clear_takes_the_pages_of_its_namespace_and_nothing_else(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine()
    mine.put()
    some = next(iter(server.objects.values()))
    kept = [
        f"tests/{mine.attachment.namespace}/_namespace.json",
        f"tests/{OTHER}/0123.kv.L0-1",
        "tests/notes.txt",
        f"{mine.attachment.namespace}/0123.kv.L0-1",
    ]
    for name in kept[1:]:
        server.objects[name] = some
    assert set(mine.attachment.clear().values()) == {Outcome.OK}
    assert sorted(server.objects) == sorted(kept)


@pytest.mark.parametrize("prefix", ["", "/", OTHER, f"{OTHER}/", "0123"])
def test_a_clear_of_anything_else_is_refused(
    server: ObjectServer, engine: Callable[..., Any], prefix: str
) -> None:
    mine = engine()
    mine.put()
    before = len(server.objects)
    result = mine.handle.run(Batch(Operation.CLEAR, [prefix]))
    assert result.outcomes.tolist() == [Outcome.REFUSED]
    assert len(server.objects) == before


def test_a_clear_that_cannot_be_made_is_not_called_done(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine()
    mine.put()
    server.fail(Fault.FORBIDDEN, "DELETEMANY")
    assert Outcome.OK not in mine.attachment.clear().values()


def test_the_bytes_of_an_object_that_is_there_are_kept(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    for conditional in (True, False):
        mine = engine(conditional_put=conditional)
        assert set(mine.put()) == {Outcome.OK}
        before = {key: one.data for key, one in server.objects.items()}
        mine.memory[:] = 1
        assert set(mine.put()) == {Outcome.OK}
        assert {key: one.data for key, one in server.objects.items()} == before


def test_an_object_of_another_length_is_replaced_by_the_next_put(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine()
    key = mine.key(0)
    mine.handle.run(mine.batch(Operation.PUT, [key], 5.0))
    name = f"tests/{key}"
    server.objects[name] = attrs.evolve(server.objects[name], data=b"short")
    result = mine.handle.run(mine.batch(Operation.GET, [key], 5.0))
    assert result.outcomes.tolist() == [Outcome.SHORT]
    result = mine.handle.run(mine.batch(Operation.PUT, [key], 5.0))
    assert result.outcomes.tolist() == [Outcome.OK]
    assert server.objects[name].data == mine.right[0].tobytes()


def test_more_deletions_than_one_request_takes(
    server: ObjectServer, engine: Callable[..., Any]
) -> None:
    mine = engine()
    some = next(iter(server.objects.values()))
    head = mine.attachment.namespace
    keys = [f"{head}/{number:064x}.kv.L0-1" for number in range(1500)]
    for key in keys:
        server.objects[f"tests/{key}"] = some
    result = mine.handle.run(mine.batch(Operation.DELETE, keys, 20.0))
    assert set(result.outcomes.tolist()) == {Outcome.OK}
    assert list(server.objects) == [f"tests/{head}/_namespace.json"]
    assert [method for method, _ in server.requests].count("DELETEMANY") == 3
