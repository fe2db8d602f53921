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
        name: What differs.
        found: What is right: `HIT`, `MISS` or `REJECTED`.
        engine: Launch arguments of the engine that restores.
        edit: Changes the model's folder; returns where it lies then.
        storage: Settings of kvdock that differ.
        environ: Variables that differ.
        release: Makes another release of SGLang in a folder.
        both: Launch arguments of both engines. What the one answers that stores is
            then the cold answer: not every kind of request takes a salt.
    """

    name: str
    found: str
    engine: dict[str, Any] = attrs.field(factory=dict)
    edit: Callable[[Path], Path] | None = None
    storage: dict[str, Any] = attrs.field(factory=dict)
    environ: dict[str, str] = attrs.field(factory=dict)
    release: Callable[[Path], object] | None = None
    both: dict[str, Any] = attrs.field(factory=dict)


def ask(world: lives.World, case: Case) -> dict[str, Any]:
    """Run a case; return what was found, and whether the tokens are the same."""
    model = case.edit(world.model) if case.edit else world.model
    engine = {**world.tiny.engine, **case.both, **case.engine}
    tiny = attrs.evolve(world.tiny, engine=engine)
    restoring = attrs.evolve(
        world, tiny=tiny, model=model, storage={**world.storage, **case.storage}
    )
    environ = dict(case.environ)
    if case.release:
        case.release(place := world.folder / "release")
        environ["PYTHONPATH"] = str(place)
    life = "".join(c if c.isalnum() else "-" for c in case.name)
    rounds: list[dict[str, Any]] = [
        {"prompts": lives.PROMPTS},
        {"prompts": lives.PROMPTS, "generate": {"cache_salt": f"cold {case.name}"}},
    ]
    try:
        if case.both:
            (cold,) = restoring.live(f"{life}-stores", rounds[:1], environ=environ)
            (first,) = restoring.live(life, rounds[:1], environ=environ)
            # SGLang counts no cached tokens where it answers with vectors.
            wanted = sum(len(one) // PAGE_TOKENS for one in lives.PROMPTS)
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

SAMPLE = (
    Case(name="nothing differs", found=HIT),
    Case(
        name="other arguments, and a link to the folder",
        found=HIT,
        engine=UNRELATED,
        edit=linked,
    ),
    Case(name="YaRN is switched on in config.json", found=MISS, edit=yarn),
    Case(name="the file of weights is replaced", found=MISS, edit=retrained),
)
"""What the tests run; `EVERY` is behind `make test-identity`."""


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
    (MISS, {"page_size": 32}),
    (MISS, {"model_loader_extra_config": '{"enable_multithread_load": true}'}),
)

EVERY = (
    *SAMPLE,
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
