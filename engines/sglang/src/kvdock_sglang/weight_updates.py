"""Weights that are replaced while an engine runs, as reinforcement learning does.

SGLang empties its own cache then, and does not inform its storage, where requests to
the new weights would find the pages of the old ones. So storage answers with misses
from the first request to the scheduler on that may replace weights, until it is
attached again with another revision. Every kind of request may that is not listed in
`weight_updates.toml` as harmless, those of a newer release too.

Source: SGLang 0.5.23, `managers/scheduler.py:init_request_dispatcher`.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.errors import KvdockError
from kvdock.identity import Exemption, read_exemptions

log = logging.getLogger("kvdock.sglang")

DISPATCH = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"

_CHECKS = frozenset({"snapshot", "compare", "checksum"})
_EXPORTS = frozenset({"save_remote_model", "save_sharded_model"})
_SETTINGS = frozenset(
    {
        "pp_max_micro_batch_size",
        "speculative_accept_threshold_single",
        "speculative_accept_threshold_acc",
        "dspark_force_budget_frac",
        "dspark_clear_info_records",
    }
)


def _weights_stay(request: Any) -> bool:  # noqa: ANN401 - the engine's object
    """Return whether memory that is released comes back with the same weights."""
    tags = getattr(request, "tags", None)
    if tags and "weights" not in tags:
        return True
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - the engine

    given = get_server_args().resolved_dict()
    copies = ["enable_weights_cpu_backup"]
    if given.get("speculative_algorithm"):
        copies.append("enable_draft_weights_cpu_backup")
    # Without a saver of memory nothing is released.
    return not given.get("enable_memory_saver") or all(map(given.get, copies))


_CONDITIONS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "a check that only reads": lambda request: (
            getattr(request, "action", None) in _CHECKS
        ),
        "an export": lambda request: getattr(request, "method", None) in _EXPORTS,
        "a known setting": lambda request: _SETTINGS.issuperset(
            getattr(request, "server_args", "?")
        ),
        "the weights stay": _weights_stay,
    }
)

HARMLESS: Mapping[str, Exemption] = MappingProxyType(
    {
        one.field: one
        for one in read_exemptions(
            tomllib.loads(
                Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
            )["harmless"],
            conditions=_CONDITIONS,
        )
    }
)
"""Kinds of requests that leave the weights as they are, some on a condition."""

_attached: set[str] = set()
"""Revisions that storage was attached with since the last update."""

_replaced: set[str] = set()
"""Revisions whose weights this process has no longer; of all its attachments."""


@attrs.frozen(eq=False)
class Watched:
    """SGLang's dispatcher of requests, of which those are noted that end storage."""

    dispatcher: Any

    def __call__(self, request: object) -> object:
        """Pass a request on; on the scheduler's thread."""
        if not is_harmless(request):
            note_update(type(request).__name__)
        return self.dispatcher(request)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the engine's object
        """Be the dispatcher in everything else."""
        return getattr(self.dispatcher, name)


def watch_requests(original: Callable[..., Any], scheduler: Any) -> None:  # noqa: ANN401 - the engine's object
    """Watch the requests of a scheduler from its start on."""
    original(scheduler)
    scheduler._request_dispatcher = Watched(scheduler._request_dispatcher)  # noqa: SLF001 - SGLang has no other door


def is_harmless(request: object) -> bool:
    """Return whether a request is known to leave the weights as they are."""
    exemption = HARMLESS.get(type(request).__name__)
    if exemption is None:
        return False
    return exemption.holds is None or exemption.holds(request)


def note_update(kind: str) -> None:
    """Note that this process may have other weights from now on."""
    if "" not in _replaced or _attached:
        log.warning("%s may replace the weights, so storage ends with it", kind)
    # What the files of the model say was true until now.
    _replaced.update(_attached, {""})
    _attached.clear()


def begin(revision: str) -> None:
    """Note the revision that storage is attached with."""
    if revision in _replaced:
        named = f"revision {revision!r}" if revision else "its files"
        raise KvdockError(
            f"the weights were replaced at run time and are not those of {named}",
            fix='Attach storage with another "revision" after each update.',
        )
    _attached.add(revision)


def replaced(revision: str) -> bool:
    """Return whether the weights that storage was attached with are replaced."""
    return revision in _replaced


def check(revision: str) -> None:
    """Reject a storage call for weights that have been replaced.

    Raises:
        KvdockError: If they were.
    """
    if replaced(revision):
        raise KvdockError(
            "the weights were replaced at run time, since storage was attached",
            fix='Detach it and attach it with another "revision".',
        )
