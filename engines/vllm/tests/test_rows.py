from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvdock import PoolKind
from kvdock.errors import KvdockError, SettingsError
from kvdock_vllm.pools import check_canonical
from kvdock_vllm.rows import (
    DeviceLayout,
    Group,
    check_layout,
    expected_layout,
    pool_names,
    pools,
    shares_of,
)


@attrs.frozen
class FullAttentionSpec:
    """As vLLM's, with what the layout is made of."""

    page_size_bytes: int
    real_page_size_bytes: int


def plan(*groups: tuple[FullAttentionSpec, list[str]], page: int) -> Any:
    """Return vLLM's plan: layers of all groups overlay each other."""
    blocks = 10
    tensors = [
        SimpleNamespace(
            layers=layers, layer_stride=page * blocks, block_stride=page, offset=0
        )
        for _, layers in groups
    ]
    return SimpleNamespace(
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=layers)
            for spec, layers in groups
        ],
    )


class MLAAttentionSpec(FullAttentionSpec):
    """The same on all ranks."""


def config(*, ranks: int, heads: int) -> Any:
    """As vLLM's, with what heads are divided by."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )


def offloading(canonical: int, agnostic: int) -> Any:
    """As vLLM's `OffloadingConfig`."""
    parallel = SimpleNamespace(is_parallelism_agnostic=bool(agnostic))
    return SimpleNamespace(canonical_layout=bool(canonical), parallel=parallel)


WHOLE = FullAttentionSpec(100, 100)
PADDED = FullAttentionSpec(100, 60)


def group(number: int, name: str = "FullAttentionSpec", **more: Any) -> Group:
    given = {"spec": "s", "layers": ("a",), "tokens": 16, "pieces": ((0, 100),), **more}
    return Group(number=number, spec_class=name, **given)


def test_groups_overlay_each_other_and_own_what_their_layers_use() -> None:
    found = expected_layout(
        plan((WHOLE, ["a", "b"]), (PADDED, ["c"]), page=100), [0, 1]
    )
    assert found.tensors == (100, 100)
    assert found.pieces(0, 1) == ((0, 100), (100, 100))
    assert found.pieces(1, 1) == ((0, 60),)
    assert found.pieces(1, 2) == ((0, 60), (100, 60))
    assert found.pieces(0, 2)[2:] == ((200, 100), (300, 100))


def test_layers_side_by_side_in_a_block_are_one_piece() -> None:
    given = plan((WHOLE, ["a", "b"]), page=100)
    tensor = given.kv_cache_tensors[0]
    tensor.layer_stride, tensor.block_stride = 100, 200
    found = expected_layout(given, [0])
    assert (found.tensors, found.pieces(0, 1)) == ((200,), ((0, 200),))


def test_a_layer_whose_page_is_not_known_owns_its_whole_block() -> None:
    """The scheduler's copy of a uniform group has the page of one layer."""
    found = expected_layout(plan((FullAttentionSpec(40, 40), ["a"]), page=100), [0])
    assert found.pieces(0, 1) == ((0, 100),)


def caches(tensors: list[int], *groups: list[tuple[int, int]], ranks: int = 1) -> Any:
    return SimpleNamespace(
        tensors=[SimpleNamespace(page_size_bytes=size) for size in tensors],
        group_data_refs=[
            [
                SimpleNamespace(
                    tensor_idx=at,
                    page_size_bytes=size,
                    mapping=SimpleNamespace(canonical_page_size_bytes=size * ranks),
                )
                for at, size in refs
            ]
            for refs in groups
        ],
    )


EXPECTED = DeviceLayout(tensors=(100, 100), owned=(((0, 100), (1, 60)),))


def test_device_tensors_that_are_as_expected_are_taken() -> None:
    check_layout(EXPECTED, caches([100, 100], [(0, 100), (1, 60)]), canonical=False)
    check_layout(EXPECTED, caches([100, 100], [(0, 100), (1, 50)]), canonical=False)


@pytest.mark.parametrize(
    "actual",
    [
        caches([100, 120], [(0, 100), (1, 60)]),
        caches([100], [(0, 100)]),
        caches([100, 100], [(0, 100), (1, 61)]),
        caches([100, 100], [(0, 100)], [(1, 60)]),
    ],
)
def test_device_tensors_with_bytes_that_would_not_be_stored_are_rejected(
    actual: Any,
) -> None:
    with pytest.raises(KvdockError, match="was expected"):
        check_layout(EXPECTED, actual, canonical=False)


