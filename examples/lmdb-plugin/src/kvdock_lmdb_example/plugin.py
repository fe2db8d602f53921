"""Keeps pages in LMDB: the form of a backend over an embedded store."""

from __future__ import annotations

import os
import time
from pathlib import Path

import attrs

from kvdock import (
    BatchResult,
    KindSupport,
    Manifest,
    Operation,
    Outcome,
    Scope,
    Support,
    hookimpl,
)
from kvdock.config import option, size


@attrs.frozen
class Settings:
    root: Path = option(help="Directory of the database; created if missing.")
    map_bytes: int = size("256 MiB", help="What the database may take.")


@hookimpl
def kvdock_manifest():
    return Manifest(
        name="lmdb_example",
        api=2,
        summary="pages in LMDB",
        kinds=KindSupport.of_every_kind(),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NO,
        eviction=Support.NO,
        fork_safe=Support.NO,
        durability=Scope.HOST,
        sharing=Scope.HOST,
        clear_reach=Scope.NAMESPACE,
        # The longest key of LMDB as it is built, less than what a page hash takes.
        max_key_bytes=511,
        settings=Settings,
    )


@hookimpl
def kvdock_register_pool(config):
    return Store(config.settings)


_OPEN = {}
"""Path to its environment and users: LMDB wants each file once in a process."""


class Store:
    def __init__(self, settings):
        # Imported late: `kvdock list` shall not load it.
        import lmdb

        # Pages hold what users have written: no one else on the host reads them.
        settings.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path, self.home = str(settings.root), os.getpid()
        if self.path not in _OPEN:
            env = lmdb.open(
                self.path,
                map_size=settings.map_bytes,
                max_spare_txns=16,
                max_readers=512,
            )
            _OPEN[self.path] = [env, 0]
        _OPEN[self.path][1] += 1
        self.env = _OPEN[self.path][0]
        self.full, self.failed = lmdb.MapFullError, lmdb.Error

    def run(self, batch):
        if os.getpid() != self.home:
            # LMDB may not be used by a child: its locks are the parent's.
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        if batch.operation is Operation.CLEAR:
            return BatchResult.all(batch, self._clear(batch.keys[0].encode()))
        outcomes = [Outcome.TIMEOUT] * len(batch)
        for row, key in enumerate(batch.keys):
            if time.monotonic() < batch.deadline_s:
                outcomes[row] = self._one(batch, row, key.encode())
        return BatchResult.of(batch, outcomes)

    def _one(self, batch, row, key):  # noqa: PLR0911 - one for each outcome
        if len(key) > self.env.max_key_size():
            return Outcome.REFUSED
        match batch.operation:
            case Operation.PUT:
                try:
                    with self.env.begin(write=True) as txn:
                        # A key that is there keeps its bytes, and is OK.
                        txn.put(key, batch.take(row), overwrite=False)
                except self.full:
                    return Outcome.REFUSED
                except self.failed:
                    return Outcome.ERROR
                return Outcome.OK
            case Operation.DELETE:
                with self.env.begin(write=True) as txn:
                    txn.delete(key)
                return Outcome.OK
            case Operation.EXISTS | Operation.GET:
                with self.env.begin(buffers=True) as txn:
                    found = txn.get(key)
                    if found is None:
                        return Outcome.ABSENT
                    if batch.operation is Operation.EXISTS:
                        return Outcome.OK
                    return batch.land(row, found)
        return Outcome.REFUSED

    def _clear(self, prefix):
        with self.env.begin(write=True) as txn:
            cursor = txn.cursor()
            there = cursor.set_range(prefix)
            while there and cursor.key().startswith(prefix):
                there = cursor.delete()
        return Outcome.OK

    def close(self):
        if os.getpid() != self.home:
            return
        _OPEN[self.path][1] -= 1
        if not _OPEN[self.path][1]:
            del _OPEN[self.path]
            self.env.close()
