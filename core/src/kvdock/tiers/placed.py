"""What a chain needs of a placement; `kvdock.transfer.placement` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.batch import Operation
    from kvdock.config.tiers import Tier
    from kvdock.retention import CallTimes, Retention, StoredTimes


NO_PAGE = -1
"""Page index of a position for which a pool has no page."""


class RowMover(Protocol):
    """One tier of a pool, with rows of the core's memory instead of pages."""

    @property
    def backend(self) -> str:
        """The name of the backend."""

    @property
    def batch_pages(self) -> int:
        """Most pages of a batch."""

    def find(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Return which pages are stored."""

    def rejects(self, operation: Operation, hashes: Sequence[str]) -> bool:
        """Return whether a call would be rejected."""

    def ready_to_store(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Wait for the deletion of wrong objects; return which pages have none."""

    def move_rows(
        self,
        operation: Operation,
        hashes: Sequence[str],
        rows: Int64Array,
        deadline_s: float,
        times: CallTimes | None = None,
    ) -> OutcomeArray:
        """Store pages from rows, or load them to rows."""

    def retain(
        self, hashes: Sequence[str], asked: Retention, deadline_s: float
    ) -> OutcomeArray:
        """Promise stored pages, or let them expire; a `RetentionAnswer` for each."""

    def times(self, hashes: Sequence[str], deadline_s: float) -> StoredTimes:
        """Return which pages are stored now, and with what times."""

    def delete(self, hashes: Sequence[str], deadline_s: float) -> OutcomeArray:
        """Delete pages; an outcome for each."""


class Placed(Protocol):
    """One tier of a pool, with the pages of the engine."""

    @property
    def backend(self) -> str:
        """The name of the backend."""

    @property
    def tier(self) -> Tier | None:
        """What comes into it when; None for each page at once, and no promotion."""

    @property
    def loads(self) -> RowMover | None:
        """The same tier, for loads into rows of the core."""

    @property
    def copies(self) -> RowMover | None:
        """The same tier, for copies."""

    def until(self, deadline_s: float) -> float:
        """Return its own deadline within that of a call."""

    def find(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Return which pages are stored."""
