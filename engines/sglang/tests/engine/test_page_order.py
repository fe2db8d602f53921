"""The order of bytes inside a page decides whether pages are interchangeable."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import test_families as families
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from kvdock import Shard
from kvdock.errors import RegionError
from kvdock_sglang.host_pools import KNOWN, EngineContext, describe
from kvdock_sglang.page_order import page_order, unprobed_code

if TYPE_CHECKING:
    from pathlib import Path


def order_of(family: str) -> str:
    name, build = zoo.FAMILIES[family]
    pool = build()
    dcp = int(getattr(pool, "dcp_size", 1))
    shard = Shard(tp_size=dcp, dcp_size=dcp)
    if dcp > 1:
        shard = Shard(
            tp_rank=pool.dcp_rank, tp_size=dcp, dcp_rank=pool.dcp_rank, dcp_size=dcp
        )
    place = EngineContext(shard=shard, page_tokens=zoo.page_slots(pool))
    return describe(name, pool, place).page_order


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_order_is_the_same_for_every_number_of_pages(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = order_of(family)
    monkeypatch.setattr(zoo, "SLOTS", 2 * zoo.SLOTS)
    assert order_of(family) == few


def test_every_order_of_bytes_has_a_name_of_its_own() -> None:
    """Layer by layer, or page by page: storage gets a page's bytes in one order."""
    layouts = [f"mha-{layout}" for layout in (*zoo.LAYOUTS, "page_head")]
    orders = {family: order_of(family) for family in layouts}
    assert orders.pop("mha-layer_first") == orders["mha-page_first_direct"]
    assert len(set(orders.values())) == len(orders)


@pytest.mark.parametrize("build", [zoo.mha_host, zoo.mla_host])
def test_pages_of_two_layouts_with_one_order_are_found_with_the_same_values(
    build: Callable[..., Any], tmp_path: Path
) -> None:
    keys, layers_first, pages_first = (
        families.hashes(2),
        build("layer_first"),
        build("page_first_direct"),
    )
    stored, loaded = [2, 0], [1, 3]
    config = families.config(tmp_path)
    zoo.fill(layers_first, 1)
    with families.attached(config, {"kv": layers_first}) as storage:
        slots = zoo.slots(layers_first, stored)
        assert storage.batch_set_v1(keys, slots) == [True, True]
    with families.attached(config, {"kv": pages_first}) as storage:
        slots = zoo.slots(pages_first, loaded)
        assert storage.batch_exists(keys) == 2
        assert storage.batch_get_v1(keys, slots) == [True, True]
    for one, other in zip(stored, loaded, strict=True):
        expected, loaded_page = (
            zoo.page(layers_first, one),
            zoo.page(pages_first, other),
        )
        assert torch.equal(expected, loaded_page)


def test_the_order_is_the_same_on_ranks_with_fewer_heads() -> None:
    """Also where another axis has as many entries as there are heads."""
    found = {
        describe(
            "kv",
            zoo.mha_host("page_head", heads=heads, layers=2),
            EngineContext(shard=Shard(tp_size=8 // heads), page_tokens=zoo.PAGE),
        ).page_order
        for heads in (1, 2, 4, 8)
    }
    assert len(found) == 1


def test_pages_that_another_release_orders_otherwise_are_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class, its addresses and its sizes are the same; only its code differs."""
    keys, pool = families.hashes(1), zoo.mha_host(heads=8, width=8)
    with families.attached(families.config(tmp_path), {"kv": pool}) as storage:
        assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
        assert storage.batch_exists(keys) == 1
    real = inspect.getsource

    def swapped(found: type) -> str:
        own, other = "self.head_num,", "self.head_dim,"
        text = real(found)
        return text.replace(own, "?").replace(other, own).replace("?", other)

    monkeypatch.setattr(inspect, "getsource", swapped)
    assert unprobed_code(type(pool))
    with families.attached(families.config(tmp_path), {"kv": pool}) as storage:
        assert storage.batch_exists(keys) == 0
        assert storage.batch_get_v1(keys, zoo.slots(pool, [0])) == [False]


def test_a_late_draft_that_another_release_orders_otherwise_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pool, draft = families.hashes(1), zoo.mla_host(), zoo.mha_host(layers=1)
    cfg = families.config
    move = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0]), keys=keys)
    with families.attached(cfg(tmp_path), {"kv": pool}, {"draft": draft}) as storage:
        assert storage.batch_set_v2([move]) == {"draft": [True]}
        assert storage.batch_get_v2([move]) == {"draft": [True]}
    real = inspect.getsource
    monkeypatch.setattr(
        inspect,
        "getsource",
        lambda found: real(found).replace("layer", "later", found is type(draft)),
    )
    with families.attached(cfg(tmp_path), {"kv": pool}, {"draft": draft}) as storage:
        assert storage.batch_get_v2([move]) == {"draft": [False]}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("    def ", "\n    # A comment.\n    def "),
        lambda text: text.replace(" = ", "  =  "),
        lambda text: text.replace("return self.size_per_token", "return 7"),
        lambda text: text.replace('"""', '"""Another text. ', 1),
    ],
    ids=["blanks and comments", "spaces", "a method that counts", "a docstring"],
)
def test_an_unrelated_line_of_another_release_keeps_the_hits(
    change: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pool = families.hashes(1), zoo.mha_host(heads=8, width=8)
    with families.attached(families.config(tmp_path), {"kv": pool}) as storage:
        assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
    real = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda found: change(real(found)))
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23.post3+cu128")
    with families.attached(families.config(tmp_path), {"kv": pool}) as storage:
        assert storage.batch_exists(keys) == 1
        assert storage.batch_get_v1(keys, zoo.slots(pool, [0])) == [True]


def test_the_code_of_every_pool_of_this_release_was_probed() -> None:
    for name in KNOWN:
        assert unprobed_code(pkgutil.resolve_name(name)) == "", name


def test_memory_whose_axes_are_exchanged_in_place_is_rejected() -> None:
    pool = zoo.mha_host("page_first_direct", heads=2, width=8)
    pool.kv_buffer = pool.kv_buffer.transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(RegionError, match="has strides"):
        page_order(pool, [pool.kv_buffer], pool.page_num)


def test_memory_without_the_heads_of_the_rank_is_rejected() -> None:
    pool = zoo.mha_host("page_first_direct", heads=2, width=8)
    memory = torch.empty(pool.kv_buffer.shape).transpose(-1, -2).contiguous()
    with pytest.raises(RegionError, match="has not the 2 heads"):
        page_order(pool, [memory], pool.page_num, divided=(-2, 2))


def test_a_class_without_source_text_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_: object) -> str:
        raise OSError("could not get source code")

    pool = zoo.mha_host()
    monkeypatch.setattr(inspect, "getsource", none)
    with pytest.raises(RegionError, match="cannot be read"):
        page_order(pool, [pool.kv_buffer], pool.page_num)
