"""What a process of the engine is called, and what its pages belong to."""

from __future__ import annotations

import json
import math
import os
import re
import time
from array import array
from collections.abc import Callable
from fnmatch import filter as filter_names
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import sglang.srt
import torch
import zoo
from exemption_lists import stale_exemptions
from sglang.srt import runtime_context
from sglang.srt.arg_groups import model_override_base
from sglang.srt.arg_groups.arg_utils import field_names
from sglang.srt.environ import EnvField, Envs
from sglang.srt.managers import schedule_batch
from sglang.srt.server_args import ServerArgs

from kvdock import AttachConfig, Shard
from kvdock.errors import KvdockError
from kvdock_sglang import engine_api, model_files
from kvdock_sglang import namespace as namespace_module
from kvdock_sglang.host_pools import EngineContext, describe
from kvdock_sglang.launch_arguments import (
    DRAFT_EXEMPTIONS,
    EXEMPTIONS,
    TUNING_EXEMPTIONS,
    identity_arguments,
)
from kvdock_sglang.namespace import Launched, Ranks, launched, namespace
from kvdock_sglang.settings import AdapterSettings
from kvdock_sglang.variables import COUNTED, identity_variables, is_exempt
from kvdock_sglang.variables import EXEMPTIONS as VARIABLES

if TYPE_CHECKING:
    from kvdock import Namespace


def ranks(dp: int, pp: int, cp: int, tp: int) -> Ranks:
    """Read what the engine tells one rank of 2 x 2 x 2 x 2."""
    config: Any = SimpleNamespace(
        tp_rank=tp,
        tp_size=2,
        pp_rank=pp,
        pp_size=2,
        attn_cp_rank=cp,
        attn_cp_size=2,
        dp_rank=dp,
        dcp_rank=0,
        dcp_size=1,
        tp_lcm_size=None,
    )
    return Ranks.of(config)


def test_every_process_of_an_engine_has_a_name_of_its_own_and_keeps_it() -> None:
    """They have one configuration, and most of them equal shards."""
    processes = [ranks(*one) for one in product(range(2), repeat=4)]
    names = [one.process for one in processes]
    assert len(set(names)) == 16
    assert len({one.shard for one in processes}) == 2
    assert names[5] == "dp0-pp1-cp0-tp1" == ranks(0, 1, 0, 1).process
    assert [AttachConfig(process=name).process for name in names] == names


def test_a_replica_shares_the_pages_of_the_others() -> None:
    assert ranks(0, 0, 0, 1).shard == ranks(1, 0, 0, 1).shard


ARGUMENTS = field_names(ServerArgs)
"""Every launch argument of the installed SGLang."""


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """Return launch arguments as the engine resolves them."""
    arguments = ServerArgs(model_path="dummy", device="cpu")
    found: dict[str, Any] = arguments.resolved_dict()
    return found


def test_every_launch_argument_is_exempt_with_a_reason_or_separates(
    resolved: dict[str, Any],
) -> None:
    """Those that another release adds separate until a reason is written down."""
    # A draft model makes the arguments about speculation count.
    base = {**resolved, "speculative_algorithm": "EAGLE"}
    apart = {one.field for one in DRAFT_EXEMPTIONS}
    exempt = {one.field: one.reason for one in (*EXEMPTIONS, *TUNING_EXEMPTIONS)}
    counted = identity_arguments(base), identity_arguments(base, draft=True)
    for name in sorted(
        ARGUMENTS - {"speculative_algorithm", "enable_multi_layer_eagle"}
    ):
        changed = {**base, name: "another-value"}
        other = identity_arguments(changed), identity_arguments(changed, draft=True)
        assert (other[0] == counted[0]) is (name in apart | exempt.keys()), name
        assert (other[1] == counted[1]) is (name in exempt), name
    assert all(exempt.values())
    for draft in (False, True):
        assert (
            identity_arguments({**base, "new_in_a_release": 1}, draft=draft)
            != (counted[draft])
        )


