"""Validate and describe the answers of a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock.batch import BatchResult, MemoryHold, validate_result
from kvdock.errors import AttachError, KvdockError
from kvdock.throttled_log import describe_error

if TYPE_CHECKING:
    from kvdock.batch import Batch
    from kvdock.resilience.executor import RunResult


@attrs.frozen(eq=False)
class CallResult:
    """The result of a batch.

    Args:
        result: One outcome per key, whatever happened.
        abandoned: Whether the call was abandoned; its `late` then runs when
            it ends.
    """

    result: BatchResult
    abandoned: bool = False


def as_kvdock_error(error: Exception) -> KvdockError:
    """Return a plugin's error, wrapped if it is not a KvdockError."""
    if isinstance(error, KvdockError):
        return error
    return AttachError(describe_error(error), fix="See `kvdock doctor`.")


def validated(batch: Batch, ran: RunResult) -> BatchResult | Exception:
    """Return a plugin's valid answer, or the error to record."""
    if ran.error is not None:
        return ran.error
    try:
        return validate_result(batch, ran.value)
    except Exception as error:  # noqa: BLE001 - plugin code
        return error


def hold_of(answer: object) -> MemoryHold | None:
    """Return the hold of an answer that is not validated yet."""
    hold = answer.hold if isinstance(answer, BatchResult) else None
    return hold if isinstance(hold, MemoryHold) else None
