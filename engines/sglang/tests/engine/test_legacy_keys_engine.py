"""The names under which SGLang's own stores keep pages, from its real classes.

`kvdock_sglang.legacy_keys` spells them again, so that an old store can be read
once. These tests compare its spelling with what those classes write.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import zoo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

from kvdock import Shard, Sharding
from kvdock.errors import NamespaceError
from kvdock_sglang.host_pools import EngineContext, describe
from kvdock_sglang.legacy_keys import LegacyKeys, Spelling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvdock import PoolSpec

MODEL = "org/Model"
TP = Shard(tp_rank=1, tp_size=2)
PP = Shard(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2, layers=(0, 3))
CP = Shard(tp_rank=1, tp_size=2, cp_rank=1, cp_size=2)
DCP = Shard(tp_rank=1, tp_size=2, dcp_rank=1, dcp_size=2)
SHARDS = {"tp": TP, "pp": PP, "cp": CP}


class Library:
    """What SGLang calls of Mooncake's library; remembers the keys."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def setup(self, *_: object, **__: object) -> int:
        return 0

    def register_buffer(self, *_: object) -> int:
        return 0

    def put(self, key: str, value: bytes) -> int:
        self.held[key] = value
        return 0

    def get(self, key: str) -> Any:
        return self.held.pop(key)

    def is_exist(self, key: str) -> int:
        return int(key in self.held)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [self.is_exist(key) for key in keys]

    def batch_put_from(self, keys: Sequence[str], *_: object) -> list[int]:
        self.held.update(dict.fromkeys(keys))
        return [0] * len(keys)

    batch_put_from_multi_buffers = batch_put_from


class Replicas:
    """Options of a put, as far as SGLang sets them."""


@attrs.frozen(kw_only=True)
class Case:
    """One process of SGLang with its pools."""

    target: Any
    shard: Shard
    sidecars: dict[str, Any] = attrs.field(factory=dict)
    tag: str = ""
    split: int = 0

    def spec(self, name: str, pool: Any) -> PoolSpec:
        page = zoo.page_slots(self.target)
        heads = int(getattr(pool, "head_num", 0)) // self.split if self.split else 0
        place = EngineContext(shard=self.shard, page_tokens=page, head_group=heads)
        return describe(name, pool, place).spec

    def spelled(self, spelling: Spelling) -> list[str]:
        """Return the legacy names of one page of all pools."""
        target = self.spec("kv", self.target)
        keys = LegacyKeys(
            spelling=spelling,
            model=MODEL,
            target=target,
            shard=self.shard,
            tag=self.tag,
        )
        others = [self.spec(name, pool) for name, pool in self.sidecars.items()]
        return [name for pool in (target, *others) for name in keys.of("HASH", pool)]

    def config(self, **extra: object) -> HiCacheStorageConfig:
        """Tell the same to SGLang's classes."""
        shard, target = self.shard, self.spec("kv", self.target)
        if self.tag:
            extra["extra_backend_tag"] = self.tag
        return HiCacheStorageConfig(
            tp_rank=shard.tp_rank,
            tp_size=shard.tp_size,
            pp_rank=shard.pp_rank,
            pp_size=shard.pp_size,
            attn_cp_rank=shard.cp_rank,
            attn_cp_size=shard.cp_size,
            is_mla_model=target.sharding is not Sharding.HEADS,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=MODEL,
            tp_lcm_size=self.split * shard.tp_size or None,
            should_split_heads=bool(self.split),
            extra_config=dict(extra),
            dcp_rank=shard.dcp_rank,
            dcp_size=shard.dcp_size,
            logical_page_size=target.page_tokens if shard.dcp_size > 1 else None,
        )

    def moves(self) -> list[PoolTransfer]:
        return [
            PoolTransfer(PoolName(name), zoo.slots(pool, [0]), keys=["HASH"])
            for name, pool in self.sidecars.items()
        ]


def as_files(case: Case, folder: Path) -> list[str]:
    """Store one page of all pools through SGLang's file store."""
    folder.mkdir()
    store = HiCacheFile(case.config(), str(folder))
    store.register_mem_pool_host(case.target)
    for name, pool in {"kv": case.target, **case.sidecars}.items():
        store.register_mem_host_pool_v2(pool, PoolName(name))
    assert store.set("HASH", case.target.get_data_page(0, flat=True))
    stored = store.batch_set_v2(case.moves())
    assert all(all(good) for good in stored.values())
    return [path.name for path in folder.iterdir()]


