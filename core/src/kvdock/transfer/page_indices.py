"""Where the pages of a call lie, and moving those of one pool."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from kvdock.batch import (Operation, Outcome, Outcomes)
from kvdock.errors import RegionError, nearest
from kvdock.keys import check_hashes
from kvdock.transfer.result import NO_PAGE

if TYPE_CHECKING:
    from kvdock.hits import Bools
    from kvdock.region import Int64s
    from kvdock.transfer.attached_pool import Berth


def placed(
    berths: Mapping[str, Berth],
    known: Collection[str],
    hashes: Sequence[str],
    pages: Mapping[str, npt.ArrayLike],
) -> dict[str, Int64s]:
    """Return each pool's page index for each position, checked.

    Args:
        berths: The attached pools.
        known: All pools of the plan; pages of one that is not attached are
            taken and left alone.
        hashes: The n page hashes.
        pages: Pool name to int64 (n,).

    Raises:
        RegionError: If a pool is unknown, is given no pages, or is given
            pages outside of its memory.
    """
    check_hashes(hashes)
    for name in pages:
        if name not in berths and name not in known:
            raise RegionError(
                f"pages are given for {name!r}, which is not attached",
                fix=nearest(name, berths),
            )
    places: dict[str, Int64s] = {}
    for name, berth in berths.items():
        source = berth.pool.indices_from
        given = pages.get(name, pages.get(source) if source else None)
        if given is None:
            if berth.pool.physical:
                raise RegionError(f"no pages are given for pool {name!r}")
            given = np.zeros(len(hashes), np.int64)
        own = indices(name, given, len(hashes))
        if berth.pool.physical:
            berth.region.check(own[own != NO_PAGE])
        places[name] = own
    return places


def indices(pool: str, given: npt.ArrayLike, count: int) -> Int64s:
    """Return page indices as int64 (count,), `NO_PAGE` among them.

    Raises:
        RegionError: If they are not one whole number for each hash.
    """
    try:
        found = np.asarray(given)
    except ValueError as error:  # rows of rows
        raise RegionError(f"pool {pool!r}: page indices are one row") from error
    if found.shape != (count,):
        raise RegionError(
            f"pool {pool!r}: {found.shape} page indices for {count} hashes"
        )
    if count and found.dtype.kind not in "iu":
        # A mask, or a division that was not rounded, would name other pages.
        raise RegionError(
            f"pool {pool!r}: page indices are whole numbers, not {found.dtype}"
        )
    return found.astype(np.int64, copy=False)


def named_again(pages: Int64s) -> Bools:
    """Return at which positions a page stands that an earlier one has, bool (n,).

    A load can fill it for one of them only: the first, as within one batch.
    """
    again = cast("Bools", pages != NO_PAGE)
    again[np.unique(pages, return_index=True)[1]] = False
    return again


def move(
    operation: Operation,
    berth: Berth,
    hashes: Sequence[str],
    where: tuple[Int64s, Int64s],
    deadline_s: float,
) -> Outcomes:
    """Move the chosen positions of one pool; an outcome per position.

    Args:
        operation: PUT or GET.
        berth: The pool.
        hashes: All page hashes.
        where: int64 (n,), the page of each position, and the positions.
        deadline_s: Until when, on `time.monotonic()`'s clock.
    """
    own, chosen = where
    outcomes = np.full(len(hashes), Outcome.ABSENT, np.uint8)
    if not len(chosen):
        return outcomes
    if operation is Operation.PUT and not berth.writes:
        # Another rank stores these very bytes.
        outcomes[chosen] = Outcome.OK
        return outcomes
    if len(chosen) == len(hashes):
        return berth.move(operation, hashes, own, deadline_s)
    names = [hashes[at] for at in chosen.tolist()]
    outcomes[chosen] = berth.move(operation, names, own[chosen], deadline_s)
    return outcomes
