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
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import sglang.srt
import torch
from exemption_lists import stale_exemptions
from sglang.srt import runtime_context
from sglang.srt.arg_groups import model_override_base
from sglang.srt.arg_groups.arg_utils import field_names
from sglang.srt.environ import EnvField, Envs
from sglang.srt.managers import schedule_batch
from sglang.srt.server_args import ServerArgs

from kvdock import AttachConfig
from kvdock.errors import KvdockError
from kvdock_sglang import engine_api, model_files
from kvdock_sglang.launch_arguments import EXEMPTIONS, identity_arguments
from kvdock_sglang.namespace import Launched, Ranks, launched, namespace
from kvdock_sglang.settings import AdapterSettings
from kvdock_sglang.variables import EXEMPTIONS as VARIABLES
from kvdock_sglang.variables import identity_variables, is_exempt

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
    exempt = {one.field: one.reason for one in EXEMPTIONS}
    counted = identity_arguments(base)
    for name in sorted(ARGUMENTS):
        other = identity_arguments({**base, name: "another-value"})
        assert (other == counted) is (name in exempt), name
    assert all(exempt.values())
    assert identity_arguments({**base, "new_in_a_release": 1}) != counted


def test_no_exemption_is_of_an_argument_that_does_not_exist() -> None:
    assert stale_exemptions(EXEMPTIONS, ARGUMENTS) == ()


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


def test_no_pattern_of_variables_is_stale_and_no_secret_counts() -> None:
    known = [one for one in vars(Envs).values() if isinstance(one, EnvField)]
    names = [one.name.removeprefix("SGLANG_") for one in known]
    # What it reads beside its registry.
    names += [
        found
        for path in Path(sglang.srt.__path__[0]).rglob("*.py")
        for found in re.findall(r"SGLANG_(\w+)", path.read_text())
    ]
    patterns = [one.field for one in VARIABLES]
    assert [one for one in patterns if not filter_names(names, one)] == []
    assert all(one.reason for one in VARIABLES)
    assert all(is_exempt(one.name) for one in known if one.secret)


def test_without_a_draft_model_nothing_about_speculation_counts(
    resolved: dict[str, Any],
) -> None:
    """N-grams propose tokens of the prompt itself, and have no pages."""
    off = identity_arguments(resolved)
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    assert identity_arguments({**resolved, **ngram}) == off
    assert identity_arguments({**resolved, "speculative_algorithm": "EAGLE"}) != off


def test_arguments_about_adapters_count_only_where_their_content_is_not_known(
    resolved: dict[str, Any], tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(bytes(64))
    paths = [SimpleNamespace(lora_path=str(adapter))]
    given = {**resolved, "enable_lora": True, "lora_paths": paths}
    assert identity_arguments(given) == identity_arguments(resolved)
    first = identity_arguments(given, adapters_known=False)
    assert first != identity_arguments(resolved, adapters_known=False)
    weights.write_bytes(b"other" + bytes(59))
    assert identity_arguments(given, adapters_known=False) != first


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

    def found(model: Any = None, **changes: object) -> Namespace:
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
        return namespace(name, ranks(0, 0, 0, 0), mine, launched(mine))

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
        ("speculative_algorithm", "EAGLE"),
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
