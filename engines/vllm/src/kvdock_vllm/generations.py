# ruff: noqa: ANN401 - vLLM's own objects
"""Storage goes on after an update of the weights, in a generation of their own.

All of an engine's storage is in the process of its scheduler: workers copy between
device and host memory alone, and each call to them passes there. So one place knows
when weights may change, and ranks have nothing to agree on. Storage is off from before
the first such call until the weights are complete and nothing that others have computed
is left: no block of the device is used or cached, there is no embedding of an image,
and host memory is emptied. That is looked at before each step until it is true.

After a call that has failed the weights are complete when a later update has ended
well: an engine for transfers may go on in the background.

Source: vLLM 0.32.0, `v1/worker/gpu_worker.py:start_weight_update` and below it,
`v1/engine/core.py`, `distributed/weight_transfer/base.py:defers_processing`.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvdock import Dock
from kvdock.former_generations import FormerGenerations
from kvdock.generations import Generation, run_of
from kvdock.identity import weights_in
from kvdock.resilience import run_within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock_vllm.settings import Configuration

log = logging.getLogger("kvdock.vllm")

INIT = "init_weight_transfer_engine"
START = "start_weight_update"
FINISH = "finish_weight_update"
RELOAD = "reload_weights"

UPDATES = frozenset(
    {INIT, START, "start_draft_weight_update", "update_weights", FINISH, RELOAD}
)
"""Calls to all workers after which the weights are known, once an update has ended."""

OPEN_S = 10.0
"""How long a step may take to open a generation."""

_SPARSE = "sparse_nccl"
"""The backend whose updates change weights that have to be right before."""


class Generations:
    """The weights of one engine, and which generation of pages they make.

    On the scheduler's thread.

    Args:
        connector: The KvdockConnector, whose storage is turned off and on.
        config: vLLM's configuration.
    """

    def __init__(
        self,
        connector: Any,
        given: Configuration,
        config: Any,
    ) -> None:
        self._connector = connector
        self._given = given
        self._run = run_of(given.own.generations)
        self._sparse = getattr(config.weight_transfer_config, "backend", "") == _SPARSE
        self._path = str(config.model_config.model)
        self._engine: Any = None
        self._due = False
        self._ended = False
        self._loading = False
        self._renewed = False
        self._whole = True
        self._version = self._files = ""

    def begin(self, engine: Any, call: str, *, ends: bool = False) -> None:
        """Turn storage off: a call begins that may replace weights.

        It `ends` storage if it may go on replacing them after its answer.
        """
        self._watch_steps(engine)
        if ends and not self._ended:
            log.warning(
                "nothing is stored or restored any more: %s may have replaced the "
                "weights. Restart the engine to store again",
                call,
            )
        elif not self._due:
            log.info("storage is off: %s replaces the weights", call)
        self._due = True
        self._ended |= ends
        self._loading |= call != INIT
        self._whole &= call in UPDATES
        self._version = self._files = ""
        self._connector.turn_off()

    def succeeded(self, call: str, given: Mapping[str, Any]) -> None:
        """Note that a call has succeeded in all workers; `given` are its arguments."""
        if call == START:
            self._renewed = not self._sparse
        elif call == FINISH:
            self._whole |= self._renewed
            self._loading = self._renewed = False
        elif call == RELOAD:
            self._loading = False
            if given.get("weights_iterator") is None:
                self._whole = True
                self._files = self._path = str(given.get("weights_path") or self._path)

    def failed(self) -> None:
        """Note that a call has failed in some worker."""
        self._loading, self._whole, self._renewed = True, False, False

    def name(self, version: str) -> None:
        """Note the version of the present weights."""
        self._version = version

    def open_if_ready(self) -> None:
        """Open a generation once none can mix; before each step.

        Never raises: without a generation everything is a miss.
        """
        if not self._due or self._loading or self._ended:
            return
        try:
            if self._engine.is_scheduler_paused() or not is_empty(self._engine):
                return
            self._due = False
            self._open()
        except Exception:
            self._due = False
            log.exception("storage stays off until the next update of the weights")

    def _open(self) -> None:
        tier = self._connector.tier

        def attach() -> tuple[Generation, Any]:
            generation = self._generation()
            self._former.leave((tier.attached,))
            return generation, tier.next_generation(generation.text)

        self._connector.reset_cache()
        deadline_s = time.monotonic() + OPEN_S
        generation, opened = run_within(
            deadline_s, attach, "opening a generation", lambda late: late[1][0].close()
        )
        self._connector.turn_on(opened, "run" if generation.run else "private")
        log.info("storage goes on with generation %s", generation)
        self._former.delete((tier.attached,))

    def _generation(self) -> Generation:
        """Return which generation the weights are; it may read their files."""
        if not (self._run and self._whole and self._version):
            return Generation.private()
        weights = self._files and weights_in(self._files, self._given.own.weights)
        return Generation(run=self._run, version=self._version, weights=weights)

    @cached_property
    def _former(self) -> FormerGenerations:
        given = self._given
        dock = Dock.for_engine(given.used, given)
        return FormerGenerations(self._run, given.own.kept_generations, dock, given)

    def _watch_steps(self, engine: Any) -> None:
        """Look before each step of an engine whose weights may be replaced."""
        if self._engine is not None:
            return
        self._engine = engine
        schedule = engine.scheduler.schedule

        def scheduled(*given: Any, **options: Any) -> Any:
            self.open_if_ready()
            return schedule(*given, **options)

        engine.scheduler.schedule = scheduled


def is_empty(engine: Any) -> bool:
    """Return whether nothing that was computed before is in the device's memory."""
    scheduler = engine.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    pools = {id(one.block_pool): one.block_pool for one in managers}.values()
    return not scheduler.encoder_cache_manager.cached and all(
        # One block is always used, for what is not there.
        pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        and not len(pool.cached_block_hash_to_block)
        for pool in pools
    )
