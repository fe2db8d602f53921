"""vLLM's KV cache in any storage that kvdock has a plugin for.

vLLM calls `register` in each of its processes, through its entry-point group
`vllm.general_plugins`. Importing this package imports neither vLLM nor torch,
so that a doctor can look at it where no engine is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock_vllm.connector import KvdockConnector as KvdockConnector

__all__ = ["KvdockConnector", "register"]


def register() -> None:
    """Make `KvdockConnector` known to vLLM by its bare name; safe to call again.

    Its settings are checked with vLLM's configuration from now on.
    """
    from vllm.config import VllmConfig  # noqa: PLC0415 - the engine
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - the engine
        KVConnectorFactory,
    )

    from kvdock_vllm.checks_at_start import watch_configurations  # noqa: PLC0415 - same

    watch_configurations(VllmConfig)
    name = "KvdockConnector"
    # vLLM has no question for it, and rejects a name that it knows.
    if name not in KVConnectorFactory._registry:  # noqa: SLF001 - same
        KVConnectorFactory.register_connector(name, "kvdock_vllm.connector", name)


def __getattr__(name: str) -> object:
    """Load the connector, and with it vLLM, when it is asked for."""
    if name != "KvdockConnector":
        raise AttributeError(f"module 'kvdock_vllm' has no attribute {name!r}")
    from kvdock_vllm.connector import KvdockConnector  # noqa: PLC0415 - imports vLLM

    return KvdockConnector