@pytest.mark.parametrize(
    "shared",
    [
        {"speculative_algorithm": "UNO"},
        {"speculative_algorithm": "of a plugin"},
        {"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True},
    ],
)
def test_where_drafts_are_not_known_to_be_apart_all_counts_for_all(
    shared: dict[str, object], resolved: dict[str, Any]
) -> None:
    for name in ("speculative_num_steps", "speculative_draft_kv_cache_dtype"):
        one, other = ({**resolved, **shared, name: value} for value in (1, 2))
        assert identity_arguments(one) != identity_arguments(other)


def test_no_exemption_is_of_an_argument_that_does_not_exist() -> None:
    every = (*EXEMPTIONS, *TUNING_EXEMPTIONS, *DRAFT_EXEMPTIONS)
    assert stale_exemptions(every, ARGUMENTS) == ()


def test_every_environment_variable_separates_but_for_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that SGLang's registry does not know separates too."""
    for name in os.environ:
        if name.startswith("SGLANG_"):
            monkeypatch.delenv(name)
    known = [one for one in vars(Envs).values() if isinstance(one, EnvField)]
    assert identity_variables() == {}
    for field in known:
        if not field.name.startswith("SGLANG_") or is_exempt(field.name):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(
                type(field),
                "get",
                lambda self, field=field: (
                    "another-value"
                    if self is field
                    else self.default
                    if not callable(self.default)
                    else self.default()
                ),
            )
            assert identity_variables() == {field.name: "another-value"}
    monkeypatch.setenv("SGLANG_NEW_IN_A_RELEASE", "1")
    monkeypatch.setenv("SGLANG_RUN_ID", "of this start alone")
    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "1")
    default = Envs.__dict__["SGLANG_ENABLE_BF16_SPLITK_GEMM"].default
    monkeypatch.setenv("SGLANG_ENABLE_BF16_SPLITK_GEMM", str(default))
    assert identity_variables() == {
        "SGLANG_NEW_IN_A_RELEASE": "1",
        "SGLANG_ROPE_CACHE_FP32": True,
    }


@pytest.mark.parametrize(
    "name",
    [
        "ROCM_QUICK_REDUCE_QUANTIZATION",
        "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
        "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
        "NVIDIA_TF32_OVERRIDE",
        "SGLANG_USE_MODELSCOPE",
        "SGLANG_SORT_WEIGHT_FILES",
    ],
)
def test_a_variable_that_changes_how_a_page_is_computed_counts_whoever_reads_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identity_variables()
    monkeypatch.setenv(name, "1")
    assert identity_variables() != before


PLAIN_VARIABLES = frozenset(
    """
    AIP_PREDICT_ROUTE ASCEND_MF_STORE_URL ASCEND_MF_TRANSFER_PROTOCOL
    AWS_DEFAULT_BUCKET AWS_ENDPOINT_URL CUDA_COREDUMP_FILE CUDA_COREDUMP_PIPE
    CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER
    CUDA_ENABLE_USER_TRIGGERED_COREDUMP CUDA_VISIBLE_DEVICES CU_NUM
    DEEPEP_HCCL_BUFFSIZE DEVICE_ID DUMPER_SERVER_PORT FLEXKV_CONFIG_PATH
    FLEXKV_ENABLE_LAYERWISE_TRANSFER
    FLEXKV_LAYERWISE_EVENTFD_CONNECT_MAX_RETRIES GITHUB_REPOSITORY
    GITHUB_RUN_ATTEMPT GITHUB_RUN_ID GPU_ARCHS HCCL_BUFFSIZE HOSTNAME HOST_IP
    HSA_USERPTR_FOR_PAGED_MEM IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD
    IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD LLGUIDANCE_LOG_LEVEL
    LOCAL_HOSTNAME LOCAL_RANK LOCAL_SIZE MASTER_ADDR MASTER_PORT MC_FORCE_TCP
    MEGA_USE_NCU MORI_ENABLE_SDMA MORI_RDMA_DEVICES MS_NODE_ID MS_ROLE
    MS_SCHED_HOST MS_SCHED_PORT MS_WORKER_NUM NCCL_ALGO NCCL_CUMEM_ENABLE
    NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_MAX_NCHANNELS
    NCCL_MIN_NCHANNELS NCCL_NVLS_ENABLE NVSHMEM_QP_DEPTH OTEL_SERVICE_NAME
    PROMETHEUS_MULTIPROC_DIR RANK REQUEST_TIMEOUT RUNAI_STREAMER_CONCURRENCY
    RUNAI_STREAMER_MEMORY_LIMIT RUNAI_STREAMER_S3_ENDPOINT RUNNER_TEMP
    SGL_FORCE_SHUTDOWN SICL_NET_DEVICES SYNC_TOKEN_IDS_ACROSS_TP
    TENSOR_DUMP_LAYERS_MODULE_NAME TENSOR_DUMP_TOP_LEVEL_MODULE_NAME TMPDIR
    TOKENIZERS_PARALLELISM TORCH_EXTENSIONS_DIR UCX_NET_DEVICES UMBP_LAYER_GROUP
    UMBP_LOAD_SPLIT UMBP_OFFLOAD_COALESCE_PAGES UMBP_RANGES_PER_CALL
    UMBP_SPDK_PROXY_TENANT_ID UMBP_STANDALONE_ADDRESS WAVE_DUMP_MLIR WORLD_SIZE
    XDG_CACHE_HOME ZE_AFFINITY_MASK ZE_ENABLE_PCI_ID_DEVICE_ORDER
    """.split()  # noqa: SIM905 - names, in lines
)
"""Variables without the prefix that SGLang reads and that change no page: places,
devices, transport, reports."""


