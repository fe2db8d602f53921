"""A pytest plugin: vLLM's tests of its offloading connector run kvdock's.

Their `RequestRunner` has vLLM's real scheduler, a connector whose manager is a mock,
and a worker that notes transfers. Here the scheduler has kvdock's connector, with
vLLM's real manager and kvdock's tier on files. The tests choose what is stored, and
find what is there. What they drop from the device is dropped from host memory.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
from at_once import AtOnce
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    LookupResult,
    PrepareStoreOutput,
    ScheduleEndContext,
)

import kvdock_vllm.tier
from kvdock_vllm.connector import EXTRA, KvdockConnector, LayersOfAWorker
from kvdock_vllm.identity import layers_of

MODEL = Path("facebook", "opt-125m")
MODEL.mkdir(parents=True, exist_ok=True)
DESCRIPTION = {"model_type": "opt", "architectures": ["OPTForCausalLM"]}
(MODEL / "config.json").write_text(json.dumps(DESCRIPTION))

kvdock_vllm.tier.KvdockTier = AtOnce  # type: ignore[misc]


def theirs() -> Any:
    """Return the module of their harness."""
    return import_module("tests.v1.kv_connector.unit.offloading_connector.utils")


def noted(keys: Any) -> Any:
    """Return where pages are as the noting worker wants it."""
    return theirs().MockLoadStoreSpec(keys)


class PrepareStore(MagicMock):
    """Stores the pages that a test has chosen."""

    def __call__(self, keys: Any, req_context: Any) -> PrepareStoreOutput | None:
        chosen = super().__call__(keys, req_context)
        if chosen is None:
            return None
        made = self.real(chosen.keys_to_store, req_context)
        if made is None:
            return None
        stored = made.keys_to_store
        return PrepareStoreOutput(stored, noted(stored), made.evicted_keys)


class Lookup(MagicMock):
    """Finds what is there, whatever a test wants to be found."""

    def __call__(self, key: Any, req_context: Any) -> LookupResult:
        super().__call__(key, req_context)
        found: LookupResult = self.real(key, req_context)
        return found


class Truthful(OffloadingConnectorScheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's, which looks up what is there as well."""

    _maximal_prefix_lookup = property(
        lambda self: partial(OffloadingConnectorScheduler._maximal_prefix_lookup, self),
        lambda *_: None,
    )


class Connector(KvdockConnector):
    """kvdock's connector with the settings of vLLM's."""

    folder: ClassVar[Path]
    made: ClassVar[list[Connector]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = copy.copy(vllm_config.kv_transfer_config)
        given = getattr(transfer, EXTRA)
        block = vllm_config.cache_config.block_size
        settings = {
            "plugin": "file",
            "root": str(self.folder / str(len(self.made))),
            "free_space": "1 MiB",
            "host_memory": "4 MiB",
            "revision": "none",
            "blocks_per_chunk": given.get("block_size", block) // block,
            "offload_prompt_only": given["offload_prompt_only"],
            "enable_kv_events": given["self_describing_kv_events"],
        }
        setattr(transfer, EXTRA, settings)
        config = copy.copy(vllm_config)
        config.kv_transfer_config = transfer
        Path(settings["root"]).mkdir(mode=0o700)
        super().__init__(config, role, kv_cache_config)
        report = LayersOfAWorker(layers_of(config, kv_cache_config))
        self.set_xfer_handshake_metadata_pp_aware({(0, 0): report})
        self.made.append(self)
        self.real = real = self.connector_scheduler.manager
        manager = MagicMock(wraps=real)
        manager.primary_tier = real.primary_tier
        manager.lookup = Lookup()
        manager.lookup.real = real.lookup
        manager.on_new_request.side_effect = real.on_new_request
        manager.prepare_load.side_effect = self.prepare_load
        manager.prepare_store = PrepareStore(return_value=None)
        manager.prepare_store.real = real.prepare_store
        self.connector_scheduler.manager = manager
        self.connector_scheduler.__class__ = Truthful

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        self.real.prepare_load(keys, req_context)
        return noted(keys)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        """Load from storage within the step, as the tests expect."""
        found = super().get_num_new_matched_tokens(request, computed)
        if found[0] is None:
            self.real.on_schedule_end(ScheduleEndContext([], ()))
            found = super().get_num_new_matched_tokens(request, computed)
        return found


def reset(self: Any, *given: Any, **more: Any) -> bool:
    """Empty host memory too, so that pages come from storage."""
    if not self.connector.connector_scheduler._jobs:
        self.connector.reset_cache()
    return bool(RESET(self, *given, **more))


RESET, Scheduler.reset_prefix_cache = Scheduler.reset_prefix_cache, reset
KVConnectorFactory._registry["OffloadingConnector"] = lambda: Connector


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of vLLM's own functions."""
    items[:] = [
        one
        for one in items
        if isinstance(one, pytest.Function) and "request_runner" in one.fixturenames
    ]


@pytest.fixture
def request_runner(tmp_path: Path) -> Iterator[Any]:
    """Return their runner; close what its connectors have opened."""
    Connector.folder = tmp_path
    yield theirs().RequestRunner
    while Connector.made:
        one = Connector.made.pop()
        one.shutdown()
        assert one._memory is not None, "a decision about loads has failed"
