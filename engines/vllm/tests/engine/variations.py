"""Two engines that differ in one thing, and whether they may share pages.

The second one looks for what the first one stored, and answers the same prompts
again under another salt, so that nothing is found: its own cold answer. Whatever it
found, both answers must be the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import vllm_models
from vllm_lives import Lives, tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

HIT, MISS = "hit", "miss"
COLD = ["", "cold"]
STORES = frozenset({"swap", "reload", "forget_host", "later_lora", "later_prompts"})
"""What the storing engine alone does."""

PER_PROCESS = 12
"""Engines of one process: their memory is not all given back."""

Edit = Callable[[Path], None]


@attrs.frozen(kw_only=True)
class Variation:
    """What differs between an engine that stores and one that looks.

    Args:
        name: What differs.
        family: The model of both.
        expect: Whether the second engine must find pages, or none.
        base: What both engines have, beyond the family's own.
        look: What the second one has instead.
        within: Returns what both engines have, of a copy of the model's folder.
        prepare: Changes the copy before the first one starts.
        edit: Changes it in place, between the two.
        elsewhere: Where the second one finds the folder instead, from its own place.
        environ: Variables of the second engine's process.
        code: Writes modules, and perhaps a plugin of vLLM's, to a folder that both
            can import from. Processes load plugins once, so these have their own.
        later_code: Writes them again, between the two.
        code_of_both: Whether the first engine has that folder, too.
        quick: Whether continuous integration runs it.
    """

    name: str
    family: str = "llama"
    expect: str = MISS
    base: Mapping[str, Any] = attrs.field(factory=dict)
    look: Mapping[str, Any] = attrs.field(factory=dict)
    within: Callable[[Path], Mapping[str, Any]] | None = None
    prepare: Edit | None = None
    edit: Edit | None = None
    elsewhere: Callable[[Path], Path] | None = None
    environ: Mapping[str, str] = attrs.field(factory=dict)
    code: Edit | None = None
    later_code: Edit | None = None
    code_of_both: bool = True
    quick: bool = False


@attrs.frozen
class Seen:
    """What the second engine did.

    Args:
        loaded: Pages that it restored.
        same: Whether its answer is its own cold one.
        error: Why it did not start, or "".
    """

    loaded: int
    same: bool
    error: str = ""

    def verdict(self) -> str:
        """Return what happened, in one word."""
        if self.error:
            return "error"
        if not self.same:
            return "WRONG"
        return HIT if self.loaded else MISS


def try_all(lives: Lives, folder: Path, chosen: Sequence[Variation]) -> dict[str, Seen]:
    """Run the engines of all variations; return what each second one did."""
    found: dict[str, Seen] = {}
    for number, batch in enumerate(batches(chosen)):
        found |= _try_batch(lives, folder / str(number), batch)
    return found


def batches(chosen: Sequence[Variation]) -> Iterable[list[Variation]]:
    """Cut variations so that the engines of a batch share variables and memory."""
    by_environ: dict[str, list[Variation]] = {}
    for one in chosen:
        alone = one.name if one.code is not None else ""
        key = json.dumps([alone, dict(one.environ)], sort_keys=True)
        by_environ.setdefault(key, []).append(one)
    for alike in by_environ.values():
        for first in range(0, len(alike), PER_PROCESS):
            yield alike[first : first + PER_PROCESS]


def _try_batch(
    lives: Lives, folder: Path, batch: Sequence[Variation]
) -> dict[str, Seen]:
    stores: dict[str, dict[str, Any]] = {}
    looks: dict[str, dict[str, Any]] = {}
    edits: list[Callable[[], object]] = []
    for number, one in enumerate(batch):
        model = vllm_models.make(vllm_models.FAMILIES[one.family], lives.models)
        if one.prepare or one.within or one.edit or one.elsewhere:
            model = _copied(model, folder / f"model-{number}" / one.family)
        if one.prepare is not None:
            one.prepare(model)
        base = {"new_tokens": 8, **one.base}
        if one.within is not None:
            base = _merged(base, one.within(model))
        name = json.dumps([one.family, str(model), base], sort_keys=True, default=str)
        if name not in stores:
            root = folder / f"store-{len(stores)}"
            root.mkdir(parents=True, mode=0o700)
            stores[name] = _phase(lives, one.family, name, root, model, base)
        root = Path(stores[name]["storage"]["root"])
        if one.edit is not None:
            edits.append(partial(one.edit, model))
        given = _merged(base, {**one.look, "salts": COLD, "rounds": 2})
        given = {key: value for key, value in given.items() if key not in STORES}
        given["prompts"] = base.get("later_prompts", base.get("prompts"))
        if given["prompts"] is None:
            del given["prompts"]
        given["may_fail"] = True
        place = one.elsewhere(model) if one.elsewhere is not None else model
        looks[one.name] = _phase(lives, one.family, one.name, root, place, given)
    life = folder.name.replace("/", "-")
    before, environ = _environments(folder / "code", batch[0])
    if batch[0].later_code is not None:
        edits.append(partial(batch[0].later_code, folder / "code"))
    lives.run(f"store-{life}", list(stores.values()), environ=before, timeout_s=1500)
    for edit in edits:
        edit()
    found = lives.run(
        f"look-{life}", list(looks.values()), environ=environ, timeout_s=1500
    )
    return {name: _seen(did) for name, did in found.items()}


def _phase(
    lives: Lives,
    family: str,
    name: str,
    root: Path,
    model: Path,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    deadlines = {"exists": "30 s", "get": "60 s", "put": "60 s"}
    storage = {
        "plugin": "file",
        "root": str(root),
        "free_space": "1 MiB",
        "core": {"deadlines": deadlines},
        **given.get("storage", {}),
    }
    more = {key: one for key, one in given.items() if key not in ("storage", "engine")}
    phase = lives.phase(family, name, storage, **more)
    phase["engine"] = {**phase["engine"], **given.get("engine", {})}
    phase["model"] = given.get("model", str(model))
    return phase


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with arguments of the engine and of storage one by one."""
    found = {**base, **more}
    for group in ("engine", "storage"):
        found[group] = {**base.get(group, {}), **more.get(group, {})}
    return found


