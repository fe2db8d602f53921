from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvdock.errors import NamespaceError
from kvdock_vllm.weights import files_digest, files_state, weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope": 1}')
    (folder / "model-1.safetensors").write_bytes(bytes(1 << 16))
    (folder / "model-2.safetensors").write_bytes(bytes(1 << 16))
    return folder


def test_one_byte_in_the_middle_of_a_file_is_another_model(model: Path) -> None:
    before = weights_identity(str(model))
    file = model / "model-2.safetensors"
    kept = file.stat()
    data = bytearray(file.read_bytes())
    data[1 << 15] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert weights_identity(str(model)) != before


def test_the_description_of_a_model_counts(model: Path) -> None:
    before = files_digest(model)
    (model / "config.json").write_text('{"rope": 2}')
    assert files_digest(model) != before


def test_the_same_files_in_another_folder_are_the_same_model(
    model: Path, tmp_path: Path
) -> None:
    before = weights_identity(str(model))
    other = model.rename(tmp_path / "elsewhere")
    assert weights_identity(str(other)) == before


def test_two_files_that_change_places_are_another_model(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(b"\1" * (1 << 16))
    before = files_digest(model)
    (model / "model-1.safetensors").rename(model / "spare")
    (model / "model-2.safetensors").rename(model / "model-1.safetensors")
    (model / "spare").rename(model / "model-2.safetensors")
    assert files_digest(model) != before


def test_a_snapshot_of_the_hub_is_known_by_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert weights_identity(str(snapshot)) == f"commit:{COMMIT}"


def test_a_name_of_the_hub_needs_a_commit() -> None:
    assert weights_identity("a/b", commit=COMMIT) == f"commit:{COMMIT}"
    assert weights_identity("a/b", revision=COMMIT) == f"commit:{COMMIT}"
    for revision in ("", "main"):
        with pytest.raises(NamespaceError, match="nothing says which weights"):
            weights_identity("a/b", revision=revision)


def test_a_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NamespaceError, match="no files of weights"):
        weights_identity(str(tmp_path))


def test_the_state_of_files_changes_with_them(model: Path) -> None:
    before = files_state(model)
    assert files_state(model) == before
    (model / "model-1.safetensors").write_bytes(b"\2" * (1 << 16))
    assert files_state(model) != before
