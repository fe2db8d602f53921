"""Adapters are known in page hashes by what they hold, and base pages stay warm."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import controllers
import pytest
import zoo
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvdock_sglang import engine_api, lora_identity


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lora_identity, "_loaded", {})
    arguments = ServerArgs(model_path="dummy", device="cpu", page_size=zoo.PAGE)
    set_global_server_args_for_scheduler(arguments)
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


def adapter(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def load(ref: LoRARef, during: Any = lambda _: None) -> None:
    """Let the engine's manager load an adapter, all but its tensors."""
    manager = object.__new__(LoRAManager)
    manager.loras, manager.configs, manager.lora_refs = {}, {}, {}
    manager.num_pinned_loras = 0
    manager.base_hf_config = SimpleNamespace(vocab_size=8)
    manager.validate_new_adapter = lambda *_: None
    manager.load_lora_weights = during
    manager.create_lora_update_result = SimpleNamespace
    result = manager._load_lora_adapter(ref)
    assert result.success, result


def key_of(lora_id: str | None, extra_key: str | None = None) -> str | None:
    """Return the extra key of a request as the engine's scheduler builds it."""
    request = Req(
        "rid", "", [1, 2], SamplingParams(), lora_id=lora_id, extra_key=extra_key
    )
    found: str | None = request.extra_key
    return found


def loaded(name: str, path: Path, during: Any = lambda _: None) -> str:
    """Load an adapter under an id of its own; return its requests' extra key."""
    ref = LoRARef(lora_name=name, lora_path=str(path), pinned=False)
    load(ref, during)
    key = key_of(ref.lora_id)
    assert key
    return key


def test_both_patches_have_a_place_here() -> None:
    assert engine_api.in_place(lora_identity.LOAD)
    assert engine_api.in_place(lora_identity.REQUEST)


def test_one_adapter_has_one_key_under_every_name_path_and_process(
    tmp_path: Path,
) -> None:
    one = loaded("a", adapter(tmp_path / "a"))
    assert loaded("b", adapter(tmp_path / "b")) == one


def test_a_replaced_file_has_another_key_after_its_load_and_not_before(
    tmp_path: Path,
) -> None:
    """--lora-paths has one id for a name and a path, whatever lies there."""
    path = adapter(tmp_path / "a")
    fixed = LoRARef.deterministic_id("a", str(path))
    load(LoRARef(lora_id=fixed, lora_name="a", lora_path=str(path), pinned=False))
    first = key_of(fixed)
    adapter(path, b"another")
    assert key_of(fixed) == first
    load(LoRARef(lora_id=fixed, lora_name="a", lora_path=str(path), pinned=False))
    assert key_of(fixed) != first


def test_an_adapter_that_changes_while_it_is_loaded_is_never_found_again(
    tmp_path: Path,
) -> None:
    path = adapter(tmp_path / "a")
    keys = {loaded("a", path, lambda _: adapter(path, b"x" * 20)) for _ in range(2)}
    assert len(keys) == 2
    assert all("unknown" in key for key in keys)


def test_a_request_with_neither_key_nor_adapter_keeps_its_hashes(
    tmp_path: Path,
) -> None:
    loaded("a", adapter(tmp_path / "a"))
    assert key_of(None) is None
    assert key_of(None, "") == ""


def test_no_callers_key_spells_another_one_with_an_adapter(tmp_path: Path) -> None:
    """A key is text that any client sends; an adapter's mark is what it holds."""
    ref = LoRARef(lora_name="a", lora_path=str(adapter(tmp_path / "a")), pinned=False)
    load(ref)
    (identity,) = lora_identity._loaded.values()
    from_tensors = uuid.uuid4().hex
    adapters = {None: "", ref.lora_id: identity, from_tensors: from_tensors}
    callers = ["", "mine", f"lora:{identity}", identity, ref.lora_id, from_tensors]
    for _ in range(2):  # what the first keys became may be a caller's key as well
        callers += [
            spelled
            for lora_id in adapters
            for caller in callers
            if (spelled := key_of(lora_id, caller))
        ]
    pairs = [(lora_id, caller) for lora_id in adapters for caller in set(callers)]
    keys = {key_of(*pair) for pair in pairs}
    assert len(keys) == len(pairs) > 50


@pytest.mark.parametrize("caller", ["", "mine", "3:abc", ":", "12:"])
def test_the_callers_part_of_a_key_is_read_back(caller: str, tmp_path: Path) -> None:
    ref = LoRARef(lora_name="a", lora_path=str(adapter(tmp_path / "a")), pinned=False)
    load(ref)
    for lora_id in (None, ref.lora_id):
        assert lora_identity.callers_key(key_of(lora_id, caller) or "") == caller


def test_the_key_of_an_engine_without_the_patch_is_the_callers() -> None:
    assert lora_identity.callers_key("tenant") == "tenant"