def _environments(place: Path, one: Variation) -> tuple[dict[str, str], dict[str, str]]:
    """Write a variation's code; return the variables of its two processes."""
    environ = dict(one.environ)
    if one.code is None:
        return {}, environ
    place.mkdir(parents=True)
    one.code(place)
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = {"PYTHONPATH": os.pathsep.join(paths)}
    return path if one.code_of_both else {}, {**environ, **path}


def _copied(model: Path, place: Path) -> Path:
    shutil.copytree(model, place)
    return place


def _seen(did: Mapping[str, Any]) -> Seen:
    if "error" in did:
        return Seen(0, True, did["error"])
    warm, cold = did["rounds"]
    loaded = sum(n for page, n in did["pages"].items() if page.endswith("/load/ok"))
    return Seen(loaded, tokens(warm) == tokens(cold))


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Edit:
    """Return what changes one JSON file of a model."""

    def edit(model: Path) -> None:
        file = model / name
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    return edit


REMOTE = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own_llama"

    def __init__(self, **given):
        super().__init__(**given)
        self.rope_parameters = {"rope_type": "default", "rope_theta": THETA}
"""


def own_code(theta: float) -> Edit:
    """Return what gives a model a configuration of its own, in Python."""

    def edit(model: Path) -> None:
        text = REMOTE.replace("THETA", str(theta))
        (model / "configuration_own.py").write_text(text)
        change = edited(
            "config.json",
            lambda data: data.update(
                model_type="own_llama",
                auto_map={"AutoConfig": "configuration_own.OwnConfig"},
            ),
        )
        change(model)

    return edit


def described(theta: float) -> Edit:
    """Return what puts a description beside a model, for `hf_config_path`."""

    def edit(model: Path) -> None:
        below = model / "described"
        below.mkdir(exist_ok=True)
        data = json.loads((model / "config.json").read_text())
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        (below / "config.json").write_text(json.dumps(data))

    return edit


def adapters(model: Path) -> None:
    """Put two adapters beside a model, and a copy of the first in use."""
    for seed, name in enumerate(("one", "two", "used")):
        vllm_models.make_adapter(model, model / name, seed % 2)


def moved(model: Path) -> Path:
    """Return the same folder under another name."""
    return _copied(model, model.with_name("another_name"))


def linked(model: Path) -> Path:
    """Return a link to the same folder."""
    link = model.with_name("link")
    link.symlink_to(model)
    return link


_OWN = {
    "worker": """
