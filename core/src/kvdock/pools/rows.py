"""Rows of host memory that hold more than one page of one pool.

An engine may keep the pages of several pools, or those of several ranks, side by
side in rows of one piece of memory, with gaps in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import attrs

from kvdock.errors import PoolError
from kvdock.pools.validators import positive
from kvdock.validators import as_int, as_int_tuple, is_int

Piece = tuple[int, int]
"""Where bytes begin, and how many they are."""


def _pieces(value: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(as_int_tuple(piece) for piece in value)


@attrs.frozen(kw_only=True)
class RowLayout:
    """The bytes of a row that are the page of a pool.

    Args:
        row_bytes: From one row to the next.
        pieces: (offset, bytes) in the slot of one rank, in the order in which
            they are stored.
        slots: Offset of each rank's slot in the row, in rank order. The page
            has the pieces of all slots.
    """

    row_bytes: int = attrs.field(converter=as_int, validator=positive)
    pieces: tuple[Piece, ...] = attrs.field(converter=_pieces)
    slots: tuple[int, ...] = attrs.field(default=(0,), converter=as_int_tuple)

    def __attrs_post_init__(self) -> None:
        """Reject pieces that overlap, or lie outside of the row."""
        for piece in cast("tuple[tuple[int, ...], ...]", self.pieces):
            if len(piece) != 2 or not all(map(is_int, piece)) or piece[1] < 1:  # noqa: PLR2004 - a pair
                raise PoolError(f"a piece of a row is (offset, bytes), not {piece}")
        if not self.pieces or not self.slots or not all(map(is_int, self.slots)):
            raise PoolError(
                f"a row has {len(self.pieces)} pieces in {len(self.slots)} slots",
                fix="Give at least one piece and one slot, as whole numbers.",
            )
        end = 0
        for start, nbytes in sorted(self._placed()):
            if start < end or start + nbytes > self.row_bytes:
                where = "overlaps another" if 0 <= start < end else "is not inside"
                raise PoolError(
                    f"a piece of {nbytes} bytes at {start} {where} of a row of "
                    f"{self.row_bytes} bytes"
                )
            end = start + nbytes

    def _placed(self) -> list[Piece]:
        return [(slot + at, size) for slot in self.slots for at, size in self.pieces]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without the gaps."""
        return len(self.slots) * sum(size for _, size in self.pieces)

    @property
    def runs(self) -> tuple[Piece, ...]:
        """(offset in the row, bytes), with pieces joined that touch."""
        found: list[Piece] = []
        for start, nbytes in self._placed():
            if found and sum(found[-1]) == start:
                start, nbytes = found[-1][0], found.pop()[1] + nbytes  # noqa: PLW2901 - grown
            found.append((start, nbytes))
        return tuple(found)
