"""What an engine's configuration says of its pages, and what it must not leave out."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import vllm_models
from exemption_lists import field_names, stale_exemptions

from kvdock.errors import KvdockError, NamespaceError, SettingsError
from kvdock.identity import identity_fields
from kvdock_vllm.exemptions import (
    EXEMPTIONS,
    LORA_EXEMPTIONS,
    REPORTED,
    ROTARY_THAT_READS_A_LENGTH,
    _rotary_files_that_read_a_length,
    counted_variables,
    ignored_files,
)
from kvdock_vllm.identity import Identity, identify, read
from kvdock_vllm.settings import collect

OWN = collect({"plugin": "file", "host_memory": "1 MiB"}, environ={}).own
Make = Callable[..., Any]


@pytest.fixture(scope="session")
def configured(lives: Any) -> Make:
    """Return what makes a real configuration of vLLM's for a tiny model."""
    from vllm.engine.arg_utils import EngineArgs

    made: dict[str, Any] = {}

    def make(family: str = "llama", **given: Any) -> Any:
        model = vllm_models.make(vllm_models.FAMILIES[family], lives.models)
        key = f"{family} {given}"
        if key not in made:
            engine = {
                "dtype": "float32",
                "max_model_len": 1024,
                "block_size": 32,
                "enforce_eager": True,
                **given,
            }
            arguments: Any = EngineArgs(model=str(model), **engine)
            made[key] = arguments.create_engine_config()
        return copy.deepcopy(made[key])

    return make


@pytest.fixture
def config(configured: Make) -> Any:
    return configured()


@pytest.fixture
def plan() -> Any:
    """Return vLLM's plan of an engine without groups."""
    return SimpleNamespace(
        hisparse_host_num_blocks=None,
        prefix_cacheable_group_ids=(),
        kv_cache_groups=[],
        kv_cache_tensors=[],
    )


def parts(config: Any) -> dict[str, object]:
    return identity_fields(config, EXEMPTIONS)


def put(config: Any, field: str, value: object) -> None:
    """Set a field, whatever vLLM's own validation would say."""
    *groups, name = field.split(".")
    owner = config
    for group in groups:
        owner = getattr(owner, group)
    vars(owner)[name] = value


def test_every_field_is_listed_as_harmless_or_separates(config: Any) -> None:
    held = [one for one in EXEMPTIONS if one.holds is None or one.holds(config)]
    names, separating = field_names(config), set(parts(config))
    listed = {name for name in names if any(one.covers(name) for one in held)}
    assert not separating & listed
    # A group that holds itself is described once.
    assert names - listed == separating
    assert len(names) > 400
    assert len(separating) > 150


def test_each_field_that_separates_makes_other_parts(config: Any) -> None:
    before = parts(config)
    held = [
        attrs.evolve(one, holds=None)
        for one in EXEMPTIONS
        if one.holds is None or one.holds(config)
    ]
    for name, value in before.items():
        if not isinstance(value, str | int | float | bool | None):
            continue
        if any(other.startswith(f"{name}.") for other in before):
            continue
        kept = read(config, name)
        put(config, name, "another")
        assert identity_fields(config, held) != before, name
        put(config, name, kept)
    assert identity_fields(config, held) == before


def test_a_field_that_a_release_brings_separates(config: Any) -> None:
    before = parts(config)
    put(config, "cache_config.brand_new", 1)
    assert parts(config) == {**before, "cache_config.brand_new": 1}


def test_no_exemption_names_a_field_that_vllm_does_not_have(configured: Make) -> None:
    draft = {"model": "", "num_speculative_tokens": 2, "method": "draft_model"}
    draft["model"] = configured().model_config.model
    names = field_names(configured("images"))
    names |= field_names(configured(speculative_config=draft))
    fp8 = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    names |= field_names(configured(**fp8))
    assert not stale_exemptions(EXEMPTIONS, names)
    lora = configured(enable_lora=True).lora_config
    assert not stale_exemptions(LORA_EXEMPTIONS, field_names(lora))


def test_one_rotary_embedding_reads_a_length() -> None:
    assert _rotary_files_that_read_a_length() == ROTARY_THAT_READS_A_LENGTH


