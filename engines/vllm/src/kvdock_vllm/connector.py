"""The class that vLLM loads as its KV connector.

Everything between the device and host memory is vLLM's own OffloadingConnector:
when to look up, which groups need which pages, pinning, eviction of the host's
copy, preemption, async scheduling, ranks. kvdock is the tier behind it. This class
passes on what a tier is not given: the identity of the pages.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from kvdock.events import GenerationOpened
from kvdock.throttled_log import ThrottledLog
from kvdock_vllm.adapters import AdapterFiles, watch_loads
from kvdock_vllm.engine_api import check_version
from kvdock_vllm.generations import Generations
from kvdock_vllm.host_memory import HostMemory
from kvdock_vllm.identity import Layers, identify, layers_of, layout_of_rows
from kvdock_vllm.logs import show_in_vllms_log
from kvdock_vllm.lookups import Lookups, reset_limit
from kvdock_vllm.pays import LoadDecisions, work_of
from kvdock_vllm.pools import Handover
from kvdock_vllm.restorable import check_states, unrestorable
from kvdock_vllm.rows import check_layout
from kvdock_vllm.settings import collect
from kvdock_vllm.weights import watch_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvdock_vllm.tier import KvdockTier, Opened

log = logging.getLogger("kvdock.vllm")

EXTRA = "kv_connector_extra_config"


def expanded(config: VllmConfig, **handover: object) -> VllmConfig:
    """Return a copy of vLLM's configuration, with settings for its offloading."""
    transfer = config.kv_transfer_config
    assert transfer is not None  # noqa: S101 - vLLM has chosen this class by it
    settings = collect(getattr(transfer, EXTRA), lenient=True)
    tier = {"type": "KvdockTier", "module_path": "kvdock_vllm.tier", **handover}
    theirs = copy.copy(transfer)
    setattr(
        theirs,
        EXTRA,
        {
            **settings.own.upstream,
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [tier],
        },
    )
    copied = copy.copy(config)
    copied.kv_transfer_config = theirs
    return copied


