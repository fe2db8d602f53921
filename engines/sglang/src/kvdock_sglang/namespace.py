"""The namespace of SGLang's pages: what must be equal for them to be interchangeable.

The engine passes the served name of the model and the ranks to a storage backend,
and nothing else. Two servers may serve different weights under one name, so what
the engine was started with is read as well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import Namespace, Shard
from kvdock.errors import KvdockError
from kvdock_sglang.engine_api import (
    LAUNCH_ARGUMENTS,
    TESTED,
    installed_version,
    untested_version,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvdock_sglang.host_pools import HostPool
    from kvdock_sglang.settings import AdapterSettings

_DRAFT = ("speculative_", "decrypted_draft_", "uno_")
"""How names of launch arguments about a draft model begin."""


def launch_arguments() -> dict[str, str]:
    """Return the launch arguments of this engine that decide what its bytes mean.

    Raises:
        KvdockError: If one of them cannot be read; without it, servers with
            other weights could share pages.
    """
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - the engine

    try:
        arguments = get_server_args()
    except Exception as error:
        raise _unreadable("its launch arguments", error) from error
    lacking = [name for name in LAUNCH_ARGUMENTS if not hasattr(arguments, name)]
    if lacking:
        raise _unreadable(f"the launch arguments {', '.join(lacking)}")
    found = {name: getattr(arguments, name) for name in LAUNCH_ARGUMENTS}
    return {
        name: str(value)
        for name, value in found.items()
        if value not in (None, "", "{}", "auto")
    }


def _unreadable(what: str, error: Exception | None = None) -> KvdockError:
    because = f": {error}" if error else ""
    return KvdockError(
        f"SGLang {installed_version()} does not provide {what}{because}",
        fix=f"Use SGLang {' or '.join(TESTED)}, or a kvdock-sglang that was tested "
        "with yours.",
    )


def ranks_on_host(tp_size: int) -> int:
    """Return how many of the ranks that divide a page are on one host.

    Raises:
        KvdockError: If the engine does not say over how many hosts it runs.

    Source: SGLang 0.5.23, `entrypoints/engine.py`: how ranks get their nodes.
    """
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - the engine

    found = get_parallel()
    try:
        hosts = max(1, int(found.nnodes) // int(found.pp_size))
        return min(tp_size, int(found.tp_size) // hosts) if hosts > 1 else tp_size
    except Exception as error:
        raise _unreadable("over how many hosts it runs", error) from error


def target_kv_heads() -> int:
    """Return how many KV heads the target model has over all ranks; 0 if unknown.

    A host pool counts the heads of its rank, and a rank has one even where the
    model has fewer heads than there are ranks.

    Source: SGLang 0.5.23, `ModelConfig.get_num_kv_heads`, and
    `QKVParallelLinear`: neighbouring ranks have the same head.
    """
    from sglang.srt.arg_groups.model_override_base import (  # noqa: PLC0415 - same
        model_config_of,
    )
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - same

    try:
        return int(model_config_of(get_server_args()).get_total_num_kv_heads())
    except Exception:  # noqa: BLE001 - a model whose heads differ by layer: share none
        return 0


@attrs.frozen(kw_only=True)
class Ranks:
    """The ranks of this process in its deployment.

    Args:
        shard: The slice of the model that this process owns.
        pp_rank: Its pipeline stage.
        pp_size: Stages.
        cp_rank: Its place among the context-parallel ranks.
        cp_size: Context-parallel ranks.
        on_host: Tensor-parallel ranks of its group that are on one host.
        dp_rank: Its replica, under DP attention.
        share_tp: Other TP sizes that are to find the pages, by `tp_lcm_size`.
    """

    shard: Shard
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    on_host: int = 1
    dp_rank: int = 0
    share_tp: tuple[int, ...] = ()

    @property
    def process(self) -> str:
        """Name this process among those of the engine, for local directories."""
        ranks = {
            "dp": self.dp_rank,
            "pp": self.pp_rank,
            "cp": self.cp_rank,
            "tp": self.shard.tp_rank,
        }
        return "-".join(f"{name}{rank}" for name, rank in ranks.items())

    @classmethod
    def of(cls, config: Any) -> Ranks:  # noqa: ANN401 - the engine's dataclass
        """Read the engine's storage configuration.

        Stages and context-parallel ranks are part of the namespace instead of
        the shard: the engine numbers a pool's layers within its stage, and
        nothing says whether context-parallel ranks hold the same pages.
        """
        shard = Shard(
            tp_rank=int(config.tp_rank),
            tp_size=int(config.tp_size),
            dcp_rank=int(config.dcp_rank),
            dcp_size=int(config.dcp_size),
        )
        return cls(
            shard=shard,
            pp_rank=int(config.pp_rank),
            pp_size=int(config.pp_size),
            cp_rank=int(config.attn_cp_rank),
            cp_size=int(config.attn_cp_size),
            on_host=ranks_on_host(shard.tp_size),
            dp_rank=int(config.dp_rank or 0),
            share_tp=(int(config.tp_lcm_size),) if config.tp_lcm_size else (),
        )


def namespace(
    served_name: str | None,
    ranks: Ranks,
    settings: AdapterSettings,
    started: Mapping[str, str],
    host_pools: Iterable[HostPool] = (),
) -> Namespace:
    """Return the namespace of this engine's pages.

    Args:
        served_name: The engine's name of the model, with its page format tag.
        ranks: The ranks of this process.
        settings: The adapter's settings.
        started: What `launch_arguments` found.
        host_pools: The engine's pools, described: how each orders the bytes of
            a page, and how many layers of a draft model it has.
    """
    path = started.get("model_path", "")
    names = dict.fromkeys(filter(None, (served_name, path)))
    fmt: dict[str, object] = {
        name: value
        for name, value in started.items()
        if name not in ("model_path", "revision") and not name.startswith(_DRAFT)
    }
    fmt["engine"] = "sglang"
    if version := untested_version():
        fmt["engine_version"] = version
    described = tuple(host_pools)
    fmt["page_order"] = {pool.name: pool.page_order for pool in described}
    if packed := sum(pool.packed_draft_layers for pool in described):
        fmt["packed_draft_layers"] = packed
    if ranks.pp_size > 1:
        fmt["pp"] = [ranks.pp_rank, ranks.pp_size]
    if ranks.cp_size > 1:
        fmt["cp"] = [ranks.cp_rank, ranks.cp_size]
    draft = [f"{k}={v}" for k, v in sorted(started.items()) if k.startswith(_DRAFT)]
    return Namespace(
        model=settings.model or " at ".join(names) or "",
        revision=settings.revision or started.get("revision", ""),
        draft_model=" ".join(draft),
        salt=settings.salt,
        page_format=json.dumps(fmt, sort_keys=True),
    )