def test_variables_of_libraries_count_or_are_known_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release may read one that neither a pattern nor this list has."""
    read = {
        found
        for path in Path(sglang.srt.__path__[0]).rglob("*.py")
        for found in re.findall(
            r"(?:environ(?:\.get)?[\[(]|getenv\(|get_\w+_env_var\()\s*"
            r"[\"']([A-Z][A-Z0-9_]+)[\"']",
            path.read_text(),
        )
    }
    known = {one.name for one in vars(Envs).values() if isinstance(one, EnvField)}
    for name in sorted(read - known - PLAIN_VARIABLES):
        assert any(fnmatchcase(name, one) for one in COUNTED), name
    for name in ("FLASHINFER_LOGLEVEL", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        before = identity_variables()
        monkeypatch.setenv(name, "of this host")
        assert identity_variables() == before


def test_no_pattern_of_variables_is_stale_and_no_secret_counts() -> None:
    known = [one for one in vars(Envs).values() if isinstance(one, EnvField)]
    names = [one.name.removeprefix("SGLANG_") for one in known]
    # What it reads beside its registry.
    names += [
        found
        for path in Path(sglang.srt.__path__[0]).rglob("*.py")
        for found in re.findall(r"SGLANG_(\w+)", path.read_text())
    ]
    # Those of libraries are not in SGLang's code.
    patterns = [
        one.field
        for one in VARIABLES
        if not any(fnmatchcase(one.field, count) for count in COUNTED[1:])
    ]
    assert [one for one in patterns if not filter_names(names, one)] == []
    assert all(one.reason for one in VARIABLES)
    assert all(is_exempt(one.name) for one in known if one.secret)


def test_without_a_draft_model_nothing_about_speculation_counts(
    resolved: dict[str, Any],
) -> None:
    """N-grams propose tokens of the prompt itself, and have no pages."""
    off = identity_arguments(resolved, draft=True)
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    assert identity_arguments({**resolved, **ngram}, draft=True) == off
    eagle = {**resolved, "speculative_algorithm": "EAGLE"}
    assert identity_arguments(eagle, draft=True) != off


def test_arguments_about_adapters_do_not_count(resolved: dict[str, Any]) -> None:
    """Their content is in the page hashes of their requests."""
    given = {**resolved, "enable_lora": True, "lora_paths": ["somewhere"]}
    assert identity_arguments(given) == identity_arguments(resolved)


def test_adapters_without_the_patches_are_rejected_and_other_keys_kept_apart(
    of: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller's key could name an adapter's pages there."""
    patched = of()
    monkeypatch.setattr(namespace_module, "in_place", lambda _: False)
    assert of() != patched
    with pytest.raises(KvdockError, match="without kvdock's patches for adapters"):
        of(enable_lora=True)


