from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdock import ThrottledLog
from kvdock_vllm.adapters import UNKNOWN, AdapterFiles


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    return tmp_path


def identity(files: AdapterFiles, path: object) -> str:
    files.begin("r", SimpleNamespace(lora_path=path))
    try:
        return files.of("r")
    finally:
        files.end("r")


def test_a_request_without_an_adapter_has_no_identity() -> None:
    files = AdapterFiles(ThrottledLog())
    files.begin("r", None)
    assert files.of("r") == ""


def test_an_adapter_that_is_replaced_in_place_is_another_one(adapter: Path) -> None:
    files = AdapterFiles(ThrottledLog())
    before = identity(files, adapter)
    assert identity(files, adapter) == before
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    assert identity(files, adapter) not in (before, UNKNOWN, "")
    assert files.of("r") == ""


def test_an_adapter_that_cannot_be_identified_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = AdapterFiles(ThrottledLog())
    for _ in range(3):
        assert identity(files, tmp_path / "nowhere") == UNKNOWN
    assert len(caplog.records) == 1
    assert "not stored" in caplog.text
