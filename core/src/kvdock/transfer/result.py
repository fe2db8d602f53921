"""The result of a call on an attachment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvdock.tiers.placed import NO_PAGE

__all__ = ("NO_PAGE", "TransferResult")

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray


@attrs.frozen(eq=False)
class TransferResult:
    """The outcomes of one call on an attachment.

    Args:
        pages: Length of the prefix that is complete: stored or loaded by all
            required pools.
        outcomes: Pool name to uint8 (n,), an `Outcome` for each position; a
            position without a page is ABSENT.
        nbytes: Pool name to bytes moved for pages that are OK.
        page_indices: Pool name to int64 (n,), the requested page of each
            position; includes the pages of a trailing window.
        retained: For a store with a promise or an expiry: uint8 (n,), a
            `RetentionAnswer` for each position; None without.
    """

    pages: int
    outcomes: Mapping[str, OutcomeArray] = attrs.field(repr=False)
    nbytes: Mapping[str, int]
    page_indices: Mapping[str, Int64Array] = attrs.field(factory=dict, repr=False)
    retained: OutcomeArray | None = attrs.field(default=None, repr=False)