@pytest.mark.parametrize("file_format", ["pt", "npcache", "mistral", "gguf"])
def test_formats_that_read_other_files_are_apart(
    file_format: str, resolved: dict[str, Any]
) -> None:
    auto = identity_arguments(resolved)
    assert identity_arguments({**resolved, "load_format": file_format}) != auto


@pytest.mark.parametrize("file_format", ["fastsafetensors", "runai_streamer"])
def test_formats_that_read_the_same_files_are_one(
    file_format: str, resolved: dict[str, Any]
) -> None:
    auto = identity_arguments(resolved)
    assert identity_arguments({**resolved, "load_format": file_format}) == auto


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("load_format", "auto", "safetensors"),
        ("json_model_override_args", "{}", ""),
        ("json_model_override_args", '{"a": 1, "b": 2}', '{"b":2,"a":1}'),
        ("model_loader_extra_config", "{}", "{ }"),
    ],
)
def test_two_spellings_of_a_value_are_one(
    name: str, one: object, other: object, resolved: dict[str, Any]
) -> None:
    found = [identity_arguments({**resolved, name: value}) for value in (one, other)]
    assert found[0] == found[1]


def test_a_path_counts_by_what_lies_there(
    resolved: dict[str, Any], tmp_path: Path
) -> None:
    def of(path: Path) -> dict[str, object]:
        return identity_arguments({**resolved, "quantization_param_path": str(path)})

    scales, moved = tmp_path / "scales.json", tmp_path / "moved.json"
    scales.write_text("[1]")
    moved.write_text("[1]")
    assert of(scales) == of(moved)
    before = of(scales)
    scales.write_text("[2]")
    assert of(scales) != before


def config(**changes: object) -> SimpleNamespace:
    """Return the engine's configuration of a model."""
    given: dict[str, Any] = {
        "dtype": torch.float16,
        "quantization": None,
        "context_len": 1024,
        "is_multimodal": False,
        "is_encoder_decoder": False,
        "model_config_parser": "auto",
        "hf_config": SimpleNamespace(
            architectures=["TinyForCausalLM"],
            _commit_hash=None,
            to_dict=lambda: {"rope_parameters": {"rope_type": "yarn"}},
        ),
    }
    return SimpleNamespace(**{**given, **changes})


