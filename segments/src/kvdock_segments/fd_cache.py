"""A cache of open files of pages, bounded by the limit of descriptors."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from kvdock_segments.paths import OUT_OF_FILES

if TYPE_CHECKING:
    from kvdock_segments.io import IOEngine, Token
    from kvdock_segments.segment import Segment


_MOST = 256
_SHARE = 16  # of the descriptors that the process may have; it has many pools


def _most_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft < 0 else min(_MOST, soft // _SHARE)


@attrs.define
class _Open:
    token: Token
    uses: int = 0
    stale: bool = False


class FdCache:
    """Tokens of an I/O engine by segment; the least recently used is closed first.

    Args:
        engine: Opens and closes the files.
        most: Maximum number of files that stay open beyond those in use; derived
            from the process's limit of descriptors by default.
    """

    def __init__(self, engine: IOEngine, most: int | None = None) -> None:
        self._engine = engine
        self._most = _most_open() if most is None else most
        self._open: OrderedDict[Segment, _Open] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, segment: Segment) -> Token:
        """Return a segment's token, valid until `release`."""
        with self._lock:
            entry = self._open.get(segment)
            if entry is None:
                token = self._open_file(segment)
                entry = self._open[segment] = _Open(token)
            self._open.move_to_end(segment)
            entry.uses += 1
            return entry.token

    def name_of(self, token: Token) -> str:
        """Return the name of an open file; "" if it is not open."""
        with self._lock:
            found = (one for one, entry in self._open.items() if entry.token is token)
            segment = next(found, None)
        return segment.name.data if segment else ""

    def _open_file(self, segment: Segment) -> Token:
        name, folder = segment.name.data, segment.folder
        try:
            return self._engine.open_file(name, folder, create=False)
        except OSError as error:
            if error.errno not in OUT_OF_FILES or not self._close_idle(0):
                raise
        return self._engine.open_file(name, folder, create=False)

    def release(self, segments: Iterable[Segment]) -> None:
        """End the use of tokens that `hold` returned."""
        with self._lock:
            for segment in segments:
                entry = self._open[segment]
                entry.uses -= 1
                if entry.stale and not entry.uses:
                    self._close(segment)
            if len(self._open) > self._most:
                self._close_idle(self._most)

    def close_idle(self) -> int:
        """Close all files that are not in use; return how many."""
        with self._lock:
            return self._close_idle(0)

    def _close_idle(self, most: int) -> int:
        closed = 0
        for segment, entry in list(self._open.items()):
            if len(self._open) <= most:
                break
            if not entry.uses:
                self._close(segment)
                closed += 1
        return closed

    def _close(self, segment: Segment) -> None:
        self._engine.close_file(self._open.pop(segment).token)

    def keep_only(self, segments: set[Segment]) -> None:
        """Close the files of segments that are gone."""
        with self._lock:
            for segment, entry in list(self._open.items()):
                if segment not in segments:
                    self._give_up(segment, entry)

    def reopen(self, segment: Segment) -> None:
        """Close a segment's file once it is not in use, so that it is reopened."""
        with self._lock:
            entry = self._open.get(segment)
            if entry:
                self._give_up(segment, entry)

    def _give_up(self, segment: Segment, entry: _Open) -> None:
        entry.stale = True
        if not entry.uses:
            self._close(segment)

    def __len__(self) -> int:
        """Return the number of open files."""
        return len(self._open)

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for entry in self._open.values():
                self._engine.close_file(entry.token)
            self._open.clear()

    def close_after_fork(self) -> None:
        """Close inherited descriptors in a forked child."""
        # A thread of the parent may have held the lock.
        self._lock = threading.Lock()
        self.close()
