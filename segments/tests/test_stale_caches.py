"""A host whose file system caches what it once saw: it costs hits and never bytes.

Shared file systems answer `stat` and `read` from caches: 3FS keeps attributes for
30 s and reads files other than O_DIRECT through the page cache. Here one of two
hosts sees each file as it was when it first looked, until its caches expire.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvdock import native
from kvdock.batch import Outcome
from kvdock_segments import WriterLiveness, ownership

OpenDepot = Callable[..., Any]
PAGES = 20
ROUNDS = 40
SMALL = {
    "liveness": WriterLiveness.TIMEOUT,
    "quota": 12 * 10 * 8192,
    "segment_bytes": 10 * 8192,
}


REAL = {name: getattr(os, name) for name in ("fstat", "stat", "pread")}
WRITES = {name: getattr(os, name) for name in ("pwrite", "pwritev")}


class CachingHost:
    """Looks at files through caches that are filled at first sight.

    Args:
        monkeypatch: Puts the caches in front of the system calls.
        content: Cache what files hold as well, and not their attributes alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, content: bool) -> None:
        self._monkeypatch = monkeypatch
        self._calls: dict[str, Any] = {"fstat": self._fstat, "stat": self._stat}
        if content:
            self._calls |= {"pread": self._pread, "preadv": self._preadv}
            self._calls |= {name: partial(self._write, name) for name in WRITES}
        self.expire()

    def expire(self) -> None:
        self._attributes: dict[int, os.stat_result] = {}
        self._names: dict[tuple[int, Any], os.stat_result] = {}
        self._bytes: dict[int, bytes] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Do what follows on this host."""
        with self._monkeypatch.context() as patch:
            # Compiled code would look at the files past the caches.
            patch.setattr(native, "library", lambda: None)
            for name, call in self._calls.items():
                patch.setattr(os, name, call)
            yield

    def _fstat(self, fd: int) -> os.stat_result:
        status = REAL["fstat"](fd)
        return self._attributes.setdefault(status.st_ino, status)

    def _stat(self, path: Any, *, dir_fd: int | None = None, **more: Any) -> Any:
        folder = 0 if dir_fd is None else REAL["fstat"](dir_fd).st_ino
        if (folder, path) not in self._names:  # what is missing is looked up each time
            status = REAL["stat"](path, dir_fd=dir_fd, **more)
            known = self._attributes.setdefault(status.st_ino, status)
            self._names[folder, path] = known
        return self._names[folder, path]

    def _held(self, fd: int) -> bytes:
        status = REAL["fstat"](fd)
        if status.st_ino not in self._bytes:
            self._bytes[status.st_ino] = REAL["pread"](fd, status.st_size, 0)
        return self._bytes[status.st_ino]

    def _pread(self, fd: int, nbytes: int, at: int) -> bytes:
        return self._held(fd)[at : at + nbytes]

    def _preadv(self, fd: int, views: list[memoryview], at: int) -> int:
        raw = self._held(fd)[at:]
        done = 0
        for view in views:
            part = raw[done : done + len(view)]
            np.frombuffer(view, np.uint8)[: len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)
        return done

    def _write(self, name: str, fd: int, data: Any, at: int) -> int:
        # A host sees its own writes.
        self._bytes.pop(REAL["fstat"](fd).st_ino, None)
        done: int = WRITES[name](fd, data, at)
        return done


@pytest.mark.parametrize("content", [False, True], ids=["attributes", "bytes"])
def test_what_a_cache_hides_is_a_miss_until_it_expires(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, *, content: bool
) -> None:
    writer = open_depot(**SMALL)
    host = CachingHost(monkeypatch, content=content)
    writer.put(range(PAGES))
    with host.looking():
        reader = open_depot(**SMALL)
        assert reader.get(range(PAGES)) == [Outcome.OK] * PAGES
        for start in range(PAGES, 20 * PAGES, PAGES):
            writer.request(range(start, start + PAGES))
            # The depot compares the bytes of every page that is OK.
            reader.get(range(PAGES))
            reader.get(range(start, start + PAGES))
    fresh = [n for n in range(20 * PAGES) if writer.there([n])[0]]
    assert writer.store.counts["segments_recycled"]
    host.expire()
    with host.looking():
        assert reader.get(fresh) == [Outcome.OK] * len(fresh)


@pytest.mark.parametrize("content", [False, True], ids=["attributes", "bytes"])
@pytest.mark.parametrize("takes_over", [False, True], ids=["waits", "takes over"])
def test_hosts_with_caches_that_write_and_evict_serve_no_wrong_page(
    open_depot: OpenDepot,
    monkeypatch: pytest.MonkeyPatch,
    *,
    content: bool,
    takes_over: bool,
) -> None:
    if takes_over:
        # A host that sees no commit takes the writer of a segment for dead.
        monkeypatch.setattr(ownership, "SILENCE_S", 0.0)
    rng = np.random.default_rng(7)
    hosts = [CachingHost(monkeypatch, content=content) for _ in range(2)]
    depots = []
    for host in hosts:
        with host.looking():
            depots.append(open_depot(**SMALL))
    hits = 0
    for number in range(ROUNDS):
        at = number % 2
        if rng.random() < 0.2:
            hosts[at].expire()
        with hosts[at].looking():
            # A key always has the same bytes.
            depots[at].put(np.unique(rng.integers(0, 150, PAGES)).tolist())
            if rng.random() < 0.1:
                depots[at].clear()
            found = depots[at].get(rng.integers(0, 150, PAGES).tolist())
            hits += found.count(Outcome.OK)
    assert hits > ROUNDS
    last = open_depot(**SMALL)
    assert Outcome.OK in last.get(range(150))