@pytest.fixture
def of(
    monkeypatch: pytest.MonkeyPatch, resolved: dict[str, Any], tmp_path: Path
) -> Callable[..., Namespace]:
    """Return the namespace of an engine with these launch arguments."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))

    monkeypatch.setattr(namespace_module, "in_place", lambda _: True)

    def found(
        model: Any = None,
        *,
        draft: bool = False,
        pools: Any = (),
        **changes: object,
    ) -> Namespace:
        given = {**resolved, "model_path": str(folder), **changes}
        given = {name: value for name, value in given.items() if value is not ...}
        arguments = SimpleNamespace(resolved_dict=lambda: given)
        pair = lambda: ("torch_native", "torch_native")  # noqa: E731
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
        monkeypatch.setattr(runtime_context, "attention_backends", pair)
        monkeypatch.setattr(
            model_override_base, "model_config_of", lambda _: model or config()
        )
        # The files of these tests are younger than their process.
        monkeypatch.setattr(model_files, "_started_s", lambda: math.inf)
        mine = AdapterSettings(plugin="file")
        name = str(given["served_model_name"] or given.get("model_path"))
        return namespace(name, ranks(0, 0, 0, 0), mine, launched(mine), pools)[draft]

    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_format", "dummy"),
        ("model_loader_extra_config", '{"presharded_path": "/other"}'),
        ("custom_weight_loader", ["package.load"]),
        ("weight_version", "2"),
        ("qsa_indexer_dtype", "fp8_e4m3"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("mm_process_config", {"image": {"max_pixels": 7}}),
        ("model_config_parser", "mistral"),
    ],
)
def test_another_meaning_of_bytes_is_another_namespace(
    name: str, value: object, of: Callable[..., Namespace]
) -> None:
    assert of(**{name: value}) != of()


def test_a_variable_of_the_engine_is_part_of_its_namespace(
    of: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of()
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    assert of() == before
    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "1")
    assert of() != before


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "fp8"},
        {"dtype": torch.bfloat16},
        {"context_len": 2048},
        {"is_multimodal": True},
    ],
)
def test_what_the_engine_made_of_its_arguments_counts(
    changes: dict[str, Any], of: Callable[..., Namespace]
) -> None:
    assert of(config(**changes)) != of()


def test_a_value_that_is_named_is_the_one_that_is_chosen_anyway(
    of: Callable[..., Namespace],
) -> None:
    named = of(
        dtype="float16",
        kv_cache_dtype="float16",
        context_length=1024,
        served_model_name="a name",
        load_format="safetensors",
    )
    assert named == of()


def test_names_and_places_of_a_model_do_not_count(
    of: Callable[..., Namespace], tmp_path: Path
) -> None:
    here = of()
    elsewhere = (tmp_path / "model").rename(tmp_path / "another")
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    assert of(model_path=str(elsewhere)) == of(model_path=str(link)) == here


@pytest.mark.parametrize("file", ["config.json", "modeling.py", "chat.jinja"])
def test_every_small_file_of_a_model_counts_whole(
    file: str, of: Callable[..., Namespace], tmp_path: Path
) -> None:
    before = of()
    (tmp_path / "model" / file).write_text('{"rope": "yarn"}')
    assert of() != before


def test_another_tokenizer_counts_by_its_files_or_by_its_name(
    of: Callable[..., Namespace], tmp_path: Path
) -> None:
    """It brings the processor of pictures too."""
    before = of()
    assert of(tokenizer_path=str(tmp_path / "model")) == before
    assert len({before, of(tokenizer_path="a/b"), of(tokenizer_path="a/c")}) == 3
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "processor_config.json").write_text("{}")
    one, two = (of(tokenizer_path=str(folder)) for folder in folders)
    assert one == two != before
    (folders[1] / "processor_config.json").write_text('{"do_normalize": false}')
    assert of(tokenizer_path=str(folders[1])) != one


def test_a_page_format_tag_of_the_engine_counts(of: Callable[..., Namespace]) -> None:
    mine = AdapterSettings(plugin="file")
    of()
    plain, tagged = (
        namespace(
            f"m{tag}",
            ranks(0, 0, 0, 0),
            mine,
            Launched(
                arguments={"kv_cache_dtype": "auto"}, served_name="m", model="files:1"
            ),
        )
        for tag in ("", "-unified-token-major")
    )
    assert plain != tagged


def test_files_that_changed_after_the_engine_started_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not say what the engine has in its memory."""
    file = tmp_path / "config.json"
    file.write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
    written_s = file.stat().st_ctime
    monkeypatch.setattr(model_files, "_started_s", lambda: written_s + 1)
    assert model_files.files_of_model(str(tmp_path)).startswith("files:")
    monkeypatch.setattr(model_files, "_started_s", lambda: written_s - 60)
    with pytest.raises(KvdockError, match=r"config\.json was written 60 s after"):
        model_files.files_of_model(str(tmp_path))


def test_a_process_began_before_now_and_after_its_host() -> None:
    began = model_files._started_s()
    assert time.time() - 24 * 3600 < began < time.time()


@pytest.mark.parametrize("context", [129, 4096])
def test_a_model_whose_keys_depend_on_the_batch_is_rejected(context: int) -> None:
    """SGLang takes LongRoPE's factors for a whole batch by its longest position."""
    phi3 = {
        "original_max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "longrope", "long_factor": [2.0]},
    }
    if context > 129:
        with pytest.raises(KvdockError, match="LongRoPE") as raised:
            model_files.check_rope({"text_config": phi3}, context)
        assert "--context-length 128" in raised.value.fix
    else:
        model_files.check_rope({"text_config": phi3}, context)


