"""Weights that are replaced while an engine runs, as reinforcement learning does.

SGLang empties its own cache then, and does not inform its storage, where requests to
the new weights would find the pages of the old ones. So storage answers with misses
from the first request to the scheduler on that may replace weights. Every kind of
request may that is not listed in `weight_updates.toml` as harmless, those of a newer
release too. After those that it lists as updates the next generation of weights can be
opened, see `generations.py`; any other ends storage until it is attached again with
another revision.

Source: SGLang 0.5.23, `managers/scheduler.py:init_request_dispatcher`,
`managers/scheduler_components/weight_updater.py`.
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
from kvdock.strict_enum import StrictEnum

log = logging.getLogger("kvdock.sglang")

RECORD = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.record_weight_version_after_update"
)
"""Called on every rank after each load of weights that has succeeded there."""

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

_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

HARMLESS: Mapping[str, Exemption] = MappingProxyType(
    {
        one.field: one
        for one in read_exemptions(_LISTED["harmless"], conditions=_CONDITIONS)
    }
)
"""Kinds of requests that leave the weights as they are, some on a condition."""


class UpdateKind(StrictEnum):
    """The effect of a request on the weights."""

    LOADS = "loads"
    """Replaces some or all; SGLang says on each rank whether that succeeded."""
    NAMES = "names"
    """Says which version they are, and may begin or end several loads."""
    SPOILS = "spoils"
    """Leaves weights that have no name until others are loaded."""


UPDATES: Mapping[str, UpdateKind] = MappingProxyType(
    {
        name: UpdateKind(table["kind"])
        for table in _LISTED["update"]
        for name in table["fields"].split()
    }
)
"""Kinds of requests after which the weights are known, as far as they were told."""


@attrs.define
class Weights:
    """The state of this process's weights; used by the scheduler's thread.

    Other threads read `count` alone.

    Args:
        count: Grows with each request that may have replaced them, and with each
            generation: a storage call counts that began under the present one.
        opened_at: The count when storage was attached, or a generation was tried.
        ended: Whether a request came after which none can be opened.
        loads: Loads since then.
        done: Those of them that succeeded on this rank.
        version: The last version that a caller gave them since then, or "".
        files: Where the only load took them from, or "".
        whole: Whether all loads before had succeeded.
        attached: Revisions that storage was attached with.
        replaced: Revisions whose weights this process has no longer.
    """

    count: int = 0
    opened_at: int = 0
    ended: bool = False
    loads: int = 0
    done: int = 0
    version: str = ""
    files: str = ""
    whole: bool = True
    attached: set[str] = attrs.field(factory=set)
    replaced: set[str] = attrs.field(factory=set)

    @property
    def changed(self) -> bool:
        """Return whether a generation is to be opened for them."""
        return self.opened_at != self.count and not self.ended

    @property
    def named(self) -> bool:
        """Return whether this rank has the weights of `version`."""
        whole = self.loads == self.done if self.loads else self.whole
        return bool(self.version) and whole

    def begin(self, kind: UpdateKind | None, request: object) -> None:
        """Note a request that may replace the weights; None for an unknown one."""
        # One of an unknown kind may go on replacing them after its answer.
        self.ended |= kind is None
        # What the files of the model say was true until now.
        self.replaced |= self.attached | {""}
        self.count += 1
        if kind is UpdateKind.LOADS:
            self.loads += 1
            path = str(getattr(request, "model_path", "") or "")
            self.files = path if self.loads == 1 else ""
        elif kind is UpdateKind.NAMES:
            self.version = str(getattr(request, "new_version", "") or self.version)
        else:
            self.loads = self.done = 0
            self.version, self.files, self.whole = "", "", False

    def succeeded(self, version: str | None) -> None:
        """Note that a load succeeded on this rank."""
        self.done += 1
        self.version = version or self.version

    def settle(self) -> None:
        """Note that a generation is opened for them, or could not be."""
        # What SGLang began before belongs to no generation.
        self.count += 1
        self.opened_at = self.count
        self.whole = self.loads == self.done if self.loads else self.whole
        self.loads = self.done = 0
        self.version = self.files = ""


WEIGHTS = Weights()
"""The weights of this process, whatever is attached."""


@attrs.frozen(eq=False)
class Watched:
    """SGLang's dispatcher of requests, of which those are noted that end storage."""

    dispatcher: Any

    def __call__(self, request: object) -> object:
        """Pass a request on; on the scheduler's thread."""
        if not is_harmless(request):
            note_update(request)
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


def note_update(request: object) -> None:
    """Note that this process may have other weights from now on."""
    name = type(request).__name__
    kind = UPDATES.get(name)
    if WEIGHTS.opened_at == WEIGHTS.count:
        until = "a generation is opened for them" if kind else "it is attached again"
        level = logging.INFO if kind else logging.WARNING
        log.log(
            level, "%s may replace the weights: storage pauses until %s", name, until
        )
    WEIGHTS.begin(kind, request)


def note_success(
    original: Callable[..., Any],
    manager: Any,  # noqa: ANN401 - SGLang's
    weight_version: str | None,
) -> Any:  # noqa: ANN401 - what it returns
    """Note that this rank has loaded what a request brought."""
    answer = original(manager, weight_version)
    WEIGHTS.succeeded(weight_version)
    return answer


def begin(revision: str) -> int:
    """Note the revision that storage is attached with; return the weights' count.

    Raises:
        KvdockError: If its weights were replaced.
    """
    if revision in WEIGHTS.replaced:
        named = f"revision {revision!r}" if revision else "its files"
        raise KvdockError(
            f"the weights were replaced at run time and are not those of {named}",
            fix='Attach storage with another "revision" after each update.',
        )
    WEIGHTS.attached.add(revision)
    if WEIGHTS.opened_at != WEIGHTS.count:
        WEIGHTS.settle()
        WEIGHTS.ended, WEIGHTS.whole = False, True
    return WEIGHTS.count


def check(count: int) -> None:
    """Reject a storage call for weights that have been replaced.

    Raises:
        KvdockError: If they were.
    """
    if count != WEIGHTS.count:
        raise KvdockError(
            "the weights were replaced at run time, and no generation is open",
            fix="Empty SGLang's cache after the update, or see its log for why none "
            "was opened.",
        )


def check_steps(run: str, stages: int) -> None:
    """Reject a run's name where storage ends at an update, and log it without one.

    Called when storage is attached.

    Raises:
        KvdockError: If ranks that are not at the same step are to share generations.
    """
    apart = steps_apart(stages)
    if apart and run:
        raise KvdockError(
            f"generations of run {run!r} cannot be opened: {apart}",
            fix='Leave "generations" out. Storage then ends when weights are replaced, '
            'until it is attached again with another "revision".',
        )
    if apart:
        log.info("storage ends when weights are replaced: %s", apart)


def steps_apart(stages: int) -> str:
    """Return why the ranks take their steps apart, or ""."""
    from sglang.srt.layers.dp_attention import (  # noqa: PLC0415 - the engine
        is_dp_attention_enabled,
    )

    if stages > 1:
        return "pipeline stages are not at the same step"
    if is_dp_attention_enabled():
        return "ranks of DP attention are not at the same step"
    return ""
