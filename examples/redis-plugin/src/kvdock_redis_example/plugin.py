"""Keeps pages in Redis: the form of a backend over a server."""

from __future__ import annotations

import os
import time

import attrs

from kvdock import (
    BatchResult,
    Finding,
    KindSupport,
    Manifest,
    Operation,
    Outcome,
    Scope,
    Support,
    hookimpl,
)
from kvdock.config import option

LISTED = 500
LATE_S = 1.0


@attrs.frozen
class Settings:
    url: str = option("redis://127.0.0.1:6379/0", help="Where the server listens.")


@hookimpl
def kvdock_manifest():
    return Manifest(
        name="redis_example",
        api=2,
        summary="pages in Redis",
        kinds=KindSupport.of_every_kind(),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NO,
        eviction=Support.NO,
        fork_safe=Support.NO,
        # What a restart of the server leaves depends on how it is configured.
        durability=Scope.PROCESS,
        sharing=Scope.CLUSTER,
        clear_reach=Scope.NAMESPACE,
        max_object_bytes=64 << 20,
        settings=Settings,
    )


@hookimpl
def kvdock_probe(config):
    store = Store(config.settings)
    try:
        store.client.ping()
    except store.failed as error:
        hint = f"Start a server, or set url; {error}"
        return [Finding(ok=False, what=f"no server at {store.url}", hint=hint)]
    finally:
        store.close()
    return [Finding(ok=True, what=f"a server answers at {store.url}")]


@hookimpl
def kvdock_register_pool(config):
    return Store(config.settings)


class Store:
    def __init__(self, settings):
        # Imported late: `kvdock list` shall not load a client library.
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.url, self.home = settings.url, os.getpid()
        self.redis, self.failed = redis, redis.RedisError
        self.client = redis.Redis.from_url(
            settings.url,
            # So much later than its deadline may a call end.
            socket_timeout=LATE_S,
            socket_connect_timeout=LATE_S,
            # Nothing is tried again: the core knows when a store is to be left alone.
            retry=Retry(NoBackoff(), 0),
        )

    def run(self, batch):
        if os.getpid() != self.home:
            # A socket that two processes share would mix up their answers.
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        if batch.operation is Operation.CLEAR:
            head = batch.keys[0].encode()
            return BatchResult.all(batch, self._clear(head))
        outcomes = [Outcome.TIMEOUT] * len(batch)
        for row, key in enumerate(batch.keys):
            if time.monotonic() < batch.deadline_s:
                outcomes[row] = self._asked(batch, row, key)
        return BatchResult.of(batch, outcomes)

    def _asked(self, batch, row, key):
        try:
            return self._one(batch, row, key)
        except self.redis.TimeoutError:
            return Outcome.TIMEOUT
        except self.redis.ConnectionError:
            return Outcome.UNAVAILABLE
        except self.redis.ResponseError:
            # Out of memory, read only: the answer of a server that is there.
            put = batch.operation is Operation.PUT
            return Outcome.REFUSED if put else Outcome.ERROR

    def _one(self, batch, row, key):
        match batch.operation:
            case Operation.PUT:
                # Not EXISTS and then SET: of two writers one would replace the other.
                self.client.set(key, batch.take(row), nx=True)
                return Outcome.OK
            case Operation.DELETE:
                self.client.delete(key)
                return Outcome.OK
            case Operation.EXISTS:
                return Outcome.OK if self.client.exists(key) else Outcome.ABSENT
            case Operation.GET:
                found = self.client.get(key)
                return Outcome.ABSENT if found is None else batch.land(row, found)
        return Outcome.REFUSED

    def _clear(self, head):
        try:
            found = list(self.client.scan_iter(match=head + b"*", count=LISTED))
            for at in range(0, len(found), LISTED):
                self.client.delete(*found[at : at + LISTED])
        except self.failed:
            return Outcome.ERROR
        return Outcome.OK

    def close(self):
        if os.getpid() == self.home:
            self.client.close()
