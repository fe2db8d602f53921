"""Pages that engines of several TP sizes share: `canonical_layout`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm_models
from test_families import on_files
from test_pressure import SHARED, loads, right_pages
from vllm_lives import Lives, tokens

pytestmark = pytest.mark.slow

SHARE = {"canonical_layout": True}


def phase(lives: Lives, family: str, size: int, folder: Path, name: str) -> Any:
    """Describe an engine of some ranks over a store that all sizes share."""
    folder.mkdir(exist_ok=True)
    engine = dict(vllm_models.FAMILIES[family].engine)
    if size > 1:
        engine |= {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}
    storage = {**on_files(folder), **SHARE}
    return lives.phase(family, name, storage, new_tokens=8, engine=engine)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param("llama_2", (1, 2), id="heads"),
        pytest.param("swa_full_2", (1, 2), id="windows beside full attention"),
        pytest.param("mla", (1, 2), id="latent pages"),
    ],
)
def test_engines_of_other_tp_sizes_restore_what_one_has_stored(
    family: str, sizes: tuple[int, ...], lives: Lives, tmp_path: Path
) -> None:
    """The smallest one and the largest one store, and all others restore."""
    ends = sizes[0], sizes[-1]
    stores = {size: tmp_path / f"by_{size}" for size in ends}
    before = set(SHARED.glob("vllm_dist_*"))
    try:
        found = lives.run(
            f"sizes-{family}",
            [
                phase(lives, family, size, stores[first], f"{first} {size}")
                for first in ends
                for size in (first, *(one for one in sizes if one != first))
            ],
            # Ranks wait for each other in a loop, which is slow on a busy machine.
            timeout_s=1800,
        )
    finally:
        # vLLM leaves the memory behind in which ranks on a CPU add their results.
        for path in set(SHARED.glob("vllm_dist_*")) - before:
            path.unlink()
    right = found[f"{ends[0]} {ends[0]}"]["rounds"][0]
    for first in ends:
        assert not loads(found[f"{first} {first}"])
        restored = [found[f"{first} {one}"] for one in sizes if one != first]
        for one in restored:
            assert set(loads(one)) == {
                f"{pool}/load/ok" for pool in vllm_models.FAMILIES[family].pools
            }
            assert loads(one) == loads(restored[0])
            assert all(answer["cached"] >= 96 for answer in one["rounds"][0])
        for size in sizes:
            answers = found[f"{first} {size}"]["rounds"][0]
            assert tokens(answers) == tokens(right)
    # Each page was stored once, by whichever size.
    assert len({right_pages(store) for store in stores.values()}) == 1


@pytest.mark.parametrize("family", ["mamba2", "chunked"])
def test_an_engine_with_a_group_that_sizes_cannot_share_does_not_start(
    family: str, lives: Lives, tmp_path: Path
) -> None:
    given = phase(lives, family, 1, tmp_path / "store", family)
    found = lives.run(f"alone-{family}", [{**given, "may_fail": True}])
    assert "canonical_layout: not every KV cache group" in found[family]["error"]
    assert not list((tmp_path / "store").glob("*/namespace.json"))
