"""Check kvdock's settings where vLLM's command was typed, before weights load.

vLLM makes a connector when its workers have loaded the model. Its configuration is
complete long before that, in the process that was started, and is checked there.
"""

from __future__ import annotations

import json
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from kvdock import Dock
from kvdock.generations import run_of
from kvdock_vllm.engine_api import check_version
from kvdock_vllm.identity import check_configuration
from kvdock_vllm.settings import collect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def watch_configurations(kind: type[Any]) -> None:
    """Have each configuration of vLLM checked that chooses kvdock's connector."""
    completed = kind.__post_init__
    if hasattr(completed, "of_kvdock"):
        return

    @wraps(completed)
    def complete(self: Any, *args: Any) -> None:  # noqa: ANN401 - vLLM's
        completed(self, *args)
        for settings in _chosen(self.kv_transfer_config):
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
    if given.get("kv_connector") == "KvdockConnector":
        yield extra
    for one in extra.get("connectors", ()):
        yield from _chosen(one)


@cache
def _check_settings(text: str) -> None:
    """Reject settings with which storage could not be attached, once a process."""
    check_version()
    given = collect(json.loads(text), lenient=True)
    run_of(given.own.generations)
    Dock.for_engine(given.used, given)
