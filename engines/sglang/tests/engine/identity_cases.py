"""What may differ between the engine that stores and the one that restores.

Each case is one life of a real engine over the store of another one. It asks the
same prompts twice: once as they are, once with a salt of its own, which nothing
stored can answer. Right is what a case says of the first round, hit or miss, and
in any case equal tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import lives

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_TOKENS = 16
HIT, MISS, REJECTED, LATE = "hit", "miss", "rejected", "late"


@attrs.frozen(kw_only=True)
class Case:
    """One difference.

    Args:
        name: What differs. In its engine's arguments and in what it does first, a text
            `MODEL` stands for the folder of the model.
        found: What is right: `HIT`, `MISS` or `REJECTED`.
        engine: Launch arguments of the engine that restores.
        edit: Changes the model's folder; returns where it lies then.
        storage: Settings of kvdock that differ.
        environ: Variables that differ.
        release: Makes another release of SGLang in a folder.
        both: Launch arguments of both engines. What the one answers that stores is
            then the cold answer: not every kind of request takes a salt.
        first: What another engine does over the same store before, with the model as
            it was: its launch arguments and its rounds.
        asks: What each request has besides its prompt.
        prompts: What is asked for.
    """

    name: str
    found: str
    engine: dict[str, Any] = attrs.field(factory=dict)
    edit: Callable[[Path], Path] | None = None
    storage: dict[str, Any] = attrs.field(factory=dict)
    environ: dict[str, str] = attrs.field(factory=dict)
    release: Callable[[Path], object] | None = None
    both: dict[str, Any] = attrs.field(factory=dict)
    first: tuple[dict[str, Any], list[dict[str, Any]]] | None = None
    asks: dict[str, Any] = attrs.field(factory=dict)
    prompts: list[list[int]] = lives.PROMPTS


def ask(world: lives.World, case: Case) -> dict[str, Any]:
    """Run a case; return what was found, and whether the tokens are the same."""
    if case is SPELLED:
        case = spelled(world)
    life = "".join(c if c.isalnum() else "-" for c in case.name)
    if case.first is not None:
        arguments, doing = case.first
        started_with(world, arguments).live(f"{life}-first", told(doing, world))
    model = case.edit(world.model) if case.edit else world.model
    restoring = attrs.evolve(
        started_with(world, {**case.both, **case.engine}),
        model=model,
        storage={**world.storage, **case.storage},
    )
    environ = dict(case.environ)
    if case.release:
        case.release(place := world.folder / "release")
        environ["PYTHONPATH"] = str(place)
    cold_salt = {**case.asks, "cache_salt": f"cold {case.name}"}
    rounds: list[dict[str, Any]] = [
        {"prompts": case.prompts, "generate": case.asks},
        {"prompts": case.prompts, "generate": cold_salt},
    ]
    try:
        if case.both:
            (cold,) = restoring.live(f"{life}-stores", rounds[:1], environ=environ)
            (first,) = restoring.live(life, rounds[:1], environ=environ)
            # SGLang counts no cached tokens where it answers with vectors.
            wanted = sum(len(one) // PAGE_TOKENS for one in case.prompts)
            for one in first:
                one["cached"] = pages_read(restoring, life) == wanted
        else:
            first, cold = restoring.live(life, rounds, environ=environ)
    except subprocess.TimeoutExpired as error:
        return {"found": LATE, "same": True, "why": f"no answer in {error.timeout:g} s"}
    except AssertionError as error:
        if "does not depend" in str(error):
            raise
        reasons = [line for line in str(error).splitlines() if "KvdockError" in line]
        return {"found": REJECTED, "same": True, "why": reasons or str(error)[-600:]}
    assert not any(one["cached"] for one in cold)
    cached = [one["cached"] for one in first]
    return {
        "found": HIT if all(cached) else MISS if not any(cached) else f"{cached}",
        "same": [a["tokens"] for a in first] == [b["tokens"] for b in cold],
    }


def started_with(world: lives.World, arguments: dict[str, Any]) -> lives.World:
    """Return a world whose engines have these launch arguments besides."""
    engine = {**world.tiny.engine, **told(arguments, world)}
    return attrs.evolve(world, tiny=attrs.evolve(world.tiny, engine=engine))


def told(words: Any, world: lives.World) -> Any:
    """Put the folder of the model in the place of its name."""
    return json.loads(json.dumps(words).replace("MODEL", str(world.model)))


def world_with(folder: Path) -> lives.World:
    """Make a model with weights of other formats beside its own, and an adapter."""
    import tiny_models

    model = tiny_models.make("llama", folder)
    other_formats(model)
    adapter(model)
    return lives.World(
        tiny=tiny_models.MODELS["llama"],
        model=model,
        folder=folder,
        storage={"plugin": "file", "root": str(folder / "store")},
    ).stored()


def other_formats(model: Path) -> None:
    """Write files that some load formats read in place of the model's own weights.

    None of them holds the same: one prefix would be followed by other tokens.
    """
    import numpy as np
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    shift = {name: value.roll(1, -1).contiguous() for name, value in weights.items()}
    torch.save(shift, model / "weights.pt")
    torch.save(shift, model / "weights.bin")
    save_file(shift, model / "consolidated.safetensors", metadata={"format": "pt"})
    copy = model / "np"
    copy.mkdir(exist_ok=True)
    for name, value in shift.items():
        with (copy / name).open("wb") as data:
            np.save(data, value.numpy())
    (copy / "weight_names.json").write_text(json.dumps(list(shift)))


def other_copy(model: Path) -> Path:
    """Replace SGLang's converted copy, as if it were of the weights before these."""
    import numpy as np

    for name in json.loads((model / "np" / "weight_names.json").read_text()):
        path = model / "np" / name
        value = np.load(path)
        with path.open("wb") as data:
            np.save(data, np.ascontiguousarray(np.flip(value, 0)))
    return model


