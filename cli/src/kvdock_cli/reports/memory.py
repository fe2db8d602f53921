"""The output of `kvdock route --pages` about the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.models import HostBudget
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock import PoolSpec, Shard


@attrs.frozen(kw_only=True)
class Memory:
    """Pages that are wanted, and how many there is room for.

    Args:
        ranks: Processes that share the host.
        nbytes: What the wanted ones take, over all processes.
    """

    pages: int
    fit: int
    ranks: int
    nbytes: int
    budget: HostBudget

    @classmethod
    def of(
        cls, pools: Sequence[PoolSpec], shard: Shard, pages: int, ranks: int
    ) -> Memory:
        """Measure the host's memory and divide it among pools."""
        budget = HostBudget.measure()
        return cls(
            pages=pages,
            fit=budget.pages_that_fit(pools, shard, ranks=ranks),
            ranks=ranks,
            nbytes=sum(pool.page_bytes(shard) for pool in pools) * pages * ranks,
            budget=budget,
        )

    @property
    def fits(self) -> bool:
        """Return whether there is room for the wanted pages."""
        return self.pages <= self.fit or not self.nbytes

    def __str__(self) -> str:
        """Render as one line."""
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        budget = self.budget
        wanted = "" if self.fits else f", NOT for {self.pages}"
        return (
            f"host memory has room for {self.fit} pages{each}{wanted}: {self.pages} "
            f"take {format_bytes(self.nbytes)} of {format_bytes(budget.usable_bytes)}; "
            f"{budget.limited_by} has {format_bytes(budget.free_bytes)} left, of which "
            f"{format_bytes(budget.reserve_bytes)} are kept in reserve"
        )

    def as_data(self) -> dict[str, object]:
        """Describe it as data."""
        budget = self.budget
        return {
            "pages": self.pages,
            "fit": self.fit,
            "ranks": self.ranks,
            "bytes": self.nbytes,
            "usable_bytes": budget.usable_bytes,
            "free_bytes": budget.free_bytes,
            "reserve_bytes": budget.reserve_bytes,
            "limited_by": budget.limited_by,
        }
