"""What differs from the stored pages is a miss, in the engine itself."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_lives import Lives, tokens

DIFFERENCES: dict[str, dict[str, Any]] = {
    "weights": {"family": "llama_other"},
    "revision": {"storage": {"revision": "another"}},
    "deployment": {"storage": {"salt": "another"}},
    "tenant": {"salt": "another"},
    "dtype": {"engine": {"dtype": "bfloat16"}},
    "blocks": {"engine": {"block_size": 64}},
    "chunks": {"storage": {"blocks_per_chunk": 2}},
}


@pytest.fixture(scope="module")
def lived(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Store in one process; look for the pages in another, in every way."""
    root = tmp_path_factory.mktemp("misses")
    root.chmod(0o700)
    storage = {"plugin": "file", "root": str(root), "free_space": "1 MiB"}
    stored = lives.run("misses-store", [lives.phase("llama", "stored", storage)])
    phases = [lives.phase("llama", "same", storage)]
    for name, different in DIFFERENCES.items():
        more = dict(different)
        family = more.pop("family", "llama")
        own = {**storage, **more.pop("storage", {})}
        phases.append(lives.phase(family, name, own, **more))
    return {**stored, **lives.run("misses-look", phases)}


@pytest.mark.slow
def test_the_same_engine_finds_its_pages(lived: dict[str, Any]) -> None:
    same = lived["same"]
    assert same["pages"] == {"kv/load/ok": 6}
    assert tokens(same["rounds"][0]) == tokens(lived["stored"]["rounds"][0])


@pytest.mark.slow
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_an_engine_that_differs_finds_none(
    difference: str, lived: dict[str, Any]
) -> None:
    found = lived[difference]
    assert not [label for label in found["pages"] if "/load/" in label]
    assert [one["cached"] for one in found["rounds"][0]] == [0, 0]
