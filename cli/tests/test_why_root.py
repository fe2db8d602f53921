"""What a store on disk says by itself about the pages of a prefix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from shelf import attention, draft, hashes, patient

from kvdock import Attachment, Dock, Namespace, PoolSpec, Shard
from kvdock.geometry.region import Region
from kvdock_cli.main import _run

NAMES = hashes(6)
Why = Callable[..., tuple[int, str]]


def store(
    root: Path,
    pages: int = 6,
    *,
    space: Namespace | None = None,
    shard: Shard | None = None,
    pools: tuple[PoolSpec, ...] = (attention(),),
) -> str:
    """Store the first pages of a prefix; return the namespace's digest."""
    shard = shard or Shard()
    dock = Dock.load(require=["file"])
    plan = dock.plan(pools, shard, prefer=["file"])
    regions = {
        one.name: Region.of(
            one, shard, [np.ones((6, one.page_bytes(shard)), np.uint8)], 6
        )
        for one in pools
    }
    settings = {"file": {"root": str(root), "segment_bytes": "1 MiB", "free_space": 0}}
    space = space or Namespace(model="m")
    with Attachment.open(dock, plan, space, regions, settings, core=patient()) as cache:
        given = list(range(pages))
        cache.put(NAMES[:pages], {one.name: given for one in pools})
        return cache.namespace


@pytest.fixture
def why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Why:
    given = tmp_path / "hashes"
    given.write_text("\n".join(NAMES))

    def command(*words: object) -> tuple[int, str]:
        called = ["--root", tmp_path / "store", "--hashes", given, *words]
        monkeypatch.setattr("sys.argv", ["kvdock", "why", *map(str, called)])
        code = _run(as_json="--json" in words)
        assert isinstance(code, int)
        said = capsys.readouterr()
        return code, " ".join((said.out or said.err).split())

    return command


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_all_of_a_prefix(root: Path, why: Why) -> None:
    store(root)
    code, said = why()
    assert code == 0
    assert said.startswith("All 6 pages could be restored.")


def test_the_end_of_a_prefix_is_not_there(root: Path, why: Why) -> None:
    store(root, 4)
    code, said = why()
    assert code == 1
    assert said.startswith(
        "4 of 6 pages could be restored: pool kv lacks page 5 of 6: the store does "
        "not have it: it was not stored, or made way for other pages."
    )


def test_another_namespace_of_the_model_has_the_pages(root: Path, why: Why) -> None:
    mine = store(root, 2)
    store(root, space=Namespace(model="m", salt="tenant"))
    store(root, space=Namespace(model="other"))
    code, said = why("--namespace", mine[:12])
    assert code == 1
    assert said.startswith(
        "2 of 6 pages could be restored: pool kv lacks page 3 of 6: it is stored in "
        "another namespace (salt_sha256 differs)."
    )
    _, said = why("--namespace", mine[:12], "--json")
    found: Any = json.loads(said)
    assert [one["field"] for one in found["differences"]] == ["salt_sha256"]


def test_another_tp_size_has_the_pages(root: Path, why: Why) -> None:
    for rank in range(2):
        store(root, shard=Shard(tp_rank=rank, tp_size=2))
    code, said = why("--tp", 1)
    assert code == 1
    assert "it is stored by ranks that divide pages in another way." in said
    assert why()[0] == 0, "of the size that has most"


def test_a_rank_without_its_part_is_named(root: Path, why: Why) -> None:
    store(root, shard=Shard(tp_rank=0, tp_size=2))
    store(root, 3, shard=Shard(tp_rank=1, tp_size=2))
    code, said = why("--json", "--tp", 2)
    found: Any = json.loads(said)
    assert (code, found["restorable"], found["rank"]) == (1, 3, "1")


def test_a_draft_cuts_nothing(root: Path, why: Why) -> None:
    store(root, pools=(attention(), attrs.evolve(draft(), indices_from=None)))
    code, said = why()
    assert code == 0
    assert "draft" in said


def test_a_store_without_namespaces_is_said(root: Path, why: Why) -> None:
    root.mkdir()
    code, said = why()
    assert code == 2
    assert "the store holds no namespaces" in said
