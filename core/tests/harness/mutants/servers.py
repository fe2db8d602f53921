"""Mutants of a client whose servers freeze, fail, end and come back."""

from __future__ import annotations

import ctypes
import os
import time
from typing import TYPE_CHECKING, Any

import attrs
from server_reference import ServerShelf
from shelf_server import Client

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from mutants.mutant import ServerMutant

if TYPE_CHECKING:
    from reference import Handle, ReferenceSettings, Shelf

LONG_S = 30.0
HELD_US = 4_000_000


def _over(settings: ReferenceSettings, client: type[Client]) -> Shelf:
    ports = [int(one.rpartition(":")[2]) for one in settings.store.split(",")]
    return ServerShelf(tuple(client(port) for port in ports))


class DeadServerTakesAll(ServerMutant):
    """Answers each PUT with OK when no server could be asked."""

    image_of = "an exception of the client that is logged, the page reported as stored"
    caught_by = "test_a_store_that_was_stopped_is_a_miss_in_time_and_comes_back"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        outcome = super().step(handle, batch, row)
        failed = outcome in (Outcome.UNAVAILABLE, Outcome.ERROR)
        return Outcome.OK if failed and batch.operation is Operation.PUT else outcome


class FireAndForget(ServerMutant):
    """Answers a PUT with OK when its time is over before the server has answered."""

    image_of = "a write that is OK once it lies in a socket's buffer"
    caught_by = "test_a_store_that_is_frozen_is_a_miss_in_time_and_comes_back"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        outcome = super().step(handle, batch, row)
        lost = batch.operation is Operation.PUT and outcome in (
            Outcome.TIMEOUT,
            Outcome.ERROR,
        )
        return Outcome.OK if lost else outcome


class RefusedIsStored(ServerMutant):
    """Does not look at what a server answered to a PUT."""

    image_of = "Redis: READONLY and OOM are answers, and no one read them"
    caught_by = "test_a_store_that_refuses_is_a_miss_in_time_and_comes_back"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        outcome = super().step(handle, batch, row)
        answered = outcome not in (Outcome.TIMEOUT, Outcome.REFUSED)
        put = batch.operation is Operation.PUT
        return Outcome.OK if put and answered else outcome


class FixedTimeout(ServerMutant):
    """Waits 30 s for a server, whatever time a call has."""

    image_of = "a socket timeout of 30 s from the client's own settings"
    caught_by = "test_a_store_that_is_frozen_is_a_miss_in_time_and_comes_back"
    raises = "DidNotReturn"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        later = attrs.evolve(batch, deadline_s=time.monotonic() + LONG_S)
        return super().run(handle, later)


class HoldsTheInterpreter(ServerMutant):
    """Waits for its server inside of a library that keeps the interpreter's lock."""

    image_of = "mooncake: a transfer that waits with the GIL held stops every thread"
    caught_by = "test_a_store_that_is_frozen_is_a_miss_in_time_and_comes_back"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        outcome = super().step(handle, batch, row)
        if outcome is Outcome.TIMEOUT and batch.operation is Operation.GET:
            ctypes.PyDLL(None).usleep(HELD_US)
        return outcome


class NeverReconnects(ServerMutant):
    """Keeps a connection that has failed."""

    image_of = "a client that is made once: a restarted server is gone for good"
    caught_by = "test_a_store_that_was_stopped_is_a_miss_in_time_and_comes_back"

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        return _over(settings, _Once)


class _Once(Client):
    broken = False

    def ask(self, do: str, key: str, blob: bytes, deadline_s: float) -> Any:
        if self.broken:
            raise ConnectionError("closed")
        return super().ask(do, key, blob, deadline_s)

    def close(self) -> None:
        self.broken = True
        super().close()


class LateAnswersRead(ServerMutant):
    """Uses a connection again whose last answer it has not waited for."""

    image_of = "a pipelined client: after a timeout each key gets the answer before it"
    caught_by = "test_a_store_that_is_frozen_is_a_miss_in_time_and_comes_back"

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        return _over(settings, _Shifted)


class _Shifted(Client):
    def close(self) -> None:
        """Keep the connection, whatever is still to come on it."""


class OneServerIsAll(ServerMutant):
    """Answers all keys as unavailable for good once one server was."""

    image_of = "one breaker for a cluster: the half that is left is not used again"
    caught_by = "test_a_store_that_lost_a_half_comes_back_and_lies_about_nothing"

    def __init__(self) -> None:
        super().__init__()
        self.lost = False

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        outcome = Outcome.UNAVAILABLE
        if not self.lost:
            outcome = super().step(handle, batch, row)
            self.lost = outcome is Outcome.UNAVAILABLE
        return outcome


class HalfIsOK(ServerMutant):
    """Says OK to keys whose server is gone, as the batch as a whole went through."""

    image_of = "a cluster client's partial failure: one status for the whole pipeline"
    caught_by = "test_a_store_that_lost_a_half_comes_back_and_lies_about_nothing"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        if batch.operation is Operation.PUT and result.ok.any():
            return BatchResult.all(batch, Outcome.OK)
        return result


class ForgetsWithItsServer(ServerMutant):
    """Declares that pages outlive their host, and its server keeps them in memory."""

    image_of = "a lying capability: durability of a Redis without persistence"
    caught_by = "test_pages_outlive_a_restart_of_what_holds_them"
    keeps = False


class ChildSharesSockets(ServerMutant):
    """Declares fork safety, and a child talks on its parent's connection."""

    image_of = "redis-py's pool without its check of the process: answers are mixed up"
    caught_by = "test_a_forked_child_beside_its_parent_meets_what_is_declared"

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        return _over(settings, _Inherited)


class _Inherited(Client):
    def ask(self, do: str, key: str, blob: bytes, deadline_s: float) -> Any:
        if self.link is not None:
            self.home = os.getpid()
        return super().ask(do, key, blob, deadline_s)
