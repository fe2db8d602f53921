"""`kvdock store record` and `diff`: what stored bytes belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdock import DType, Namespace, PoolKind, PoolSpec
from kvdock.errors import NamespaceError
from kvdock.namespace import canonical, namespace_digest, namespace_record
from kvdock.pools import Part
from kvdock_cli.commands.store import diff, record
from kvdock_cli.output import UsageProblem

if TYPE_CHECKING:
    from tiny import Shelf


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "kv"
    made.mkdir(mode=0o700)
    return made


def stored(root: Path, *, dtype: DType = DType.BF16, lora: str = "") -> str:
    """Put a namespace's record where a store would; return its digest."""
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MLA,
        parts=(Part("kv", dtype, (576,)),),
        layers=range(61),
        page_tokens=64,
        anchor=True,
    )
    made = namespace_record(Namespace(model="org/Model", lora=lora), [pool])
    folder = root / namespace_digest(made)
    folder.mkdir(mode=0o700)
    (folder / "namespace.json").write_bytes(canonical(made))
    return folder.name


def test_the_real_command_shows_a_namespace(root: Path, shelf: Shelf) -> None:
    digest = stored(root)
    done = shelf.kvdock("store", "record", str(root), "--namespace", digest[:6])
    assert (done.stderr, done.returncode) == ("", 0)
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert shown["digest"] == digest
    assert shown["model"] == "org/Model"
    assert shown["pools.kv.layers"] == "0-60"
    assert shown["pools.kv.parts.kv.dtype"] == "bf16"


def test_a_difference_names_the_field(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = stored(root)
    right = stored(root, dtype=DType.FP8_E4M3, lora="adapter")
    assert diff(str(root), namespace=(left[:8], right[:8])) == 1
    assert capsys.readouterr().out == (
        "FIELD                    A     B\n"
        'lora                     ""    adapter\n'
        "pools.kv.parts.kv.dtype  bf16  fp8_e4m3\n"
    )
    assert diff(str(root), namespace=(left, right), json=True) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["ok"]) == ("kvdock.ns-diff/1", False)
    assert [one["field"] for one in data["differences"]] == [
        "lora",
        "pools.kv.parts.kv.dtype",
    ]


def test_the_only_namespaces_of_two_stores_need_no_names(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = stored(root)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    stored(other)
    assert diff(str(root), str(other)) == 0
    assert "interchangeable" in capsys.readouterr().out
    assert record(str(root), json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["digest"] == namespace_digest(data["record"]) == digest


def test_two_namespaces_of_one_store_are_compared_without_names(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(root)
    stored(root, lora="adapter")
    assert diff(str(root)) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("lora")


def test_a_store_of_several_namespaces_names_them(root: Path) -> None:
    first = stored(root)
    stored(root, lora="adapter")
    with pytest.raises(UsageProblem, match=f"holds 2 namespaces.*{first[:12]}"):
        record(str(root))
    stored(root, lora="another")
    with pytest.raises(UsageProblem, match=f"holds 3 namespaces.*{first[:12]}"):
        diff(str(root))


def test_a_record_that_was_altered_is_a_problem(root: Path) -> None:
    path = root / stored(root) / "namespace.json"
    path.write_text(path.read_text().replace("org/Model", "org/Other"))
    with pytest.raises(NamespaceError, match="altered or misplaced"):
        record(str(root))
