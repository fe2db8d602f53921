"""The namespace of SGLang's pages: what must be equal for them to be interchangeable.

The engine passes the served name of the model and the ranks to a storage backend,
and nothing else. Two servers may serve different weights under one name, so what
the engine was started with is read as well.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import DType, Namespace, Shard
from kvdock.errors import KvdockError
from kvdock.identity import code_elsewhere, locate_model, texts_digest
from kvdock_sglang import lora_identity
from kvdock_sglang.engine_api import (
    LAUNCH_ARGUMENTS,
    TESTED,
    in_place,
    installed_version,
    untested_version,
)
from kvdock_sglang.launch_arguments import (
    WITHOUT_DRAFT,
    canonical_argument,
    computes_drafts_apart,
    identity_arguments,
)
from kvdock_sglang.model_files import check_rope, files_of_model
from kvdock_sglang.variables import identity_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvdock_sglang.host_pools import HostPool
    from kvdock_sglang.settings import AdapterSettings


log = logging.getLogger("kvdock.sglang")


@attrs.frozen(kw_only=True)
class Launched:
    """What this engine was started with.

    Args:
        arguments: What counts of its launch arguments, and of what it made of them.
        served_name: Its name for the model, which does not count.
        architecture: The model's, for people who read the record.
        model: What stands for the files of the model.
        draft: A draft model's algorithm and what stands for its files, or "".
        draft_arguments: What counts of the launch arguments for its pages besides.
        drafts_apart: Whether nothing of it is in the target's pages, unless its layers
            are packed into them.
    """

    arguments: Mapping[str, object]
    served_name: str = ""
    architecture: str = ""
    model: str = ""
    draft: str = ""
    draft_arguments: Mapping[str, object] = attrs.field(factory=dict)
    drafts_apart: bool = False


def launched(settings: AdapterSettings) -> Launched:
    """Read what this engine was started with, and the files of its models.

    Raises:
        KvdockError: If it cannot be read; without it, servers with other weights
            could share pages.
    """
    from sglang.srt.runtime_context import (  # noqa: PLC0415 - the engine
        attention_backends,
        get_server_args,
    )

    try:
        raw = get_server_args()
        resolved: dict[str, Any] = raw.resolved_dict()
        backends = attention_backends()
    except Exception as error:
        raise _unreadable("its launch arguments", error) from error
    lacking = [name for name in LAUNCH_ARGUMENTS if name not in resolved]
    if lacking:
        raise _unreadable(f"the launch arguments {', '.join(lacking)}")
    arguments = identity_arguments(resolved)
    if not _keys_apart(resolved):
        arguments["extra_keys"] = "as their callers write them"
    arguments["attention"] = [str(one) for one in backends]
    if variables := identity_variables():
        arguments["environment"] = variables
    config = _model_config(raw)
    arguments |= _configured(resolved, config)
    arguments["kv_cache_dtype"] = _KV_DTYPES.get(
        (given := str(resolved["kv_cache_dtype"])), given
    )
    path = str(resolved["model_path"])
    revision = str(resolved["revision"] or "")
    load_format = str(resolved["load_format"])
    commit = _commit(config)
    if config is not None and getattr(config, "pointer_head", None) is not None:
        # An adapter's checkpoint, which names the model that it is merged into.
        arguments["base"] = files_of_model(
            str(config.model_path),
            revision=str(config.revision or ""),
            named=settings.revision,
            weights=settings.weights,
        )
    if (loaded := _downloaded(path, revision, resolved)) not in ("", commit):
        arguments["weights"] = loaded
    if (tokenizer := str(resolved["tokenizer_path"] or path)) != path:
        # It brings the processor of pictures too.
        place = locate_model(tokenizer, file="tokenizer_config.json")
        arguments["tokenizer"] = (
            texts_digest(place) if place and place.is_dir() else tokenizer
        )
    if resolved.get("trust_remote_code"):
        arguments |= _code(config, {path: revision, tokenizer: revision})
    return Launched(
        arguments=arguments,
        served_name=str(resolved["served_model_name"] or path),
        architecture=_architecture(config),
        model=files_of_model(
            path,
            revision=revision,
            commit=commit,
            named=settings.revision,
            load_format=load_format,
            weights=settings.weights,
        ),
        draft=_draft(resolved, settings),
        draft_arguments=_draft_arguments(resolved),
        drafts_apart=computes_drafts_apart(resolved),
    )


def _configured(resolved: Mapping[str, Any], config: Any) -> dict[str, object]:  # noqa: ANN401 - SGLang's ModelConfig, or None
    """Return what the engine made of its arguments about the model.

    Raises:
        KvdockError: If the model's pages cannot be restored.
    """
    found: dict[str, object] = {}
    if override := _override(resolved, config):
        found["json_model_override_args"] = override
    if config is None:
        # The engine did not need one. What it would have said counts as written.
        names = ("dtype", "quantization", "context_length", "enable_multimodal")
        return {**found, **{n: canonical_argument(n, resolved[n]) for n in names}}
    context_tokens = int(config.context_len)
    check_rope(config.hf_config.to_dict(), context_tokens)
    if config.is_encoder_decoder:
        raise KvdockError(
            "this model has an encoder and a decoder, and SGLang fails where a "
            "part of an image's states is cached, as storage may restore it",
            fix="Start it without storage.",
        )
    return {
        **found,
        "computes": str(config.dtype).removeprefix("torch."),
        "quantization": canonical_argument("quantization", config.quantization),
        "context_tokens": context_tokens,
        "multimodal": bool(config.is_multimodal),
    }


_KV_DTYPES = {"bf16": "bfloat16"}
"""Two spellings of one KV cache type.

