"""Weights that are replaced while an engine runs.

vLLM informs a connector of requests alone. Its workers can be told to load other
weights in ways that no list covers: by name, by a class of the operator's, by a
function. So a call to all workers turns storage off unless it is known to be harmless.
After those of vLLM's own updates it goes on in another generation; any other ends it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from kvdock_vllm.generations import UPDATES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock_vllm.generations import Generations

HARMLESS_CALLS = frozenset(
    {
        "compute_weight_checksums",
        "get_model_inspection",
        "release_late_interaction_query_cache",
        # vLLM refuses it while an update is under way.
        "shutdown_weight_transfer_engine",
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

_OF_RELOAD = ("weights_iterator", "weights_path")


Watching = Callable[[Any], "Iterable[Generations]"]
"""Returns what is to be told of an engine."""


def watch_weights(core: type[Any], watching: Watching) -> None:
    """Have generations told of calls that may replace weights, and of their names.

    Args:
        core: vLLM's `EngineCore`, whose methods are wrapped, once.
        watching: Returns those of an engine.
    """
    call = core.collective_rpc
    if hasattr(call, "of_kvdock"):
        return
    core.collective_rpc = _watched_calls(call, watching)
    core.collective_rpc.of_kvdock = True
    core.sleep = _watched_sleeps(core.sleep, watching)
    core.set_weight_version = _watched_names(core.set_weight_version, watching)


def _watched_calls(call: Callable[..., Any], watching: Watching) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
        if method in HARMLESS_CALLS:
            return call(self, method, *args, **options)
        told = [*watching(self)]
        name = getattr(method, "__name__", str(method))
        for one in told:
            one.begin(self, name, ends=method not in UPDATES)
        try:
            found = call(self, method, *args, **options)
        except BaseException:
            for one in told:
                one.failed()
            raise
        given = signature.bind(self, method, *args, **options).arguments
        named = dict(zip(_OF_RELOAD, given.get("args") or (), strict=False))
        for one in told:
            one.succeeded(name, {**named, **(given.get("kwargs") or {})})
        return found

    return collective_rpc


def _watched_sleeps(rest: Callable[..., Any], watching: Watching) -> Callable[..., Any]:
    @wraps(rest)
    def sleep(self: Any, level: int = 1, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
        if level >= _DISCARDS_WEIGHTS:
            for one in watching(self):
                one.begin(self, f"sleep of level {level}")
        return rest(self, level, *args, **options)

    return sleep


def _watched_names(name: Callable[..., Any], watching: Watching) -> Callable[..., Any]:
    @wraps(name)
    def set_weight_version(self: Any, weight_version: str) -> None:  # noqa: ANN401 - vLLM's
        name(self, weight_version)
        for one in watching(self):
            one.name(weight_version)

    return set_weight_version
