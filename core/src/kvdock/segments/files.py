"""Open files of pages: kept open while they are used, a bounded number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from kvdock.segments.engine import Engine
    from kvdock.segments.segment import Segment


@attrs.define
class _Open:
    token: int
    uses: int = 0
    stale: bool = False


class OpenFiles:
    """Engine tokens of segments, the least recently used closed first.

    Args:
        engine: Opens and closes the files.
        most: How many stay open beyond those in use.
    """

    def __init__(self, engine: Engine, most: int = 256) -> None:
        self._engine = engine
        self._most = most
        self._open: OrderedDict[Segment, _Open] = OrderedDict()
        self._lock = threading.Lock()

    def hold(self, segment: Segment) -> int:
        """Return a segment's token, valid until `release`.

        Raises:
            OSError: If its file is gone, or cannot be opened.
        """
        with self._lock:
            entry = self._open.get(segment)
            if entry is None:
                token = self._engine.open_file(
                    segment.name.data, segment.folder, create=False
                )
                entry = self._open[segment] = _Open(token)
            self._open.move_to_end(segment)
            entry.uses += 1
            return entry.token

    def release(self, segments: Iterable[Segment]) -> None:
        """End the use of tokens that `hold` returned."""
        with self._lock:
            for segment in segments:
                entry = self._open[segment]
                entry.uses -= 1
                if entry.stale and not entry.uses:
                    self._close(segment)
            if len(self._open) <= self._most:
                return
            for segment, entry in list(self._open.items()):
                if not entry.uses:
                    self._close(segment)
                    if len(self._open) <= self._most:
                        return

    def _close(self, segment: Segment) -> None:
        self._engine.close_file(self._open.pop(segment).token)

    def keep_only(self, segments: set[Segment]) -> None:
        """Close the files of segments that are no more."""
        with self._lock:
            for segment, entry in list(self._open.items()):
                if segment not in segments:
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
