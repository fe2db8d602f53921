"""Weights that are replaced while an engine runs.

vLLM informs a connector of requests alone. Its workers can be told to load other
weights in ways that no list covers: by name, by a class of the operator's, by a
function. So a call to all workers that is not known to be harmless ends the storage
of an engine: what it stored would be found by requests to other weights.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HARMLESS_CALLS = frozenset(
    {
        "compute_weight_checksums",
        "get_model_inspection",
        "release_late_interaction_query_cache",
        "synchronize_device",
        # Before the first request, and before the identity is read.
        "update_max_model_len",
    }
)
"""Calls of vLLM's own to all workers that leave weights as they are.

Source: vLLM 0.32.0 and 0.33.0, `v1/engine/core.py`, `entrypoints/llm.py`,
`entrypoints/pooling/scoring/serving.py`.
"""

_DISCARDS_WEIGHTS = 2
"""The level of a sleep after which others have to be loaded."""


def watch_weights(core: type[Any], connectors: Callable[[Any], list[Any]]) -> None:
    """Have connectors told of calls that may replace weights."""
    call, rest = core.collective_rpc, core.sleep
    if hasattr(call, "of_kvdock"):
        return

    @wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
        if method not in HARMLESS_CALLS:
            for one in connectors(self):
                one.weights_may_change(getattr(method, "__name__", str(method)))
        return call(self, method, *args, **options)

    @wraps(rest)
    def sleep(self: Any, level: int = 1, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
        if level >= _DISCARDS_WEIGHTS:
            for one in connectors(self):
                one.weights_may_change(f"sleep of level {level}")
        return rest(self, level, *args, **options)

    collective_rpc.of_kvdock = True  # type: ignore[attr-defined]
    core.collective_rpc, core.sleep = collective_rpc, sleep