def adapter(model: Path) -> None:
    """Write a LoRA adapter for the query and value projections of all layers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    heads = {
        "q_proj": config["num_attention_heads"],
        "v_proj": config["num_key_value_heads"],
    }
    drawn = torch.Generator().manual_seed(7)
    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors |= {
                f"{place}.lora_A.weight": torch.randn(8, hidden, generator=drawn),
                f"{place}.lora_B.weight": torch.randn(
                    count * width, 8, generator=drawn
                ),
            }
    folder = model / "adapter"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": sorted(heads),
        "base_model_name_or_path": "",
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))


def pages_read(world: lives.World, life: str) -> int:
    """Return how many pages a life has read from storage."""
    return sum(sum(one["ok"]) for one in world.moves(life) if one["what"] == "read")


def yarn(folder: Path) -> Path:
    """Switch YaRN on, as model cards recommend: by an edit of config.json."""
    return edited(
        folder,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    )


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def renamed(folder: Path) -> Path:
    shutil.rmtree(folder.with_name("another-name"), ignore_errors=True)
    return folder.rename(folder.with_name("another-name"))


def linked(folder: Path) -> Path:
    """Reach the folder by a link in another folder."""
    link = folder.with_name("links") / "current"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(folder)
    return link


def copied(folder: Path) -> Path:
    """Copy the files as a deployment does: their times are new."""
    shutil.rmtree(folder.with_name("copied"), ignore_errors=True)
    return shutil.copytree(
        folder, folder.with_name("copied"), copy_function=shutil.copyfile
    )


def retrained(folder: Path) -> Path:
    """Replace the weights by others of the same shapes."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        save_file(
            {name: value.flip(0).contiguous() for name, value in weights.items()},
            file,
            metadata={"format": "pt"},
        )
    return folder


def with_code(folder: Path) -> Path:
    """Add a file of code, as trust_remote_code would run."""
    (folder / "modeling_tiny.py").write_text("# another attention\n")
    return folder