def test_code_of_another_model_counts_where_it_may_run(
    of: Callable[..., Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "code").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = config()
    model.hf_config.auto_map = {"AutoModel": "org/code--modeling.Model"}
    found = []
    for text in ("a = 1", "a = 2"):
        (tmp_path / "org" / "code" / "modeling.py").write_text(text)
        found.append((of(model), of(model, trust_remote_code=True)))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_to_trust_code_counts_only_where_there_is_code(
    of: Callable[..., Namespace], tmp_path: Path
) -> None:
    assert of(trust_remote_code=True) == of()
    described = '{"auto_map": {"AutoProcessor": "processing.Own"}}'
    (tmp_path / "model" / "processor_config.json").write_text(described)
    assert of(trust_remote_code=True) != of()


def test_an_override_counts_where_it_changes_the_configuration(
    of: Callable[..., Namespace], tmp_path: Path
) -> None:
    path = tmp_path / "model" / "config.json"
    path.write_text('{"model_type": "llama", "rms_norm_eps": 0.5}')

    def overridden(text: str, **more: Any) -> Namespace:
        return of(json_model_override_args=text, **more)

    plain = of()
    # What the file says, what the class of transformers sets, and nothing.
    for same in ('{"rms_norm_eps": 0.5}', '{"rms_norm_eps":0.50,"mlp_bias":false}', ""):
        assert overridden(same) == plain
    for other in ('{"rms_norm_eps": 0.25}', '{"_hidden": 1}', '{"new_word": 1}'):
        assert overridden(other) != plain
    # A draft model has another file.
    eagle = {"speculative_algorithm": "EAGLE", "draft": True}
    assert overridden('{"rms_norm_eps": 0.5}', **eagle) != of(**eagle)


DRAFT = {"speculative_algorithm": "EAGLE"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_num_steps", 5),
        ("speculative_eagle_topk", 8),
        ("speculative_num_draft_tokens", 16),
        ("speculative_accept_threshold_single", 0.5),
        ("spec_trace_dir", "/a/b"),
    ],
)
def test_tuning_speculation_costs_no_page(
    name: str, value: object, of: Callable[..., Namespace]
) -> None:
    for draft in (False, True):
        tuned = of(**DRAFT, draft=draft, **{name: value})
        assert tuned == of(**DRAFT, draft=draft)


@pytest.mark.parametrize(
    "other",
    [
        {"speculative_algorithm": "EAGLE3"},
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        {"speculative_draft_model_quantization": "fp8"},
        {"speculative_draft_load_format": "dummy"},
        {"speculative_draft_model_path": "another"},
    ],
)
def test_another_draft_has_other_pages_and_the_target_the_same(
    other: dict[str, object], of: Callable[..., Namespace]
) -> None:
    changed = {**DRAFT, **other}
    assert of(**changed, draft=True) != of(**DRAFT, draft=True)
    assert of(**changed) == of(**DRAFT) == of()
    verified = {**DRAFT, "speculative_attention_mode": "decode"}
    assert of(**verified) != of()


def test_a_draft_that_is_packed_into_the_targets_pages_counts_for_them(
    of: Callable[..., Namespace],
) -> None:
    packed = describe(
        "kv",
        zoo.mha_host(packed_drafts=1),
        EngineContext(shard=Shard(), page_tokens=zoo.PAGE),
    )
    other = {**DRAFT, "speculative_draft_model_path": "another"}
    assert of(**DRAFT, pools=[packed]) != of(**other, pools=[packed])
    tuned = {**DRAFT, "speculative_num_steps": 5}
    assert of(**DRAFT, pools=[packed]) == of(**tuned, pools=[packed])


def test_weights_in_another_cache_count_by_their_commit(
    of: Callable[..., Namespace], tmp_path: Path
) -> None:
    """The configuration is read from the user's cache all the same."""
    model = config()
    model.hf_config._commit_hash = "a" * 40
    plain = of(model, model_path="org/model")
    refs = tmp_path / "cache" / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    given = {"model_path": "org/model", "download_dir": str(tmp_path / "cache")}
    (refs / "main").write_text("a" * 40)
    assert of(model, **given) == plain
    (refs / "main").write_text("b" * 40)
    assert of(model, **given) != plain