def test_a_canonical_row_has_the_heads_of_all_ranks_without_gaps() -> None:
    given = plan((WHOLE, ["a", "b"]), (PADDED, ["c"]), page=100)
    given.kv_cache_groups[1].kv_cache_spec = MLAAttentionSpec(100, 60)
    shares = shares_of(config(ranks=2, heads=8), given, [0, 1])
    assert shares == (2, 1)
    found = expected_layout(given, [0, 1]).over_ranks(shares)
    assert found.tensors == (200, 200)
    assert found.pieces(0, 2) == ((0, 200), (200, 200), (400, 200), (600, 200))
    assert found.pieces(1, 2) == ((0, 60), (200, 60))


@pytest.mark.parametrize("heads", [8, 2])
def test_rows_of_one_two_and_four_ranks_are_the_same(heads: int) -> None:
    """Also where two of four ranks have the same head."""

    def row(ranks: int) -> DeviceLayout:
        page = 800 // min(ranks, heads)
        spec = FullAttentionSpec(page, page)
        given = plan((spec, ["a", "b"]), page=page)
        shares = shares_of(config(ranks=ranks, heads=heads), given, [0])
        return expected_layout(given, [0]).over_ranks(shares)

    assert row(4) == row(2) == row(1)
    assert row(4).pieces(0, 1) == ((0, 800), (800, 800))


def test_heads_that_are_fewer_than_ranks_are_stored_once() -> None:
    given = plan((WHOLE, ["a"]), page=100)
    assert shares_of(config(ranks=4, heads=2), given, [0]) == (2,)


def test_canonical_pages_of_a_worker_must_be_as_expected() -> None:
    expected = EXPECTED.over_ranks([2])
    good = caches([100, 100], [(0, 100), (1, 60)], ranks=2)
    check_layout(expected, good, canonical=True)
    for ranks, layers in ((1, [(0, 100), (1, 60)]), (2, [(0, 100), (1, 50)])):
        with pytest.raises(KvdockError, match="was expected"):
            check_layout(
                expected, caches([100, 100], layers, ranks=ranks), canonical=True
            )


@pytest.mark.parametrize(("canonical", "agnostic"), [(0, 0), (0, 1), (1, 1)])
def test_rows_of_one_rank_or_that_all_can_read_are_taken(
    canonical: int, agnostic: int
) -> None:
    check_canonical(offloading(canonical, agnostic))


def test_the_canonical_layout_is_rejected_where_a_group_has_none() -> None:
    with pytest.raises(SettingsError, match="canonical_layout: not every KV cache"):
        check_canonical(offloading(1, 0))


def test_pools_are_named_by_kind() -> None:
    names = pool_names(
        [
            group(0),
            group(2, "SlidingWindowSpec"),
            group(3, "SlidingWindowSpec"),
            group(4, "MambaSpec"),
        ]
    )
    assert names == {0: "kv", 2: "swa", 3: "swa_1", 4: "mamba"}


def test_a_group_of_an_unknown_class_is_rejected_by_name() -> None:
    with pytest.raises(KvdockError, match="CircularBufferSpec"):
        pool_names([group(0, "CircularBufferSpec")])


def test_a_page_has_the_pieces_of_all_ranks_and_nothing_between() -> None:
    found = pools(
        [group(0, pieces=((0, 100), (200, 60)))],
        row_bytes=1024,
        slot_bytes=400,
        ranks=2,
        whole=False,
    )
    pool, rows = found[0]
    assert pool.kind is PoolKind.MHA
    assert rows.runs == ((0, 100), (200, 60), (400, 100), (600, 60))
    assert rows.page_bytes == 320


def test_stages_store_their_whole_slots() -> None:
    """The first stage's plan says nothing about the layers of the others."""
    _, rows = pools([group(0)], row_bytes=1024, slot_bytes=400, ranks=2, whole=True)[0]
    assert rows.runs == ((0, 800),)


def test_layers_and_specifications_are_in_the_encoding_of_a_page() -> None:
    one, _ = pools([group(0)], row_bytes=128, slot_bytes=100, ranks=1, whole=False)[0]
    other, _ = pools(
        [group(0, layers=("b",))], row_bytes=128, slot_bytes=100, ranks=1, whole=False
    )[0]
    assert one.parts[0].encoding != other.parts[0].encoding
