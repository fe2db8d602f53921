"""Whose pages an engine would find, from its command alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvdock import Namespace, Shard
from kvdock.launch import NamespacePlan, parsing_by, split_command
from kvdock.namespace import namespace_record
from kvdock_sglang.launch import launch
from kvdock_sglang.launch_flags import EXTRA, configuration
from kvdock_sglang.namespace import Ranks, launched, namespace
from kvdock_sglang.settings import collect

LOADED = (
    "pools",
    "page_format.arguments.kv_cache_dtype",
    "page_format.page_order",
    "page_format.packed_draft_layers",
    "page_format.tag",
)
"""What the pools in host memory say once they have been made."""

_ELEMENTS = {"bfloat16": "bf16"}
"""A KV cache type that pools spell otherwise."""


def plan_namespace(
    command: Sequence[str], settings: Mapping[str, object]
) -> NamespacePlan:
    """Read whose pages the first rank of an engine with this command would find.

    Called by `kvdock route --namespace`; it imports SGLang. A command without kvdock's
    flags gets those that `kvdock run` would add.

    Args:
        command: Its words, from the program on.
        settings: What its storage class is to get, in words.

    Raises:
        KvdockError: If SGLang or kvdock rejects the command.
    """
    words = list(command)
    if not any(word.startswith(EXTRA) for word in words):
        words += launch(command, settings).flags
    resolved = _publish(words)
    text = str(resolved["hicache_storage_backend_extra_config"] or "{}")
    own = collect(configuration(text), lenient=True).own
    started = launched(own)
    ranks = Ranks(
        shard=Shard(),
        pp_size=int(resolved["pp_size"]),
        cp_size=int(resolved["attn_cp_size"]),
    )
    target, draft = namespace(started.served_name, ranks, own, started)
    planned = {"target": target}
    if draft != target:
        planned["draft"] = draft
    dtype = str(started.arguments["kv_cache_dtype"])
    return NamespacePlan(
        records={
            name: namespace_record(_without_pools(one, dtype), ())
            for name, one in planned.items()
        },
        loaded=LOADED,
    )


def _without_pools(planned: Namespace, kv_cache_dtype: str) -> Namespace:
    """Leave out the KV cache type where `auto` stands for what the pools will have."""
    page_format = json.loads(planned.page_format)
    arguments = page_format["arguments"]
    arguments["kv_cache_dtype"] = _ELEMENTS.get(kv_cache_dtype, kv_cache_dtype)
    if kv_cache_dtype == "auto":
        del arguments["kv_cache_dtype"]
    return attrs.evolve(planned, page_format=json.dumps(page_format, sort_keys=True))


def _publish(words: Sequence[str]) -> dict[str, Any]:
    """Read a command as SGLang's scheduler gets it; return what it resolved.

    Source: SGLang 0.5.23, `launch_server.py` and `runtime_context.py:publish`.
    """
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415 - the engine
    from sglang.srt.runtime_context import publish  # noqa: PLC0415 - same
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415 - same

    load_plugins()
    _, rest = split_command(words)
    with parsing_by("SGLang"):
        given = prepare_server_args(rest[rest[:1] == ["serve"] :])
        given.resolve_once()
        publish(given, role="scheduler")
        return dict(given.resolved_dict())
