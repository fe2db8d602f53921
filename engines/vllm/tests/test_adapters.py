from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.throttled_log import ThrottledLog
from kvdock_vllm.adapters import UNKNOWN, AdapterFiles, watch_loads


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    return tmp_path


@pytest.fixture
def files() -> AdapterFiles:
    return AdapterFiles(ThrottledLog())


def asked(path: Path, name: str = "a", number: int = 1, **more: Any) -> Any:
    given = {
        "lora_name": name,
        "lora_int_id": number,
        "lora_path": str(path),
        "base_model_name": None,
        "load_inplace": False,
        "is_3d_lora_weight": False,
    }
    return SimpleNamespace(**{**given, **more})


def identity(files: AdapterFiles, adapter: Any) -> str:
    files.begin("r", adapter)
    try:
        return files.of("r")
    finally:
        files.end("r")


def replace(adapter: Path) -> None:
    """Write other weights of the same size, with the times of the old ones."""
    file = adapter / "adapter_model.safetensors"
    seen = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def test_a_request_without_an_adapter_has_no_identity(files: AdapterFiles) -> None:
    files.begin("r", None)
    assert files.of("r") == ""


def test_an_adapter_is_the_same_in_every_process(adapter: Path) -> None:
    found = {identity(AdapterFiles(ThrottledLog()), asked(adapter)) for _ in range(2)}
    assert len(found) == 1
    assert not found & {"", UNKNOWN}
    other = AdapterFiles(ThrottledLog(), "lora_target_modules: q_proj")
    assert identity(other, asked(adapter)) not in found


def test_an_adapter_whose_files_change_is_not_stored_until_it_has_another_name(
    adapter: Path, files: AdapterFiles, caplog: pytest.LogCaptureFixture
) -> None:
    before = identity(files, asked(adapter))
    replace(adapter)
    for _ in range(2):
        assert identity(files, asked(adapter)) == UNKNOWN
    assert "files have changed since it was loaded" in caplog.text
    assert len(caplog.records) == 1
    after = identity(files, asked(adapter, "b", 2))
    assert after not in (before, UNKNOWN, "")
    assert identity(AdapterFiles(ThrottledLog()), asked(adapter)) == after


def test_files_that_change_while_a_request_runs_stop_its_stores(
    adapter: Path, files: AdapterFiles
) -> None:
    files.begin("r", asked(adapter))
    files.check("r")
    assert files.of("r") != UNKNOWN
    replace(adapter)
    files.check("r")
    assert files.of("r") == UNKNOWN


def test_an_adapter_that_is_loaded_in_place_is_not_stored(
    adapter: Path, files: AdapterFiles
) -> None:
    files.begin("running", asked(adapter))
    assert files.of("running") != UNKNOWN
    files.loading(asked(adapter, load_inplace=True))
    assert files.of("running") == UNKNOWN
    assert identity(files, asked(adapter)) == UNKNOWN


def test_a_number_that_has_become_another_adapters_is_not_stored(
    adapter: Path, files: AdapterFiles
) -> None:
    """vLLM keeps the weights that it has under a number."""
    first = identity(files, asked(adapter))
    assert identity(files, asked(adapter, "b")) == UNKNOWN
    assert identity(files, asked(adapter)) == first


def test_an_adapter_loaded_before_its_first_request_is_what_was_loaded(
    adapter: Path, files: AdapterFiles
) -> None:
    files.loading(asked(adapter))
    replace(adapter)
    assert identity(files, asked(adapter)) == UNKNOWN


def test_an_adapter_that_cannot_be_identified_is_said_once(
    tmp_path: Path, files: AdapterFiles, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert identity(files, asked(tmp_path / "nowhere")) == UNKNOWN
    assert len(caplog.records) == 1
    assert "not stored" in caplog.text
    assert "lora_path" in caplog.text


def test_without_notice_of_loads_no_adapter_is_stored(adapter: Path) -> None:
    files = AdapterFiles(ThrottledLog(), loads_are_seen=False)
    assert identity(files, asked(adapter)) == UNKNOWN


def test_connectors_are_told_of_a_load_before_it_begins() -> None:
    told: list[str] = []

    class Core:
        def add_lora(self, lora_request: Any) -> bool:
            told.append(f"load {lora_request}")
            return True

    one = SimpleNamespace(
        adapter_loading=lambda adapter: told.append(f"read {adapter}")
    )
    assert watch_loads(Core, lambda _: [one])
    assert watch_loads(Core, lambda _: [one])
    assert Core().add_lora("a")
    assert told == ["read a", "load a"]


def test_a_vllm_that_loads_adapters_in_another_way_is_noticed() -> None:
    class Core:
        def add_lora(self, lora_request: Any, priority: int) -> bool:
            return bool(lora_request and priority)

    assert not watch_loads(Core, lambda _: [])
    assert not watch_loads(type("Empty", (), {}), lambda _: [])
