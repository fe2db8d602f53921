from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdock import DType, Namespace, PoolKind, PoolSpec
from kvdock.errors import NamespaceError
from kvdock.namespace import canonical, namespace_digest, namespace_record
from kvdock.pools import Part
from kvdock_cli.commands.namespace import diff, show
from kvdock_cli.output import UsageProblem

if TYPE_CHECKING:
    from tiny import Shelf


def stored(root: Path, *, dtype: DType = DType.BF16, lora: str = "") -> Path:
    """Put a namespace's record where a store would."""
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MLA,
        parts=(Part("kv", dtype, (576,)),),
        layers=range(61),
        page_tokens=64,
        anchor=True,
    )
    record = namespace_record(Namespace(model="org/Model", lora=lora), [pool])
    folder = root / namespace_digest(record)
    folder.mkdir()
    (folder / "namespace.json").write_bytes(canonical(record))
    return folder


def test_the_real_command_shows_a_namespace(tmp_path: Path, shelf: Shelf) -> None:
    folder = stored(tmp_path)
    done = shelf.kvdock("ns", "show", str(folder))
    assert (done.stderr, done.returncode) == ("", 0)
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert shown["digest"] == folder.name
    assert shown["model"] == "org/Model"
    assert shown["pools.kv.layers"] == "0-60"
    assert shown["pools.kv.parts.kv.dtype"] == "bf16"


def test_a_difference_names_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = stored(tmp_path)
    right = stored(tmp_path, dtype=DType.FP8_E4M3, lora="adapter")
    assert diff(left, right) == 1
    assert capsys.readouterr().out == (
        "FIELD                    A     B\n"
        'lora                     ""    adapter\n'
        "pools.kv.parts.kv.dtype  bf16  fp8_e4m3\n"
    )
    assert diff(left, right / "namespace.json", json=True) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["ok"]) == ("kvdock.ns-diff/1", False)
    assert [one["field"] for one in data["differences"]] == [
        "lora",
        "pools.kv.parts.kv.dtype",
    ]


def test_the_same_namespace_is_said_to_be_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(tmp_path)
    assert diff(folder, folder) == 0
    assert "interchangeable" in capsys.readouterr().out
    assert show(folder, json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["digest"] == namespace_digest(data["record"]) == folder.name


def test_a_store_of_several_namespaces_names_them(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    with pytest.raises(UsageProblem, match=f"holds 1 namespaces.*{folder.name}"):
        show(tmp_path)


def test_a_record_that_was_altered_is_a_problem(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    path = folder / "namespace.json"
    path.write_text(path.read_text().replace("org/Model", "org/Other"))
    with pytest.raises(NamespaceError, match="altered or misplaced"):
        show(folder)


def test_a_folder_without_a_record_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="no namespace record"):
        show(tmp_path)