def released(version: str, folder: Path) -> None:
    """Make a release of the installed code, with other lines that change no page."""
    import sglang

    shutil.copytree(
        Path(sglang.__file__).parent,
        folder / "sglang",
        copy_function=os.symlink,
    )
    below = folder / "sglang" / "srt" / "mem_cache"
    for file in [below / "memory_pool_host.py", *below.glob("pool_host/*.py")]:
        text = file.read_text()
        file.unlink()
        file.write_text(text.replace("\n    def ", "\n    # Another line.\n\n    def "))
    about = folder / f"sglang-{version}.dist-info"
    about.mkdir()
    text = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    (about / "METADATA").write_text(text)


UNRELATED: dict[str, Any] = {
    "served_model_name": "another-name",
    "random_seed": 7,
    "log_level": "info",
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
    "max_prefill_tokens": 2048,
    "schedule_policy": "lpm",
    "radix_eviction_policy": "lfu",
    "hicache_ratio": 3.0,
    "hicache_write_policy": "write_through_selective",
    "mem_fraction_static": 0.4,
    "max_total_tokens": 3072,
    "load_format": "safetensors",
    "prefill_attention_backend": "torch_native",
    "decode_attention_backend": "torch_native",
    "dtype": "float",
    "enable_metrics": True,
    "watchdog_timeout": 200,
    "stream_interval": 2,
    "num_continuous_decode_steps": 2,
}
"""Launch arguments that change no page, many at once."""

OTHERS = [
    [(5 * n + 9) % 500 + 4 for n in range(120)],
    [(13 * n + 1) % 500 + 4 for n in range(119)],
]
"""Prompts that the world's own store does not have."""

WITH_ADAPTER = {
    "enable_lora": True,
    "lora_paths": ["own=MODEL/adapter"],
    "lora_backend": "torch_native",
    "max_lora_rank": 8,
}

RESET = Case(
    name="the weights were reset at run time before",
    found=MISS,
    first=({}, [{"prompts": OTHERS, "first": ["weights", "reset_tensors"]}]),
    prompts=OTHERS,
)
CHECKED = Case(
    name="the weights were only read at run time before",
    found=HIT,
    first=({}, [{"prompts": OTHERS, "first": ["weights", "checksum"]}]),
    prompts=OTHERS,
)
ADAPTED = Case(
    name="the same adapter",
    found=HIT,
    first=(WITH_ADAPTER, [{"prompts": OTHERS, "generate": {"lora_path": "own"}}]),
    engine=WITH_ADAPTER,
    asks={"lora_path": "own"},
    prompts=OTHERS,
)
SPELLED = Case(
    name="another client spelled what stands for the adapter",
    found=MISS,
    engine=WITH_ADAPTER,
    asks={"lora_path": "own"},
    prompts=OTHERS,
)
"""`spelled` gives it the keys: they depend on the folder."""

SAMPLE = (
    Case(name="nothing differs", found=HIT),
    RESET,
    SPELLED,
    Case(name='{"load_format": "pt"}', found=MISS, engine={"load_format": "pt"}),
    Case(
        name="other arguments, and a link to the folder",
        found=HIT,
        engine=UNRELATED,
        edit=linked,
    ),
    Case(name="YaRN is switched on in config.json", found=MISS, edit=yarn),
    Case(name="the file of weights is replaced", found=MISS, edit=retrained),
)
"""What the tests run; `EVERY` is behind `make test-identity-sglang`."""


def spelled(world: lives.World) -> Case:
    """Let a client without an adapter send the mark of one as its own key.

    It knows the adapter's files, so it can work out what stands for them.
    """
    from engine_run import ALWAYS
    from sglang.srt.server_args import (
        ServerArgs,
        set_global_server_args_for_scheduler,
    )

    from kvdock_sglang import lora_identity

    arguments = told(WITH_ADAPTER, world)
    resolved = ServerArgs(model_path=str(world.model), **{**ALWAYS, **arguments})
    set_global_server_args_for_scheduler(resolved)
    identity = lora_identity._identity(world.model / "adapter")
    keys = [f"lora:{identity}", f"0:{len(identity)}:{identity}", identity]
    rounds = [{"prompts": OTHERS, "generate": {"extra_key": key}} for key in keys]
    return attrs.evolve(SPELLED, first=(WITH_ADAPTER, rounds))


