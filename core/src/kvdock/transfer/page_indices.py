"""Resolve and validate page indices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from kvdock.batch import Outcome
from kvdock.errors import RegionError, did_you_mean
from kvdock.transfer.result import NO_PAGE

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.geometry.region import Region
    from kvdock.pools.spec import PoolSpec


_TIMEOUT, _ABSENT = int(Outcome.TIMEOUT), int(Outcome.ABSENT)
_LAST_PAGE = np.iinfo(np.int64).max


def resolve_page_indices(
    attached: Sequence[tuple[PoolSpec, Region]],
    known: Collection[str],
    hashes: Sequence[str],
    pages: Mapping[str, npt.ArrayLike],
) -> dict[str, Int64Array]:
    """Return each pool's page index for each position, checked.

    Args:
        attached: The pools, each with the engine's memory.
        known: Names of all pools of the plan; pages of one that is not attached are
            ignored.
        hashes: The n page hashes, checked.
        pages: Pool name to int64 (n,).

    Raises:
        RegionError: If a pool is unknown, is given no pages, or is given
            pages outside of its memory.
    """
    for name in pages:
        if name not in known:
            raise RegionError(
                f"pages are given for {name!r}, which is not attached",
                fix=did_you_mean(name, [pool.name for pool, _ in attached]),
            )
    resolved: dict[str, Int64Array] = {}
    # Pools that share indices share one array: it is checked once for each size.
    fits: dict[int, int] = {}
    for pool, region in attached:
        name, source = pool.name, pool.indices_from
        given = pages.get(name, pages.get(source) if source else None)
        if given is None:
            if region.physical:
                raise RegionError(f"no pages are given for pool {name!r}")
            given = np.zeros(len(hashes), np.int64)
        own = as_page_indices(name, given, len(hashes))
        if region.physical and fits.get(id(own), region.pages + 1) > region.pages:
            check_pages(region, own)
            fits[id(own)] = region.pages
        resolved[name] = own
    return resolved


def check_pages(region: Region, pages: Int64Array) -> None:
    """Check that page indices lie in a pool's memory, `NO_PAGE` apart.

    Raises:
        RegionError: If one does not.
    """
    # `min` alone says whether there is any NO_PAGE: the usual batch has none.
    usual = len(pages) and pages.min() >= 0
    region.check(pages if usual else pages[pages != NO_PAGE])


def as_page_indices(pool: str, given: npt.ArrayLike, count: int) -> Int64Array:
    """Return page indices as int64 (count,), `NO_PAGE` among them.

    Raises:
        RegionError: If they are not one whole number for each hash.
    """
    try:
        found = np.asarray(given)
    except (TypeError, ValueError) as error:  # rows of rows, memory of a device
        raise RegionError(
            f"pool {pool!r}: page indices must have one dimension"
        ) from error
    if found.dtype == np.int64 and found.shape == (count,):
        return found
    if found.shape != (count,):
        raise RegionError(
            f"pool {pool!r}: {found.shape} page indices for {count} hashes"
        )
    if count and found.dtype.kind not in "iu":
        # A mask, or a division that was not rounded, would name other pages.
        raise RegionError(
            f"pool {pool!r}: page indices are whole numbers, not {found.dtype}"
        )
    if found.dtype == np.uint64 and count and found.max() > _LAST_PAGE:
        # As int64 it would be negative, and the largest of all is NO_PAGE.
        raise RegionError(
            f"pool {pool!r}: page index {found.max()} is outside of its memory"
        )
    return found.astype(np.int64, copy=False)


def duplicate_positions(pages: Int64Array) -> BoolArray:
    """Return the positions that repeat the page of an earlier one, bool (n,).

    A load can fill it for one of them only: the first, as within one batch.
    """
    repeated = cast("BoolArray", pages != NO_PAGE)
    repeated[np.unique(pages, return_index=True)[1]] = False
    return repeated


def unanswered(pages: Int64Array) -> tuple[Int64Array, OutcomeArray]:
    """Return the positions that have a page, and the outcomes of all without an answer.

    Those are TIMEOUT, and ABSENT where there is no page.
    """
    outcomes = np.empty(len(pages), np.uint8)
    outcomes.fill(_TIMEOUT)
    if len(pages) and pages.min() >= 0:
        return np.arange(len(pages)), outcomes
    outcomes[pages == NO_PAGE] = _ABSENT
    return np.flatnonzero(pages != NO_PAGE), outcomes
