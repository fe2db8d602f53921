"""Weights that are replaced while an engine runs, as reinforcement learning does.

SGLang empties its own cache then, and does not inform its storage, where requests to
the new weights would find the pages of the old ones. So storage answers with misses
from the first update on, until it is attached again with another revision.

Source: SGLang 0.5.23, `managers/scheduler_components/weight_updater.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from collections.abc import Callable

_UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager"
)
UPDATES = tuple(
    f"{_UPDATER}.{name}"
    for name in (
        "begin_weight_update",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
    )
)
"""Functions that replace weights, or begin to."""

_attached: set[str] = set()
"""Revisions that storage was attached with since the last update."""

_replaced: set[str] = set()
"""Revisions whose weights this process has no longer; of all its attachments."""


def note_update(original: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - passed on
    """Note that this process has other weights from now on."""
    # What the files of the model say was true until now.
    _replaced.update(_attached, {""})
    _attached.clear()
    return original(*args)


def begin(revision: str) -> None:
    """Note the revision that storage is attached with."""
    if revision in _replaced:
        named = f"revision {revision!r}" if revision else "its files"
        raise KvdockError(
            f"the weights were replaced at run time and are not those of {named}",
            fix='Attach storage with another "revision" after each update.',
        )
    _attached.add(revision)


def check(revision: str) -> None:
    """Reject a storage call for weights that have been replaced.

    Raises:
        KvdockError: If they were.
    """
    if revision in _replaced:
        raise KvdockError(
            "the weights were replaced at run time, since storage was attached",
            fix='Detach it and attach it with another "revision".',
        )