Source: SGLang 0.5.23, `mem_cache/kv_cache_dtype.py:configure_kv_cache_dtype`.
"""


def _keys_apart(resolved: Mapping[str, object]) -> bool:
    """Return whether no caller's key can stand for another one with an adapter.

    Raises:
        KvdockError: If one can, and there are adapters.
    """
    if all(map(in_place, (lora_identity.LOAD, lora_identity.REQUEST))):
        return True
    if resolved.get("enable_lora") or resolved.get("lora_paths"):
        raise KvdockError(
            f"SGLang {installed_version()} runs without kvdock's patches for adapters, "
            "so a request's extra key could name the pages of one",
            fix="Start it without adapters, or with the kvdock plugin of SGLang "
            "(SGLANG_PLUGINS may leave it out).",
        )
    return False


def _override(resolved: Mapping[str, Any], config: Any) -> object:  # noqa: ANN401 - SGLang's ModelConfig, or None
    """Return what counts of an override: nothing if it changes nothing."""
    given = canonical_argument("override", resolved["json_model_override_args"])
    if config is None or not isinstance(given, dict):
        return given
    # What a description of a configuration does not show.
    kind = type(config.hf_config)
    if any(
        name.startswith("_") or isinstance(getattr(kind, name, None), property)
        for name in given
    ):
        return given
    from sglang.srt.utils.hf_transformers_utils import (  # noqa: PLC0415 - the engine
        get_config,
    )

    try:
        plain, changed = (
            get_config(
                str(resolved["model_path"]),
                trust_remote_code=bool(resolved["trust_remote_code"]),
                revision=resolved["revision"],
                model_override_args=override,
                model_config_parser=config.model_config_parser,
            ).to_dict()
            for override in (None, json.loads(resolved["json_model_override_args"]))
        )
    except Exception as error:  # noqa: BLE001 - SGLang's reader raises what it likes
        log.warning("nothing says what the override of the model changes: %s", error)
        return given
    return given if plain != changed else None


def _code(config: Any, models: Mapping[str, str]) -> dict[str, object]:  # noqa: ANN401 - SGLang's ModelConfig, or None
    """Return what stands for code that models bring, and take from other models.

    `models` are names of models and their revisions. Code in a model's folder is one of
    its files.
    """
    maps = [getattr(getattr(config, "hf_config", None), "auto_map", None)]
    for name, revision in models.items():
        place = locate_model(name, revision=revision)
        for file in sorted(place.glob("*config.json")) if place else ():
            with suppress(ValueError):  # the engine cannot read it either
                maps.append(json.loads(file.read_bytes()).get("auto_map"))
    code: dict[str, object] = {}
    for one in filter(None, maps):
        code |= {"trust_remote_code": True, **code_elsewhere(one)}
    return code


def _downloaded(path: str, revision: str, resolved: Mapping[str, object]) -> str:
    """Return which commit a cache of its own has for the weights, else "".

    The configuration is from the user's cache, whatever `--download-dir` says.
    """
    folder = str(resolved.get("download_dir") or "")
    if not folder or Path(path).exists():
        return ""
    repository = Path(folder, f"models--{path.replace('/', '--')}")
    try:
        return (repository / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        return revision or folder


def _model_config(raw: object) -> Any | None:  # noqa: ANN401 - SGLang's ModelConfig
    from sglang.srt.arg_groups.model_override_base import (  # noqa: PLC0415 - the engine
        model_config_of,
    )

    try:
        return model_config_of(raw)
    except Exception:  # noqa: BLE001 - there is none where the model is a dummy
        return None


def _architecture(config: Any) -> str:  # noqa: ANN401 - SGLang's ModelConfig, or None
    names = getattr(getattr(config, "hf_config", None), "architectures", None)
    return str(names[0]) if names else ""


def _commit(config: Any) -> str:  # noqa: ANN401 - SGLang's ModelConfig, or None
    return str(getattr(getattr(config, "hf_config", None), "_commit_hash", None) or "")


def _draft(resolved: Mapping[str, Any], settings: AdapterSettings) -> str:
    """Return the draft model of an engine: its algorithm and its files."""
    algorithm = str(resolved["speculative_algorithm"] or "")
    path = str(resolved["speculative_draft_model_path"] or "")
    if algorithm in WITHOUT_DRAFT:
        return ""
    # An algorithm may take the target's own layers for a draft.
    files = (
        files_of_model(
            path,
            revision=str(resolved["speculative_draft_model_revision"] or ""),
            load_format=str(
                resolved.get("speculative_draft_load_format") or resolved["load_format"]
            ),
            weights=settings.weights,
        )
        if path
        else "target"
    )
    return f"{algorithm} {files}"


def _draft_arguments(resolved: Mapping[str, Any]) -> dict[str, object]:
    """Return what counts for the pages of a draft model, besides the target's."""
    path = str(resolved["speculative_draft_model_path"] or "")
    if str(resolved["speculative_algorithm"] or "") in WITHOUT_DRAFT:
        return {}
    target = identity_arguments(resolved)
    found = {
        name: value
        for name, value in identity_arguments(resolved, draft=True).items()
        if name not in target
    }
    if override := _override(resolved, None):
        found["json_model_override_args"] = override
    if path and resolved.get("trust_remote_code"):
        revision = str(resolved["speculative_draft_model_revision"] or "")
        found |= _code(None, {path: revision})
    return found


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
    def first_on_host(self) -> bool:
        """Return whether no rank before it has this host's stores to look after."""
        return self.shard.tp_rank % self.on_host == 0

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
            # A release without these fields has no decode context parallelism.
            dcp_rank=int(getattr(config, "dcp_rank", 0)),
            dcp_size=int(getattr(config, "dcp_size", 1)),
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
    started: Launched,
    host_pools: Iterable[HostPool] = (),
) -> tuple[Namespace, Namespace]:
    """Return the namespaces of this engine's pages: the target's, and a draft model's.

    `host_pools` say how each orders the bytes of a page, and how many layers of a draft
    model it has.
    """
    described = tuple(host_pools)
    fmt: dict[str, object] = {"engine": "sglang", "arguments": {**started.arguments}}
    _settle_kv_dtype(fmt["arguments"], described)
    if tag := _tag(served_name or "", started.served_name):
        fmt["tag"] = tag
    if version := untested_version():
        fmt["engine_version"] = version
    fmt["page_order"] = {pool.name: pool.page_order for pool in described}
    if packed := sum(pool.packed_draft_layers for pool in described):
        fmt["packed_draft_layers"] = packed
    if ranks.pp_size > 1:
        fmt["pp"] = [ranks.pp_rank, ranks.pp_size]
    if ranks.cp_size > 1:
        fmt["cp"] = [ranks.cp_rank, ranks.cp_size]
    target = Namespace(
        model=settings.model or started.architecture or started.model,
        revision=started.model,
        salt=settings.salt,
        page_format=json.dumps(fmt, sort_keys=True),
    )
    fmt["draft"] = started.draft_arguments
    draft = attrs.evolve(
        target,
        draft_model=started.draft,
        page_format=json.dumps(fmt, sort_keys=True),
    )
    if not started.draft:
        return target, target
    return (draft if packed or not started.drafts_apart else target), draft


def _tag(served_name: str, name: str) -> str:
    """Return the page format tag that SGLang adds to the name of a model.

    Source: SGLang 0.5.23, `managers/cache_controller.py:storage_model_name`.
    """
    return served_name.removeprefix(name).removeprefix("-")


def _settle_kv_dtype(arguments: Any, pools: Sequence[HostPool]) -> None:  # noqa: ANN401 - a mapping that is being built
    """Write the KV cache type that `auto` stands for: the anchor's, or the model's."""
    parts = next((pool.spec.parts for pool in pools if pool.spec.anchor), ())
    typed = [part.dtype for part in parts if part.dtype is not DType.U8]
    if typed and arguments["kv_cache_dtype"] in _PLAIN_KV_DTYPES:
        arguments["kv_cache_dtype"] = str(typed[0])
    elif arguments["kv_cache_dtype"] == "auto":
        arguments["kv_cache_dtype"] = arguments.get("computes", "auto")


_PLAIN_KV_DTYPES = ("auto", "bfloat16", "fp8_e5m2", "fp8_e4m3")
"""KV cache types that say no more than the elements of the anchor do."""
