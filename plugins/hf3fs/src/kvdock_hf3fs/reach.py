"""Requests whose memory is partly out of reach: only the rest of them is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvdock_segments import UNREGISTERED, IOResult

if TYPE_CHECKING:
    from kvdock.geometry import AddressRanges
    from kvdock_segments import IORequest


def move_within(
    memory: AddressRanges, request: IORequest, move: Callable[[IORequest], IOResult]
) -> IOResult:
    """Move the objects that lie in the memory with every piece."""
    if memory.covers(request.addresses, request.sizes):
        return move(request)
    known = memory.covered_rows(request.addresses, request.sizes)
    result = IOResult.of(len(request))
    result.errors[~known] = UNREGISTERED
    rows = np.flatnonzero(known)
    if len(rows):
        part = move(request.rows(rows))
        result.errors[rows] = part.errors
        result.nbytes[rows] = part.nbytes
        result.checksums[rows] = part.checksums
    return result
