"""The class that vLLM loads as its KV connector.

Everything between the device and host memory is vLLM's own OffloadingConnector:
when to look up, which groups need which pages, pinning, eviction of the host's
copy, preemption, async scheduling, ranks. kvdock is the tier behind it. This class
passes on what a tier is not given: the identity of the pages.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    get_offloading_group_ids,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from kvdock import ThrottledLog
from kvdock_vllm.adapters import AdapterFiles
from kvdock_vllm.engine_api import check_version
from kvdock_vllm.identity import identify
from kvdock_vllm.pools import Handover
from kvdock_vllm.rows import check_layout, expected_layout
from kvdock_vllm.settings import collect

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

EXTRA = "kv_connector_extra_config"


def expanded(config: VllmConfig, **handover: object) -> VllmConfig:
    """Return a copy of vLLM's configuration, with settings for its offloading.

    Args:
        config: vLLM's configuration, with kvdock's settings.
        handover: For the tier alone.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None  # noqa: S101 - vLLM has chosen this class by it
    settings = collect(getattr(transfer, EXTRA))
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


class KvdockConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's offloading connector, with kvdock behind its host memory."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        check_version()
        transfer = vllm_config.kv_transfer_config
        settings = collect(getattr(transfer, EXTRA))
        self._adapters = AdapterFiles(ThrottledLog())
        handover: dict[str, Any] = {}
        if role == KVConnectorRole.SCHEDULER:
            identity = identify(vllm_config, kv_cache_config, settings.own)
            handover["handover"] = Handover(settings, identity, self._adapters)
        super().__init__(expanded(vllm_config, **handover), role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self._check_layout_at_registration(kv_cache_config)

    def _check_layout_at_registration(self, kv_cache_config: KVCacheConfig) -> None:
        """Compare the device tensors with the layout that the scheduler assumes."""
        worker = self.connector_worker
        expected = expected_layout(
            kv_cache_config, get_offloading_group_ids(kv_cache_config)
        )
        initialize = worker._init_worker  # noqa: SLF001 - the only place that has both

        def checked(caches: Any) -> None:  # noqa: ANN401 - vLLM's CanonicalKVCaches
            check_layout(expected, caches)
            initialize(caches)

        worker._init_worker = checked  # noqa: SLF001 - same

    def on_new_request(self, request: Request) -> None:
        """Identify the request's adapter, then do what vLLM does."""
        self._adapters.begin(request.request_id, request.lora_request)
        super().on_new_request(request)

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
