"""Check kvdock's settings where vLLM's command was typed, before weights load.

vLLM makes a connector when its workers have loaded the model. Its configuration is
complete long before that, in the process that was started, and is checked there.
"""

from __future__ import annotations

import json
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from kvdock import Dock
from kvdock.errors import SettingsError
from kvdock.generations import run_of
from kvdock_vllm.engine_api import check_version
from kvdock_vllm.identity import check_configuration
from kvdock_vllm.named_media import keep_names_apart
from kvdock_vllm.settings import collect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OURS = "KvdockConnector"
_EXACT = frozenset(
    {
        _OURS,
        "ExampleHiddenStatesConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
"""Connectors that load only what this engine has computed, or a peer for it just now.

Others name stored pages by less than what their bytes depend on, keep them smaller with
loss, or fill them with nothing. Source: vLLM 0.33.0, `kv_connector/factory.py`.
"""


def watch_configurations(kind: type[Any]) -> None:
    """Have each configuration of vLLM checked that chooses kvdock's connector."""
    completed = kind.__post_init__
    if hasattr(completed, "of_kvdock"):
        return

    @wraps(completed)
    def complete(self: Any, *args: Any) -> None:  # noqa: ANN401 - vLLM's
        completed(self, *args)
        _check_neighbours(self.kv_transfer_config)
        for settings in _chosen(self.kv_transfer_config):
            from vllm.multimodal.processing.inputs import (  # noqa: PLC0415 - loads much
                ProcessorInputs,
            )

            keep_names_apart(ProcessorInputs)
            _check_settings(json.dumps(settings, default=str))
            if self.model_config is not None:
                check_configuration(self)

    complete.of_kvdock = True  # type: ignore[attr-defined]
    kind.__post_init__ = complete


def _chosen(transfer: Any) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401 - vLLM's KVTransferConfig, or a mapping of one
    """Yield the settings of each of kvdock's connectors, alone or among others."""
    if transfer is None:
        return
    given = transfer if isinstance(transfer, dict) else vars(transfer)
    extra = given.get("kv_connector_extra_config") or {}
    if given.get("kv_connector") == _OURS:
        yield extra
    for one in extra.get("connectors", ()):
        yield from _chosen(one)


def _check_neighbours(transfer: Any) -> None:  # noqa: ANN401 - same
    """Reject a connector beside kvdock's whose pages are not this engine's own.

    kvdock stores what is in an engine's memory, also what another connector loaded.
    """
    if not any(True for _ in _chosen(transfer)):
        return
    for one in (transfer.kv_connector_extra_config or {}).get("connectors", ()):
        name, stores = one["kv_connector"], one.get("kv_connector_extra_config") or {}
        elsewhere = one.get("kv_connector_module_path") and name != _OURS
        if name not in _EXACT or elsewhere or stores.get("secondary_tiers"):
            raise SettingsError(
                f"{name} beside {_OURS} may load pages that other weights have "
                "computed, or that have lost something, and kvdock would store them as "
                "this engine's own",
                fix=f"Use {_OURS} alone, or beside {', '.join(sorted(_EXACT))}, of "
                "vLLM's own and without secondary_tiers.",
            )


@cache
def _check_settings(text: str) -> None:
    """Reject settings with which storage could not be attached, once a process."""
    check_version()
    given = collect(json.loads(text), lenient=True)
    run_of(given.own.generations)
    Dock.for_engine(given.used, given)
