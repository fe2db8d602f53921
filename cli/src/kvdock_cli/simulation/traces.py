"""Traces: the requests that engines were asked for, as numbers of blocks."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock import Operation
from kvdock.journal import read_journal
from kvdock_cli.output import UsageProblem

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.journal import JournalRecord

_MOST_BLOCKS = 1 << 24
_LATEST_MS = 1e16
_NOT_A_REQUEST = (
    AttributeError,
    TypeError,
    ValueError,
    KeyError,
    OverflowError,
    RecursionError,
)
_LATEST = 1 << 20
"""Pages of late requests to which stored pages are put down that name no request."""


@attrs.frozen
class Trace:
    """Requests to serve, and what they add up to.

    Args:
        requests: Blocks of each in the order of the prefix, as numbers from 0 to
            `unique` - 1.
        seconds: From the first request to the last one; 0 where that is not known.
    """

    name: str
    requests: Sequence[Int64Array]
    unique: int
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        name: str,
        requests: Sequence[Int64Array],
        times: Collection[float] = (),
    ) -> Trace:
        """Number the blocks of requests; those without any are left out.

        `times` are those of the requests, in seconds, where they are known.
        """
        kept = [request for request in requests if len(request)]
        ends = np.cumsum([len(request) for request in kept])
        every = np.concatenate([np.zeros(0, np.int64), *kept])
        kinds, numbers = np.unique(every, return_inverse=True)
        parts = np.split(numbers.reshape(-1).astype(np.int64), ends[:-1])
        seconds = max(times, default=0.0) - min(times, default=0.0)
        return cls(name, parts if kept else [], len(kinds), seconds)

    @property
    def blocks(self) -> int:
        """Blocks of all requests together."""
        return sum(map(len, self.requests))


def read_trace(path: Path, most: int = 0) -> Trace:
    """Read the trace of a serving system, or a journal of kvdock.

    Args:
        path: JSON lines with `hash_ids`, the blocks of a request in order, or with
            `ranges`: the first and the last block of each run of neighbours; maybe
            with `timestamp`, in milliseconds. Or the folder of a journal.
        most: Requests to read; 0 for all.
    """
    if path.is_dir():
        return _of_journal(path, most)
    requests: list[Int64Array] = []
    times: list[float] = []
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as lines:
            for at, line in enumerate(lines, 1):
                if most and len(requests) >= most:
                    break
                try:
                    row = json.loads(line)
                    requests.append(_blocks_of(row))
                    times.append(_seconds(row.get("timestamp", 0)))
                except _NOT_A_REQUEST as error:
                    raise UsageProblem(
                        f"line {at} of {path} is no request of a trace",
                        fix='Each is JSON with "hash_ids" or "ranges" of at most '
                        f"{_MOST_BLOCKS:,} blocks.",
                    ) from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageProblem(f"{path} cannot be read: {why}") from error
    return Trace.of(path.stem, requests, times)


def _blocks_of(row: Mapping[str, Any]) -> Int64Array:
    if "ranges" in row:
        if sum(last - first for first, last in row["ranges"]) > _MOST_BLOCKS:
            raise ValueError("so many blocks are no prompt")
        runs = [np.arange(first, last + 1) for first, last in row["ranges"]]
        return np.concatenate([np.zeros(0, np.int64), *runs]).astype(np.int64)
    return np.array(row["hash_ids"], np.int64).reshape(-1)


def _seconds(milliseconds: float) -> float:
    """Return a time in seconds; raise ValueError if it is none."""
    if not abs(milliseconds) < _LATEST_MS:
        raise ValueError("not a time")
    return float(milliseconds) / 1000


def _of_journal(path: Path, most: int) -> Trace:
    """Read the requests of a journal: the pages of their first pool, in order."""
    numbers: dict[str, int] = {}
    requests: dict[str, dict[int, None]] = {}
    times: dict[str, float] = {}
    owner: dict[int, str] = {}
    for record in _of_first_pool(read_journal(path)):
        pages = [numbers.setdefault(one, len(numbers)) for one, _ in record.each()]
        request = record.request
        if not request and record.operation == Operation.PUT:
            # Pages are written back for no request: they were computed for the last
            # one that missed them, or that ended before them.
            request = next((owner[one] for one in pages if one in owner), "")
        request = request or f"{record.rank} {record.at_s}"
        if request not in requests and most and len(requests) >= most:
            continue
        times.setdefault(request, record.at_s)
        requests.setdefault(request, {}).update(dict.fromkeys(pages))
        owner.update(dict.fromkeys(pages, request))
        while len(owner) > _LATEST:
            del owner[next(iter(owner))]
    # Each process writes a file of its own, and they are read one after the other.
    found = [
        np.array([*requests[one]], np.int64)
        for one in sorted(times, key=times.__getitem__)
    ]
    return Trace.of(path.name or "journal", found, times.values())


def _of_first_pool(records: Iterator[JournalRecord]) -> Iterator[JournalRecord]:
    """Yield lookups and stores of the pool that each namespace is asked for first.

    Of one rank, since each asks for its part of the same pages.
    """
    first: dict[str, tuple[str, str]] = {}
    for one in records:
        if one.operation not in (Operation.EXISTS, Operation.PUT) or not one.pages:
            continue
        whose = first.setdefault(one.namespace, (one.pool, one.rank))
        if whose == (one.pool, one.rank):
            yield one