def as_objects(case: Case, library: Library) -> list[str]:
    """Store one page of all pools through SGLang's Mooncake store."""
    store = MooncakeStore(case.config(master_server_address="127.0.0.1:1"), case.target)
    store.register_mem_pool_host(case.target)
    for name, pool in {"kv": case.target, **case.sidecars}.items():
        store.register_mem_host_pool_v2(pool, PoolName(name))
    # Before any page, SGLang leaves a key of its own there.
    library.held.clear()
    assert store.batch_set_v1(["HASH"], zoo.slots(case.target, [0])) == [True]
    stored = store.batch_set_v2(case.moves()) if case.sidecars else {}
    assert all(all(good) for good in stored.values())
    return list(library.held)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Put the stand-in in the place of Mooncake's library."""
    made = Library()
    package: Any = ModuleType("mooncake")
    package.store = ModuleType("mooncake.store")
    package.store.MooncakeDistributedStore = lambda: made
    package.store.ReplicateConfig = Replicas
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", package.store)
    return made


def heads_and_states(shard: Shard) -> Case:
    sidecars = {
        "mamba": zoo.mamba_host(),
        "swa": zoo.mha_host(),
        "draft": zoo.mha_host(layers=1),
        "deepseek_v4_c4": zoo.compressed_host(),
    }
    return Case(target=zoo.mha_host(), shard=shard, sidecars=sidecars)


def latent(shard: Shard) -> Case:
    target, indexer = zoo.dsa_pair()
    sidecars = {"indexer": indexer, "draft": zoo.mla_host(layers=1, page=64)}
    return Case(target=target, shard=shard, sidecars=sidecars)


@pytest.mark.parametrize("build", [heads_and_states, latent])
@pytest.mark.parametrize("shard", SHARDS)
def test_files_are_called_as_sglang_calls_them(
    build: Callable[[Shard], Case], shard: str, tmp_path: Path
) -> None:
    case = build(SHARDS[shard])
    found = as_files(case, tmp_path / "store")
    assert sorted(found) == sorted(case.spelled(Spelling.WHOLE_PAGES))


@pytest.mark.parametrize("build", [heads_and_states, latent])
@pytest.mark.parametrize("shard", SHARDS)
def test_objects_are_called_as_sglang_calls_them(
    build: Callable[[Shard], Case], shard: str, library: Library
) -> None:
    case = build(SHARDS[shard])
    assert as_objects(case, library) == case.spelled(Spelling.COMPONENTS)


def test_a_tag_split_heads_and_convolutions_alone_are_spelled_alike(
    library: Library,
) -> None:
    conv_only = {"mamba": zoo.mamba_host(temporal=(0,))}
    tagged = Case(target=zoo.mha_host(), shard=TP, sidecars=conv_only, tag="prod")
    assert as_objects(tagged, library) == tagged.spelled(Spelling.COMPONENTS)
    split = Case(target=zoo.mha_host("page_head", heads=4), shard=TP, split=2)
    assert as_objects(split, library) == split.spelled(Spelling.COMPONENTS)


def test_pages_divided_by_token_are_spelled_alike(
    library: Library, tmp_path: Path
) -> None:
    case = Case(target=zoo.mla_host(dcp_rank=1, dcp_size=2), shard=DCP)
    assert as_files(case, tmp_path / "store") == case.spelled(Spelling.WHOLE_PAGES)
    assert as_objects(case, library) == case.spelled(Spelling.COMPONENTS)


def test_where_sglang_gives_one_name_to_different_bytes_nothing_is_migrated(
    library: Library, tmp_path: Path
) -> None:
    """Both ranks write other heads of the draft, under the same name."""
    sidecars = {"draft": zoo.mha_host(layers=1)}
    cases = [
        Case(
            target=zoo.mla_host(),
            shard=Shard(tp_rank=rank, tp_size=2),
            sidecars=sidecars,
        )
        for rank in range(2)
    ]
    names = [as_files(case, tmp_path / str(n)) for n, case in enumerate(cases)]
    assert sorted(names[0]) == sorted(names[1])
    with pytest.raises(NamespaceError, match="differs from rank to rank"):
        cases[0].spelled(Spelling.WHOLE_PAGES)
    # Its other store tells them apart.
    for case in cases:
        assert as_objects(case, library) == case.spelled(Spelling.COMPONENTS)
