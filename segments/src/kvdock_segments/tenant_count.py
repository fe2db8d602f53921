"""Bytes of the pages of each tenant in one index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.config.tenants import NO_TENANT

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock_segments.format import Records


@attrs.define(eq=False)
class TenantCount:
    """Bytes of the pages of each tenant in one index; kept up under its lock.

    Args:
        listed: Numbers of the listed tenants.
        salted: Number of the tenant that the namespace's salt belongs to.
    """

    listed: Collection[int]
    salted: int = NO_TENANT
    nbytes: Counter[int] = attrs.field(factory=Counter)

    def owners(self, numbers: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Return whose room pages take: a listed tenant's, or `NO_TENANT`.

        Args:
            numbers: (n,), as the pages' records have them.
        """
        whose = np.where(numbers == NO_TENANT, self.salted, numbers).astype(np.int64)
        return np.where(np.isin(whose, list(self.listed)), whose, NO_TENANT)

    def add(self, records: Records, object_bytes: Int64Array) -> None:
        """Count pages that came."""
        for number, nbytes in sums(self.owners(records["tenant"]), object_bytes):
            self.nbytes[number] += nbytes

    def remove(self, records: Records, object_bytes: Int64Array) -> None:
        """Count pages no longer that went."""
        for number, nbytes in sums(self.owners(records["tenant"]), object_bytes):
            self.nbytes[number] -= nbytes


def sums(whose: Int64Array, nbytes: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield each tenant of `whose` and the sum of its bytes."""
    for number in np.unique(whose).tolist():
        yield number, int(nbytes[whose == number].sum())