def longrope(folder: Path) -> Path:
    """Give the model LongRoPE, whose long factors begin within its context."""
    pairs = 16
    return edited(
        folder,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * pairs,
            "long_factor": [8.0] * pairs,
        },
    )


def generation(folder: Path) -> Path:
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    return folder


_ONE_BY_ONE: tuple[tuple[str, dict[str, Any]], ...] = (
    *((HIT, {name: value}) for name, value in UNRELATED.items()),
    (HIT, {"disable_overlap_schedule": False}),
    (HIT, {"enable_cache_report": True}),
    (HIT, {"retraction_policy": "priority", "enable_priority_scheduling": True}),
    (HIT, {"hicache_write_policy": "write_back"}),
    (HIT, {"allow_auto_truncate": True}),
    (HIT, {"max_queued_requests": 9}),
    (HIT, {"priority_scheduling_preemption_threshold": 3}),
    (HIT, {"sleep_on_idle": True}),
    (HIT, {"context_length": 1024}),
    (MISS, {"weight_version": "2"}),
    (MISS, {"context_length": 512}),
    (MISS, {"json_model_override_args": '{"rope_theta": 5000.0}'}),
    (MISS, {"dtype": "bfloat16"}),
    (MISS, {"load_format": "dummy"}),
    (MISS, {"load_format": "npcache"}),
    (MISS, {"load_format": "mistral"}),
    (HIT, {"trust_remote_code": True}),
    (HIT, {"json_model_override_args": '{"max_position_embeddings": 4096}'}),
    (HIT, {"enable_lora": True, **WITH_ADAPTER}),
    (MISS, {"page_size": 32}),
    (MISS, {"model_loader_extra_config": '{"enable_multithread_load": true}'}),
)

LOSSY = (
    "NVIDIA_TF32_OVERRIDE",
    "ROCM_QUICK_REDUCE_QUANTIZATION",
    "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
    "SGLANG_USE_MODELSCOPE",
)

EVERY = (
    *SAMPLE,
    CHECKED,
    ADAPTED,
    Case(
        name="SGLang's converted copy of the weights is another one",
        found=MISS,
        first=({"load_format": "npcache"}, [{"prompts": OTHERS}]),
        engine={"load_format": "npcache"},
        edit=other_copy,
        prompts=OTHERS,
    ),
    *(Case(name=f"{name} is set", found=MISS, environ={name: "1"}) for name in LOSSY),
    Case(name="the folder has another name", found=HIT, edit=renamed),
    Case(name="a link leads to the folder", found=HIT, edit=linked),
    Case(name="the files were copied, known by header", found=MISS, edit=copied),
    Case(name="a file of code is added", found=MISS, edit=with_code),
    Case(name="generation_config.json is written", found=MISS, edit=generation),
    Case(
        name="variables that change no page",
        found=HIT,
        environ={"SGLANG_LOG_MS": "1", "SGLANG_HOST_IP": "127.0.0.1"},
    ),
    Case(
        name="a variable that is not listed",
        found=MISS,
        environ={"SGLANG_NEW_IN_A_RELEASE": "1"},
    ),
    Case(
        name="another build of the release, with other lines in its pools' code",
        found=HIT,
        release=partial(released, "0.5.23.post1+cu128"),
    ),
    Case(
        name="a release that was not tested",
        found=MISS,
        release=partial(released, "0.5.99"),
    ),
    Case(
        name="two replicas",
        found=HIT,
        engine={"dp_size": 2},
        environ={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    Case(
        name="a model of embeddings, the same", found=HIT, both={"is_embedding": True}
    ),
    Case(name="LongRoPE past its original context", found=REJECTED, edit=longrope),
    *(
        Case(name=json.dumps(given), found=found, engine=given)
        for found, given in _ONE_BY_ONE
    ),
)
"""Every difference that is tried behind `make test-identity`."""
