"""How many bytes of a namespace are promised, for whom and until when.

One count over all processes and pools of a namespace. What a record says is what is
kept; the ledger says how much that may be. It changes with the records, under one lock:
before them where a promise is given, after them where one ends, so a process that is
killed in between leaves too much counted and never too little. The next process that
opens the namespace alone counts the records again.

A promise counts until its page is evicted, deleted, or promised anew, also after its
time: clocks jump, and what a clock that is set back brings to life again is in the
count. The file has one page, so it is written whole or not:

    0    8  magic and version
    8    8  xxh3 of what follows
    16  16  a time, seconds since 1970; a tenant; the bytes promised; and so on
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from kvdock_segments.index_file import open_index, read_contents
from kvdock_segments.namespace_files import PROMISES
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import closing_fd, open_file
from kvdock_segments.walk import index_names, pools

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock_segments.format import Records

_MAGIC = b"KVPROM\0\2"
_HEAD = 16
_ROW = np.dtype([("until", "<u4"), ("tenant", "<u4"), ("nbytes", "<i8")])
_MOST_ROWS = 250
_MIXED = 0
"""The tenant of a row that counts for several, of more than there are rows for."""
_WAIT_S = 0.1
_PAUSE_S = 0.001

_Rows = npt.NDArray[np.void]
Shares = Callable[[npt.NDArray[np.uint32], int, Counter[int]], npt.NDArray[np.bool_]]


@attrs.frozen
class Ledger:
    """The promises of one namespace.

    Args:
        liveness: How living writers are detected. Where kernel locks do not reach all
            of them nothing is promised, because nothing would bound it.
    """

    namespace_fd: int
    liveness: WriterLiveness

    def promise(
        self,
        each_bytes: int,
        before: Records,
        until: Int64Array,
        most_bytes: int,
        shares: Shares | None = None,
    ) -> BoolArray:
        """Count promises; return which of them hold, bool (n,).

        Args:
            each_bytes: Bytes of a page.
            before: (n,), the records of the pages: a page that has a promise takes no
                more of the budget.
            until: int64 (n,), until when each is to be promised, seconds since 1970.
            most_bytes: The budget; the first pages have it first.
            shares: Say which pages tenants' own budgets have room for, given their
                tenants, `each_bytes` and what is promised to each tenant here.
        """
        may = np.zeros(len(before), np.bool_)
        if self.liveness is not WriterLiveness.LOCKS or not len(before):
            return may
        with suppress(OSError), self._opened() as fd:
            rows = self._read(fd)
            fresh = before["keep_until"] <= int(time.time())
            may[:] = True
            if shares is not None:
                tenants = before["tenant"][fresh]
                may[fresh] = shares(tenants, each_bytes, _by_tenant(rows))
            left = most_bytes - sum(_by_tenant(rows).values())
            cost = np.cumsum(np.where(may & fresh, each_bytes, 0))
            may &= ~fresh | (cost <= left)
            if may.any():
                after = before[may].copy()
                after["keep_until"] = until[may]
                _write(fd, _changed(rows, each_bytes, before[may], after))
            return may
        return np.zeros(len(before), np.bool_)

    def move(self, each_bytes: int, gone: Records, come: Records) -> None:
        """Count the promises of some records no longer, and those of others."""
        if not (gone["keep_until"].any() or come["keep_until"].any()):
            return
        with suppress(OSError), self._opened() as fd:
            _write(fd, _changed(self._read(fd), each_bytes, gone, come))

    def give_back(self, each_bytes: int, gone: Records) -> None:
        """Count the promises of pages no longer that are gone."""
        self.move(each_bytes, gone, gone[:0])

    def promised_bytes(self) -> int:
        """Return the bytes that are promised now."""
        return sum(self.by_tenant().values())

    def by_tenant(self) -> Counter[int]:
        """Return the bytes that are promised now, by the number in the records."""
        with suppress(OSError), self._opened(os.O_RDONLY) as fd:
            return _by_tenant(self._read(fd))
        return Counter()

    def recount(self) -> None:
        """Count the records again, unless another store has the namespace open."""
        try:
            with suppress(OSError):  # another one has
                fcntl.flock(self.namespace_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with self._opened(os.O_RDWR) as fd:
                    _write(fd, self._recounted())
        finally:
            # Also after a refusal, which takes away the lock that there was.
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self.namespace_fd, fcntl.LOCK_SH)

    @contextmanager
    def _opened(self, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
        """Open the file with its lock, which no living process holds for long."""
        with closing_fd(open_file(self.namespace_fd, PROMISES, flags)) as fd:
            end_s = time.monotonic() + _WAIT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(_PAUSE_S)
            yield fd

    def _read(self, fd: int) -> _Rows:
        raw = os.pread(fd, _HEAD + _ROW.itemsize * _MOST_ROWS, 0)
        body = raw[_HEAD:]
        whole = raw[:8] == _MAGIC and raw[8:_HEAD] == _check(body)
        if whole and len(body) % _ROW.itemsize == 0:
            return np.frombuffer(body, _ROW)
        return self._recounted() if raw else np.zeros(0, _ROW)

    def _recounted(self) -> _Rows:
        """Count what the records say."""
        rows = np.zeros(0, _ROW)
        for _, folder in pools(self.namespace_fd, OSError):
            for name in index_names(folder):
                with (
                    suppress(OSError),
                    closing_fd(open_index(folder, str(name))) as fd,
                ):
                    contents = read_contents(fd, name, 2**62)
                    if contents is not None:
                        come = contents.records
                        rows = _changed(rows, contents.slot_bytes, come[:0], come)
        return rows


def _by_tenant(rows: _Rows) -> Counter[int]:
    found: Counter[int] = Counter()
    for _, tenant, nbytes in rows[rows["until"] > int(time.time())].tolist():
        found[tenant] += nbytes
    return found


def _grouped(records: Records, each_bytes: int) -> list[tuple[int, int, int]]:
    """Return times, tenants and bytes of the promises of some records."""
    pairs = records[["keep_until", "tenant"]][records["keep_until"] > 0]
    found = Counter(map(tuple, pairs.tolist()))
    return [(*pair, pages * each_bytes) for pair, pages in found.items()]


def _changed(rows: _Rows, each_bytes: int, gone: Records, come: Records) -> _Rows:
    """Return rows without the promises of some records, and with those of others."""
    added = np.array(_grouped(come, each_bytes), _ROW)
    rows = np.concatenate([rows, added])
    for until, tenant, nbytes in _grouped(gone, each_bytes):
        left = nbytes
        # The row of a later time may have been merged with that of this one.
        later = (rows["until"] >= until) & np.isin(rows["tenant"], [tenant, _MIXED])
        choice = np.flatnonzero(later)
        for at in choice[np.argsort(rows["until"][choice], kind="stable")].tolist():
            taken = min(left, int(rows["nbytes"][at]))
            rows["nbytes"][at] -= taken
            left -= taken
    return rows


def _check(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body)


def _write(fd: int, rows: _Rows) -> None:
    sums: Counter[tuple[int, int]] = Counter()
    for until, tenant, nbytes in rows[rows["nbytes"] > 0].tolist():
        sums[tenant, until] += nbytes
    while len(sums) > _MOST_ROWS:
        # Of two neighbours the later time counts for both.
        ordered = sorted(sums)
        _, one, other = min(
            (after[1] - before[1] if before[0] == after[0] else 2**33, before, after)
            for before, after in pairwise(ordered)
        )
        later = max(one, other, key=lambda key: key[1])
        nbytes = sums.pop(one) + sums.pop(other)
        sums[later if one[0] == other[0] else (_MIXED, later[1])] += nbytes
    rows = np.array([(key[1], key[0], sums[key]) for key in sorted(sums)], _ROW)
    body = rows.tobytes()
    raw = _MAGIC + _check(body) + body
    if os.pwrite(fd, raw, 0) != len(raw):
        raise OSError(errno.ENOSPC, "the count of promises could not be written whole")
    os.ftruncate(fd, len(raw))
