"""The block of a `with` statement, for what is closed at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class ClosedAfterUse:
    """Base of what a `with` statement closes, whatever becomes of its block."""

    __slots__ = ()

    def close(self) -> object:
        """Close it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()
