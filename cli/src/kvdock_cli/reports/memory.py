"""What `kvdock route --pages` says of the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock import HostBudget


@attrs.frozen
class Memory:
    """Pools that fit, and what they fit into.

    Args:
        pages: Pages of every pool with own indices.
        ranks: Processes that share the host.
        nbytes: What all of them take.
        budget: What there is.
    """

    pages: int
    ranks: int
    nbytes: int
    budget: HostBudget

    def __str__(self) -> str:
        """Render as one line."""
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        budget = self.budget
        return (
            f"host memory: {self.pages} pages{each} take {format_bytes(self.nbytes)} "
            f"of {format_bytes(budget.usable_bytes)}; {budget.limited_by} has "
            f"{format_bytes(budget.free_bytes)} left, of which "
            f"{format_bytes(budget.reserve_bytes)} are kept in reserve"
        )

    def as_data(self) -> dict[str, object]:
        """Describe it as data."""
        budget = self.budget
        return {
            "pages": self.pages,
            "ranks": self.ranks,
            "bytes": self.nbytes,
            "usable_bytes": budget.usable_bytes,
            "free_bytes": budget.free_bytes,
            "reserve_bytes": budget.reserve_bytes,
            "limited_by": budget.limited_by,
        }
