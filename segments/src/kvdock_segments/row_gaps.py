"""Free rows of the index: ranges that deleted segments have left."""

from __future__ import annotations

import bisect


class RowGaps:
    """Ranges of free rows. Not thread-safe."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []  # first row and number, ascending

    def take(self, slots: int) -> int | None:
        """Return the first of `slots` free rows of the smallest range with so many.

        Returns:
            None if no range has so many.
        """
        gaps = [(size, first) for first, size in self.ranges if size >= slots]
        if not gaps:
            return None
        size, first = min(gaps)
        self.ranges.remove((first, size))
        if size > slots:
            bisect.insort(self.ranges, (first + slots, size - slots))
        return first

    def give_back(self, first: int, slots: int) -> None:
        """Add a free range and merge it with adjacent ones: segments differ in size."""
        at = bisect.bisect(self.ranges, (first, slots))
        if at < len(self.ranges) and self.ranges[at][0] == first + slots:
            slots += self.ranges.pop(at)[1]
        if at and sum(self.ranges[at - 1]) == first:
            first, before = self.ranges.pop(at - 1)
            slots += before
        bisect.insort(self.ranges, (first, slots))