def test_a_copy_that_a_format_reads_in_place_of_the_files_counts(
    of: Callable[..., Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang converts once, and reads the copy when the weights are replaced."""
    copy = tmp_path / "model" / "np"
    copy.mkdir()
    (copy / "lm_head.weight").write_bytes(b"one")
    auto, first = of(), of(load_format="npcache")
    (copy / "lm_head.weight").write_bytes(b"two")
    assert of(load_format="npcache") != first
    assert of() == auto
    monkeypatch.setattr(model_files, "_started_s", lambda: time.time() - 60)
    for path in (tmp_path / "model").glob("*.*"):
        os.utime(path)
    with pytest.raises(KvdockError, match="was written"):
        model_files.files_of_model(str(tmp_path / "model"), load_format="npcache")


@pytest.mark.parametrize("file_format", ["remote_instance", "new_in_a_release"])
def test_weights_that_may_be_from_elsewhere_need_a_name(
    file_format: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
    with pytest.raises(KvdockError, match="may take weights from elsewhere"):
        model_files.files_of_model(str(tmp_path), load_format=file_format)
    known = model_files.files_of_model(
        str(tmp_path), load_format=file_format, named="r1"
    )
    assert known.startswith("named:r1")


def test_a_folder_that_an_argument_names_counts_with_all_below_it(
    resolved: dict[str, Any], tmp_path: Path
) -> None:
    def of(value: object) -> dict[str, object]:
        return identity_arguments({**resolved, "model_loader_extra_config": value})

    folder = tmp_path / "shards"
    (folder / "tp2").mkdir(parents=True)
    (folder / "tp2" / "rank0.bin").write_bytes(b"one")
    given = json.dumps({"presharded_path": str(folder)})
    before = of(given)
    (folder / "tp2" / "rank0.bin").write_bytes(b"two")
    assert of(given) != before


def test_an_encoder_and_a_decoder_are_rejected(of: Callable[..., Namespace]) -> None:
    with pytest.raises(KvdockError, match="an encoder and a decoder"):
        of(config(is_encoder_decoder=True))


def test_sglang_fails_where_a_part_of_an_images_states_is_cached() -> None:
    """So storage, which restores page by page, may not be attached there."""
    image = SimpleNamespace(num_image_tokens=48)
    request = SimpleNamespace(multimodal_inputs=image, prefix_len=16, extend_len=48)
    batch: Any = SimpleNamespace(
        reqs=[request],
        device="cpu",
        forward_mode=SimpleNamespace(is_decode=lambda: False),
        extend_lens=[48],
        prefix_lens=[16],
    )
    prepare = schedule_batch.ScheduleBatch.prepare_encoder_info_extend
    with pytest.raises(AssertionError) as raised:
        prepare(batch, [array("q", range(48))], [64])
    assert "req.prefix_len == 0" in str(raised.traceback[-1].statement)


@pytest.mark.parametrize("argument", ["model_path", "kv_cache_dtype"])
def test_a_launch_argument_that_is_missing_is_named_and_stops_the_engine(
    argument: str, of: Callable[..., Namespace]
) -> None:
    with pytest.raises(KvdockError, match=f"the launch arguments {argument}"):
        of(**{argument: ...})


def test_launch_arguments_that_moved_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(runtime_context, "get_server_args")
    with pytest.raises(KvdockError, match=r"runtime_context\.get_server_args"):
        engine_api.check()


@pytest.mark.parametrize("build", ["0.5.23+cu128", "0.5.23.post1", "0.5.23.post2+cpu"])
def test_a_build_of_a_tested_release_is_that_release(
    build: str, monkeypatch: pytest.MonkeyPatch, of: Callable[..., Namespace]
) -> None:
    tested = of()
    monkeypatch.setattr(metadata, "version", lambda _: build)
    assert of() == tested


@pytest.mark.parametrize("other", ["0.5.24", "0.6.0rc1"])
def test_a_release_that_was_not_tested_keeps_its_pages_apart(
    other: str, monkeypatch: pytest.MonkeyPatch, of: Callable[..., Namespace]
) -> None:
    tested = of()
    monkeypatch.setattr(metadata, "version", lambda _: other)
    untested = of()
    assert "0.5.23" not in tested.page_format
    assert json.loads(untested.page_format)["engine_version"] == other


def test_this_sglang_has_everything_that_storage_uses() -> None:
    assert engine_api.missing(engine_api.STORAGE) == ()