@dataclass
class LayersOfAWorker(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What one worker has made of its layers; sent to the scheduler once."""

    layers: Layers


def connectors_of(engine: Any) -> list[KvdockConnector]:  # noqa: ANN401 - vLLM's EngineCore
    """Return the connectors of an engine that are kvdock's, alone or among others."""
    connector = engine.scheduler.connector
    among = getattr(connector, "_connectors", [connector])
    return [one for one in among if isinstance(one, KvdockConnector)]


def _block_hashes(request: Request, every: int, tokens: Sequence[int]) -> list[bytes]:
    """Return the hashes of another prompt's pages, with this one's salt and adapter.

    `request` is a copy, which becomes the other one.
    """
    if request._block_hasher is None:  # noqa: SLF001 - vLLM hashes requests alone
        return []
    request.block_hashes, request.mm_features = [], []
    request._all_token_ids = request.all_token_ids = list(tokens)  # noqa: SLF001 - same
    found: list[bytes] = request._block_hasher(request)  # noqa: SLF001 - same
    return found[every - 1 :: every]


class KvdockConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's offloading connector, with kvdock behind its host memory."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        show_in_vllms_log()
        check_version()
        transfer = vllm_config.kv_transfer_config
        settings = collect(getattr(transfer, EXTRA), lenient=True)
        handover: dict[str, Any] = {}
        if role == KVConnectorRole.SCHEDULER:
            from vllm.v1.engine.core import (  # noqa: PLC0415 - it imports connectors
                EngineCore,
            )

            identity = identify(vllm_config, kv_cache_config, settings.own)
            seen = watch_loads(EngineCore, connectors_of)
            watch_weights(
                EngineCore,
                lambda core: [one.generations for one in connectors_of(core)],
            )
            self.generations = Generations(self, settings, vllm_config)
            self._adapters = AdapterFiles(
                ThrottledLog(), identity.adapters, loads_are_seen=seen
            )
            self._handover = Handover(settings, identity, self._adapters)
            handover["handover"] = self._handover
            check_states(identity.groups, settings.own.blocks_per_chunk)
        super().__init__(expanded(vllm_config, **handover), role, kv_cache_config)
        self._failures = ThrottledLog(log)
        if role == KVConnectorRole.SCHEDULER:
            self._never_restored = unrestorable(self.connector_scheduler)
            self._loads: LoadDecisions | None = None
            self._memory: HostMemory | None = None
        if role == KVConnectorRole.WORKER:
            self._check_layout_at_registration(
                kv_cache_config, canonical=settings.own.canonical_layout
            )

    def _check_layout_at_registration(
        self, kv_cache_config: KVCacheConfig, *, canonical: bool
    ) -> None:
        """Compare the device tensors with the layout that the scheduler assumes."""
        worker = self.connector_worker
        expected = layout_of_rows(
            self._vllm_config, kv_cache_config, canonical=canonical
        )
        initialize = worker._init_worker  # noqa: SLF001 - the only place that has both

        def checked(caches: Any) -> None:  # noqa: ANN401 - vLLM's CanonicalKVCaches
            check_layout(expected, caches, canonical=canonical)
            initialize(caches)

        worker._init_worker = checked  # noqa: SLF001 - same

    def get_handshake_metadata(self) -> LayersOfAWorker:
        """Report what this worker has made of its layers."""
        return LayersOfAWorker(layers_of(self._vllm_config, self._kv_cache_config))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Attach storage, now that the workers have reported; before any request."""
        reports = [
            one.layers for one in metadata.values() if isinstance(one, LayersOfAWorker)
        ]
        if self._never_restored:
            log.warning("%s", self._never_restored)
        try:
            self.tier.check_rows(self.connector_scheduler, self._step_tokens())
            self.tier.open(self._handover.identity.with_layers(reports))
            self._decide_on_loads(self.tier)
            self._store_before_loads()
        except BaseException:
            # The engine ends, and its host memory with it.
            self.shutdown()
            raise

    def _decide_on_loads(self, tier: KvdockTier) -> None:
        """Prepare what is asked before vLLM loads anything for a request."""
        self._lookups = Lookups(self.connector_scheduler, tier)
        if tier.attached.pays.decides:
            self._loads = LoadDecisions(self._lookups, tier)
        self._memory = HostMemory(
            self._lookups, tier.row_count, self._patience_s, tier.attached.notify
        )

    def _store_before_loads(self) -> None:
        """Let loads that wait for the device make room for what is stored."""
        manager = self.connector_scheduler.manager
        prepare_store = manager.prepare_store

        def stored_first(*given: Any) -> Any:  # noqa: ANN401 - vLLM's PrepareStoreOutput
            memory = self._memory
            if memory is not None:
                memory.pin()
            made = prepare_store(*given)
            if made is None and memory is not None and memory.unpin_idle():
                made = prepare_store(*given)
            return made

        manager.prepare_store = stored_first

    def _patience_s(self, start: int, tokens: int) -> float:
        """Return how long a load waits at most: as long as computing it would take."""
        curve = self._handover.tier.attached.pays.compute
        if self._loads is None or not curve.known:
            return self._handover.settings.own.wait_for_host_memory
        begin_s, rest_s = curve.seconds(
            np.array([start, start + tokens]), start + tokens
        )
        return float(begin_s - rest_s)

    def _step_tokens(self) -> int:
        """Return how many tokens of one request a step computes, at most."""
        config = self._vllm_config
        longest = int(config.model_config.max_model_len)
        return min(int(config.scheduler_config.max_num_batched_tokens), longest)

    def adapter_loading(self, adapter: Any) -> None:  # noqa: ANN401 - vLLM's LoRARequest
        """Read the files of an adapter, before vLLM does."""
        self._adapters.loading(adapter)

    @property
    def tier(self) -> KvdockTier:
        """What stands behind host memory."""
        tier: KvdockTier = self._handover.tier
        return tier

    def turn_off(self) -> None:
        """Store and find nothing from now on, and forget what is in host memory."""
        self._adapters.stop()
        self.reset_cache()
        self.tier.forget_lookups()

    def turn_on(self, opened: Opened, kind: str) -> None:
        """Store and find the pages of another generation, private or of a run."""
        self.tier.take(opened)
        self.tier.forget_lookups()
        self._decide_on_loads(self.tier)
        self._adapters.go_on()
        self.tier.attached.notify(GenerationOpened(kind=kind))

    def on_new_request(self, request: Request) -> None:
        """Identify adapter and tenant, do what vLLM does, then follow its hints."""
        self._adapters.begin(request.request_id, request.lora_request)
        listed = self._handover.settings.core.tenants
        if tenant := listed.number_of_salt(request.cache_salt or ""):
            self._handover.tenants[request.request_id] = tenant
        super().on_new_request(request)
        try:
            self._follow_hints(request)
        except Exception as error:  # noqa: BLE001 - a hint never costs a request
            self._failures.warning("hints", "hints are not followed", error)

    def _follow_hints(self, request: Request) -> None:
        """Pass the tier the hints of a request, and the pages of its prompt."""
        if request.kv_hints is None and not request.kv_transfer_params:
            return
        status = self.connector_scheduler._req_status[request.request_id]  # noqa: SLF001 - vLLM tells a tier of pages when it stores them
        status.update_offload_keys()  # of the prompt; vLLM would do it at its lookup
        keys = [key for group in status.group_states for key in group.offload_keys]
        hashes_of = partial(_block_hashes, copy.copy(request), self._chunk_hashes())
        self._handover.tier.take_hints(status.req_context, keys, hashes_of)

    def _chunk_hashes(self) -> int:
        """Return how many block hashes a page has; its last one names it."""
        groups = self.connector_scheduler.config.kv_group_configs
        return int(groups[0].hashes_per_chunk)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what vLLM loads, once it is decided how much, and there are rows."""
        try:
            if not self._may_load(request, num_computed_tokens):
                return None, False
        except Exception:
            log.exception("no more decisions about loads: one has failed")
            self._loads = None
            self._forget_memory()
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if self._memory is not None and found[0] == 0:
            self._memory.load_nothing(request.request_id)
        return found

    def _may_load(self, request: Request, computed: int) -> bool:
        """Limit what vLLM loads for a request; return False while it is to wait."""
        state = self._lookups.state(request)
        if state.transfer_jobs or request.skip_reading_prefix_cache:
            return True
        state.update_offload_keys()
        state.num_locally_computed_tokens = computed
        reset_limit(state)
        most = self._max_loadable_tokens(request, computed)
        return all(
            decider is None or decider.admit(state, most)
            for decider in (self._loads, self._memory)
        )

    def _forget_memory(self) -> None:
        """Let vLLM evict what it wants, from now on."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def update_state_after_alloc(
        self,
        request: Request,
        blocks: Any,  # noqa: ANN401 - vLLM's KVCacheBlocks
        num_external_tokens: int,
    ) -> None:
        """End a decision: its request has what it is going to have."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        for decider in (self._loads, self._memory):
            if decider is not None:
                decider.forget(request.request_id)

    def reset_cache(self) -> bool | None:
        """Empty host memory, and forget who has which of its rows."""
        if self._memory is not None:
            self._memory.reset()
        if self.connector_scheduler._current_batch_jobs_to_flush:  # noqa: SLF001 - vLLM asserts it
            return True  # there was no step since the last time
        emptied: bool | None = super().reset_cache()
        return emptied

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:  # noqa: ANN401 - vLLM's KVConnectorMetadata
        """Note a step, to learn what computing takes and to keep what was loaded."""
        if self._loads is not None and scheduler_output.num_scheduled_tokens:
            self._handover.tier.attached.pays.compute.begin(work_of(scheduler_output))
        made = super().build_connector_meta(scheduler_output)
        if self._memory is not None:
            self._memory.end_step(scheduler_output.finished_req_ids or ())
        return made

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note that a step has ended."""
        if self._loads is not None:
            self._handover.tier.attached.pays.compute.end()
        super().update_connector_output(connector_output)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Declare vLLM's metrics of offloading, with those of the tier."""
        return super().build_prom_metrics(
            expanded(vllm_config), metric_types, labelnames, per_engine_labelvalues
        )