@pytest.mark.parametrize(
    ("family", "counts"),
    [("llama", ""), ("long_rope", "counts"), ("tuned", "counts"), ("mla", "counts")],
)
def test_a_length_counts_where_a_part_of_the_model_reads_it(
    family: str, counts: str, configured: Make
) -> None:
    field = "model_config.max_model_len"
    assert (field in parts(configured(family))) == (counts == "counts")


def test_a_model_that_writes_into_its_description_is_the_same_before_and_after(
    configured: Make, plan: Any
) -> None:
    """Where one rank builds it, the scheduler sees it; where two do, it does not."""

    def found(family: str, rotary: str) -> Identity:
        config = configured(family)
        config.model_config.hf_config.rope_parameters["rope_type"] = rotary
        return identify(config, plan, OWN)

    assert found("mla", "yarn") == found("mla", "deepseek_yarn")
    assert found("mla", "yarn") != found("mla", "default")
    assert found("llama", "yarn") != found("llama", "deepseek_yarn")


def test_defaults_of_sampling_count_where_the_model_reads_them(
    configured: Make,
) -> None:
    field = "model_config.override_generation_config"
    assert field in parts(configured("tuned"))
    assert field not in parts(configured("llama"))


READ_AND_NOT_RUN = {
    "parallel_config.cp_kv_cache_interleave_size": 16,
    "attention_config.backend_per_kind": {"full": "FLASH_ATTN"},
    "attention_config.use_non_causal": True,
    "attention_config.indexer_kv_dtype": "fp8",
    "model_config.model_impl": "transformers",
    "model_config.quantization_config": {"ignore": ["a"]},
    "model_config.hf_config.rope_parameters": {"rope_theta": 5.0},
    "parallel_config.tensor_parallel_size": 2,
    "cache_config.block_size": 64,
    "parallel_config.ray_runtime_env": {"env_vars": {"VLLM_MLA_DISABLE": "1"}},
    "parallel_config.worker_cls": "vllm.v1.worker.gpu_worker.Worker",
}


@pytest.mark.parametrize("field", READ_AND_NOT_RUN)
def test_what_a_cpu_cannot_vary_separates(field: str, config: Any, plan: Any) -> None:
    before = identify(config, plan, OWN).namespace(OWN)
    put(config, field, READ_AND_NOT_RUN[field])
    assert identify(config, plan, OWN).namespace(OWN) != before