from vllm.v1.worker.cpu_worker import CPUWorker

from {package}.amount import SHIFT


class Own(CPUWorker):
    def load_model(self, *args, **options):
        super().load_model(*args, **options)
        weight = self.model_runner.model.model.embed_tokens.weight
        weight.data.copy_(weight.data.roll(SHIFT, 0))
""",
    "operators": """
from vllm.model_executor.layers.layernorm import RMSNorm

from {package}.amount import SHIFT


def register():
    @RMSNorm.register_oot
    class Own(RMSNorm):
        def forward_cpu(self, x, residual=None):
            found = self.forward_native(x, residual)
            if residual is None:
                return found * (1 + SHIFT)
            return found[0] * (1 + SHIFT), found[1]
""",
    "model": """
from vllm.model_executor.models.llama import LlamaForCausalLM

from {package}.amount import SHIFT


def register():
    from vllm import ModelRegistry

    name = "{package}.model:Own"
    ModelRegistry.register_model("LlamaForCausalLM", name)


class Own(LlamaForCausalLM):
    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        weight = self.model.embed_tokens.weight
        weight.data.copy_(weight.data.roll(SHIFT, 0))
        return loaded
""",
}


def own_package(kind: str, shift: int, *, plugin: bool = False) -> Edit:
    """Return what writes a package `own_<kind>` whose `amount.py` decides everything.

    Args:
        plugin: Whether it is installed as a plugin of vLLM's, by its entry point.
    """
    package = f"own_{kind}"

    def write(place: Path) -> None:
        below = place / package
        below.mkdir(exist_ok=True)
        (below / "__init__.py").write_text("")
        (below / f"{kind}.py").write_text(_OWN[kind].replace("{package}", package))
        (below / "amount.py").write_text(f"SHIFT = {shift}\n")
        if plugin:
            about = place / f"{package}-1.0.dist-info"
            about.mkdir(exist_ok=True)
            (about / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
            point = f"{package} = {package}.{kind}:register"
            text = f"[vllm.general_plugins]\n{point}\n"
            (about / "entry_points.txt").write_text(text)

    return write


def beside_the_weights(model: Path) -> None:
    """Change every file of a model's folder that no page depends on."""
    for change in (sampled, worded, noted, indented):
        change(model)


def sampled(model: Path) -> None:
    """Write other defaults of sampling."""
    (model / "generation_config.json").write_text('{"temperature": 0.25}')


def worded(model: Path) -> None:
    """Write another chat template, and change a file of the tokenizer's."""
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (model / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    change = edited("tokenizer_config.json", lambda data: data.update(note="other"))
    change(model)


def noted(model: Path) -> None:
    """Write a further file."""
    (model / "notes.json").write_text('{"trained": "with care"}')


def indented(model: Path) -> None:
    """Write config.json with another indent."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))


def _tensors(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


def _embeddings_shifted(tensors: Mapping[str, Any]) -> dict[str, Any]:
    name = "model.embed_tokens.weight"
    return {**tensors, name: tensors[name].roll(1, 0).clone()}


def consolidated(model: Path) -> None:
    """Put other weights beside a model's, as Mistral names its own."""
    from safetensors.torch import save_file

    file = model / "consolidated.safetensors"
    save_file(_embeddings_shifted(_tensors(model)), file, metadata={"format": "pt"})


def with_stale_copy(model: Path) -> None:
    """Turn weights into a .bin, beside a converted copy of what it held before."""
    import numpy as np
    import torch

    tensors = _tensors(model)
    (model / "np").mkdir()
    for name, tensor in tensors.items():
        with (model / "np" / name).open("wb") as out:
            np.save(out, tensor.numpy())
    (model / "np" / "weight_names.json").write_text(json.dumps([*tensors]))
    torch.save(_embeddings_shifted(tensors), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def without_copy(model: Path) -> Path:
    """Return the same folder in another place, without the converted copy."""
    place = moved(model)
    shutil.rmtree(place / "np")
    return place
