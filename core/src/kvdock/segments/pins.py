"""Pages that must stay: a shared lock on the segment of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvdock.segments import ownership
from kvdock.segments.segment import open_index, read_record

if TYPE_CHECKING:
    from kvdock.segments.catalog import Catalog, LookupResult


class Pins:
    """Keys that are pinned, and one locked descriptor for each segment.

    Args:
        catalogue: Where keys are.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalogue = catalog
        self._segment_of: dict[str, int] = {}
        self._locked: dict[int, int] = {}  # descriptor by segment
        self._uses: Counter[int] = Counter()

    def __contains__(self, key: str) -> bool:
        """Return whether a key is pinned."""
        return key in self._segment_of

    def add(self, key: str) -> None:
        """Pin a key, if it is there."""
        catalog = self._catalogue
        with catalog.lock, suppress(OSError):
            found = catalog.lookup([key])
            if key not in self and len(found.there):
                identity = int(found.records["segment"][0])
                if self._lock(found, identity):
                    self._segment_of[key] = identity
                    self._uses[identity] += 1

    def _lock(self, found: LookupResult, identity: int) -> bool:
        """Lock a segment; return whether the record is still in it."""
        slot, record = int(found.records["slot"][0]), found.records.tobytes()
        fd = self._locked.get(identity, -1)
        if fd >= 0:
            return read_record(fd, slot) == record
        segment = self._catalogue.segments.get(int(found.numbers[0]))
        if segment is None:
            return False
        fd = open_index(segment.folder, str(segment.name))
        # Locked first, then looked: it may have gone in between.
        if ownership.pin(fd) and read_record(fd, slot) == record:
            self._locked[identity] = fd
            return True
        os.close(fd)
        return False

    def remove(self, keys: Iterable[str]) -> None:
        """Let pages be evicted again."""
        with self._catalogue.lock:
            for key in keys:
                identity = self._segment_of.pop(key, None)
                if identity is None:
                    continue
                self._uses[identity] -= 1
                if not self._uses[identity]:
                    del self._uses[identity]
                    ownership.release(self._locked.pop(identity))

    def close(self) -> None:
        """Let go of everything."""
        self.remove(list(self._segment_of))

    def abandon(self) -> None:
        """Close what a forked child inherited; its parent keeps its pins."""
        for fd in self._locked.values():
            os.close(fd)
        self._locked.clear()