HARMLESS: dict[str, dict[str, Any]] = {
    "overrides that change nothing": {
        "hf_overrides": {"vocab_size": vllm_models.VOCABULARY}
    },
    "trust without code": {"trust_remote_code": True},
    "prompts as embeddings": {"enable_prompt_embeds": True},
    "what follows anyway": {"model_impl": "vllm", "runner": "generate"},
    "a revision of no code": {"code_revision": "0123"},
    "threads of a loader": {
        "model_loader_extra_config": {"enable_multithread_load": True}
    },
    "the platform's own worker": {
        "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
        "distributed_executor_backend": "mp",
    },
    "sequences": {"max_num_seqs": 7},
    "batched tokens": {"max_num_batched_tokens": 4096},
    "memory": {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 20},
    "seed": {"seed": 5},
    "scheduling": {"async_scheduling": False, "scheduling_policy": "priority"},
    "chunked prefill": {"enable_chunked_prefill": False, "max_model_len": 1000},
    "served name": {"served_model_name": "another"},
    "LoRA": {"enable_lora": True, "max_loras": 2},
    "compilation": {"enforce_eager": False},
    "loader": {"load_format": "safetensors"},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
    "sampling": {"max_logprobs": 5, "override_generation_config": {"top_k": 3}},
    "length": {"max_model_len": 512},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_page_changes_no_part(name: str, configured: Make) -> None:
    mine, other = parts(configured()), parts(configured(**HARMLESS[name]))
    assert {k: (mine.get(k), other.get(k)) for k in {*mine, *other}} == {
        k: (mine.get(k), mine.get(k)) for k in {*mine, *other}
    }


@pytest.mark.parametrize(
    ("family", "counts"),
    [("llama", False), ("gdn", True)],
    ids=["none", "experts"],
)
def test_replicas_count_where_they_divide_layers(
    family: str, *, counts: bool, configured: Make
) -> None:
    config = configured(family, **vllm_models.FAMILIES[family].engine)
    before = parts(config)
    put(config, "parallel_config.data_parallel_size", 2)
    assert (parts(config) != before) == counts


def test_two_engines_of_one_configuration_are_one(configured: Make, plan: Any) -> None:
    fp8 = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    mine, other = configured(**fp8), configured(**fp8)
    other.quant_config.online_quantization_time = 3.25
    assert identify(mine, plan, OWN) == identify(other, plan, OWN)


def test_random_weights_are_not_those_of_the_files(config: Any) -> None:
    before = parts(config)
    put(config, "load_config.load_format", "dummy")
    assert parts(config) != before


def test_variables_of_vllm_count_unless_they_are_about_places() -> None:
    known = ["VLLM_HOST_IP", "VLLM_KV_CACHE_LAYOUT", "VLLM_LOGGING_LEVEL", "HOME"]
    environ = {**dict.fromkeys(known, "1"), "VLLM_PORT_80_TCP": "of a cluster"}
    assert counted_variables(environ, known) == {"VLLM_KV_CACHE_LAYOUT": "1"}
    lossy = {"NVIDIA_TF32_OVERRIDE": "1", "ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}
    assert counted_variables({**lossy, "OMP_NUM_THREADS": "1"}, known) == lossy
    # vLLM sets these itself, anew in each engine.
    own = ["VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "VLLM_DIST_IDENT"]
    assert counted_variables(dict.fromkeys(own, "random"), own) == {}


def test_the_content_of_a_model_counts_and_neither_its_name_nor_its_place(
    config: Any, plan: Any, tmp_path: Path
) -> None:
    import shutil

    before = identify(config, plan, OWN)
    place = tmp_path / "elsewhere" / "another_name"
    shutil.copytree(config.model_config.model, place)
    for field in ("model", "tokenizer"):
        put(config, f"model_config.{field}", str(place))
    assert identify(config, plan, OWN) == before
    (place / "quantize_config.json").write_text("{}")
    changed = identify(config, plan, OWN)
    assert changed.revision != before.revision
    own = attrs.evolve(OWN, revision="mine")
    named = identify(config, plan, own)
    (place / "quantize_config.json").write_text('{"a": 1}')
    assert identify(config, plan, own) != named


def files_of(
    configured: Make, plan: Any, place: Path, family: str, name: str
) -> set[str]:
    """Return what stands for a model's files with a file of three contents."""
    import shutil

    config = configured(family)
    shutil.copytree(config.model_config.model, place, dirs_exist_ok=True)
    for field in ("model", "tokenizer"):
        put(config, f"model_config.{field}", str(place))
    found = {identify(config, plan, OWN).revision}
    for number in (1, 2):
        (place / name).write_text(f'{{"a": {number}}}')
        found.add(identify(config, plan, OWN).revision)
    return found


@pytest.mark.parametrize(
    ("family", "name", "counts"),
    [
        ("llama", "generation_config.json", False),
        ("tuned", "generation_config.json", True),
        ("llama", "chat_template.jinja", False),
        ("llama", "tokenizer_config.json", False),
        ("images", "tokenizer_config.json", True),
        ("images", "chat_template.jinja", True),
        ("llama", "notes.json", False),
        ("images", "notes.json", True),
        ("llama", "hf_quant_config.json", True),
        ("llama", "model.safetensors.index.json", True),
        ("llama", "modeling_own.py", True),
    ],
)
def test_a_file_counts_where_a_part_of_the_engine_may_read_it(
    family: str, name: str, *, counts: bool, configured: Make, plan: Any, tmp_path: Path
) -> None:
    found = files_of(configured, plan, tmp_path / "model", family, name)
    assert len(found) == (3 if counts else 1)


def test_every_json_file_that_vllm_names_counts_or_is_listed(config: Any) -> None:
    """vLLM's code itself is searched: a release that opens another file shows here."""
    import vllm

    ignored = ignored_files(config.model_config)
    root = Path(vllm.__file__).parent
    name = re.compile(r"""["']([\w.-]+\.json)["']""")
    opened = set()
    for part in ("config", "model_executor", "models", "transformers_utils"):
        for file in (root / part).rglob("*.py"):
            opened |= set(name.findall(file.read_text(encoding="utf-8")))
    assert {one for one in opened if ignored(one)} == {
        # Of the tokenizer, and how a model of sentences is asked for.
        "added_tokens.json",
        "modules.json",
        "tokenizer.json",
        "tokenizer_config.json",
        # In folders of vLLM's own.
        "weight_names.json",
    }


def test_overrides_that_no_field_shows_count(configured: Make) -> None:
    field = "model_config.hf_overrides"
    assert field not in parts(configured(hf_overrides={"rms_norm_eps": 1e-5}))
    assert field in parts(configured(hf_overrides={"_attn_implementation": "eager"}))


def test_trust_counts_where_a_file_names_code(config: Any, tmp_path: Path) -> None:
    import shutil

    fields = {"model_config.trust_remote_code", "model_config.code_revision"}
    assert not fields & {*parts(config)}
    place = tmp_path / "model"
    shutil.copytree(config.model_config.model, place)
    put(config, "model_config.model", str(place))
    (place / "processor_config.json").write_text('{"auto_map": {}}')
    assert fields < {*parts(config)}
    (place / "processor_config.json").unlink()
    config.model_config.hf_config.auto_map = {}
    assert fields < {*parts(config)}


def test_loaders_of_other_files_of_a_folder_are_apart(
    config: Any, tmp_path: Path
) -> None:
    field = "load_config.load_format"
    put(config, "model_config.model", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert field not in parts(config)
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert field in parts(config)
    put(config, "model_config.model", "a/name-of-the-hub")
    assert field in parts(config)


def test_what_npcache_has_converted_counts(
    config: Any, plan: Any, tmp_path: Path
) -> None:
    import shutil

    place = tmp_path / "model"
    shutil.copytree(config.model_config.model, place)
    put(config, "model_config.model", str(place))
    (place / "np").mkdir()
    (place / "np" / "a").write_bytes(b"1")
    before = identify(config, plan, OWN).revision
    put(config, "load_config.load_format", "npcache")
    found = {before, identify(config, plan, OWN).revision}
    (place / "np" / "a").write_bytes(b"2")
    found.add(identify(config, plan, OWN).revision)
    assert len(found) == 3


def test_a_loader_that_reads_anything_needs_a_revision(config: Any, plan: Any) -> None:
    put(config, "load_config.load_format", "tensorizer")
    with pytest.raises(NamespaceError, match="tensorizer may read weights from any"):
        identify(config, plan, OWN)
    assert identify(config, plan, attrs.evolve(OWN, revision="mine")).revision


def test_what_lies_behind_hf_config_path_counts(
    config: Any, plan: Any, tmp_path: Path
) -> None:
    found = set()
    put(config, "model_config.hf_config_path", str(tmp_path))
    for text in ("{}", '{"a": 1}'):
        (tmp_path / "config.json").write_text(text)
        found.add(identify(config, plan, OWN).revision)
    assert len(found) == 2
    put(config, "model_config.hf_config_path", "/nowhere")
    with pytest.raises(NamespaceError, match="hf_config_path"):
        identify(config, plan, OWN)


def identity() -> Identity:
    return Identity(
        model="m",
        revision="r",
        draft="",
        page_format={"a": 1, **dict.fromkeys(REPORTED, "auto")},
        groups=(),
        stages=1,
        process="dp0",
    )


def test_what_workers_report_stands_for_what_was_asked_for() -> None:
    layers = {"one": {"by": "FLASH", "in": "torch.bfloat16"}}
    told = identity().with_layers([layers, layers])
    assert told.page_format == {
        "a": 1,
        "layers": {"by FLASH, in torch.bfloat16": ["one"]},
    }
    other = identity().with_layers([{"one": {"by": "TRITON", "in": "torch.bfloat16"}}])
    assert told != other
    assert identity().with_layers([]) == identity()
    with pytest.raises(KvdockError, match="two ranks"):
        identity().with_layers([layers, {"one": {"by": "TRITON"}}])


def test_hashes_with_a_seed_of_one_process_are_rejected(
    config: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(config, "cache_config.prefix_caching_hash_algo", "xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(SettingsError, match="PYTHONHASHSEED"):
        identify(config, plan, OWN)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    identify(config, plan, OWN)


def test_ranks_on_several_hosts_are_rejected(config: Any, plan: Any) -> None:
    put(config, "parallel_config.nnodes", 2)
    with pytest.raises(SettingsError, match="2 hosts"):
        identify(config, plan, OWN)


def test_the_way_that_weights_are_replaced_counts(config: Any, plan: Any) -> None:
    from vllm.config import WeightTransferConfig

    before = identify(config, plan, OWN).page_format
    put(config, "weight_transfer_config", WeightTransferConfig(backend="nccl"))
    after = identify(config, plan, OWN).page_format
    assert after != before
    put(config, "weight_transfer_config", WeightTransferConfig(backend="ipc"))
    assert identify(config, plan, OWN).page_format != after


def test_a_generation_is_a_part_of_the_namespace() -> None:
    other = attrs.evolve(identity(), generation="7")
    assert other.namespace(OWN) != identity().namespace(OWN)


def test_overrides_that_are_a_function_are_rejected(config: Any, plan: Any) -> None:
    put(config, "model_config.hf_overrides", lambda given: given)
    with pytest.raises(KvdockError, match="hf_overrides is a function"):
        identify(config, plan, OWN)


def test_the_code_of_a_model_counts_where_a_plugin_has_brought_it(
    config: Any, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identify(config, plan, OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    (name,) = config.model_config.architectures
    entry = SimpleNamespace(module_name="own_llama_of_a_plugin")
    monkeypatch.setitem(config.model_config.registry.models, name, entry)
    with pytest.raises(NamespaceError, match="own_llama_of_a_plugin"):
        identify(config, plan, OWN)
    found = {before.namespace(OWN)}
    for code in ("one = 1", "one = 2"):
        (tmp_path / "own_llama_of_a_plugin.py").write_text(code)
        importlib.invalidate_caches()
        found.add(identify(config, plan, OWN).namespace(OWN))
    assert len(found) == 3


def test_the_release_of_transformers_counts_where_it_has_the_code(
    config: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identify(config, plan, OWN)
    assert "transformers" not in before.page_format
    monkeypatch.setattr(
        type(config.model_config), "using_transformers_backend", lambda _: True
    )
    assert "transformers" in identify(config, plan, OWN).page_format


def test_code_of_another_model_counts_where_it_may_run(
    config: Any, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "org" / "code"
    place.mkdir(parents=True)
    (place / "modeling.py").write_text("a = 1")
    monkeypatch.chdir(tmp_path)
    auto_map = {"AutoModel": "org/code--modeling.Model"}
    config.model_config.hf_config.auto_map = auto_map
    assert "code of org/code" not in identify(config, plan, OWN).page_format
    put(config, "model_config.trust_remote_code", value=True)
    assert "code of org/code" in identify(config, plan, OWN).page_format


def test_an_encoder_and_a_decoder_are_rejected_before_vllms_own_assertion(
    config: Any, plan: Any
) -> None:
    put(config, "model_config.is_encoder_decoder", True)
    with pytest.raises(SettingsError, match="an encoder and a decoder"):
        identify(config, plan, OWN)


def test_a_field_that_a_vllm_does_not_have_is_an_error(config: Any) -> None:
    with pytest.raises(KvdockError, match="no such_config"):
        read(config, "such_config.field")


@pytest.fixture
def draft(tmp_path: Path, configured: Make, lives: Any) -> Any:
    import shutil

    model = vllm_models.make(vllm_models.FAMILIES["llama_draft"], lives.models)
    place = tmp_path / "draft"
    shutil.copytree(model, place)
    given = {"model": str(place), "num_speculative_tokens": 2, "method": "draft_model"}
    return configured(speculative_config=given), place


def test_how_many_tokens_a_draft_proposes_counts_nowhere(
    configured: Make, plan: Any, draft: Any
) -> None:
    config, place = draft
    given = {"model": str(place), "num_speculative_tokens": 3, "method": "draft_model"}
    other = configured(speculative_config=given)
    assert parts(other) == parts(config)
    assert identify(other, plan, OWN) == identify(config, plan, OWN)


def test_other_weights_of_a_draft_are_another_namespace(draft: Any, plan: Any) -> None:
    config, place = draft
    before = identify(config, plan, OWN)
    description = (place / "config.json").read_text()
    (place / "config.json").write_text(description + "\n ")
    assert identify(config, plan, OWN).draft == before.draft
    changed = description.replace("{", '{"rope": 1,', 1)
    (place / "config.json").write_text(changed)
    assert identify(config, plan, OWN).draft != before.draft
    assert before.draft.startswith("draft_model files:")
