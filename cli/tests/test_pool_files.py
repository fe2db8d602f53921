from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdock import DType, HitPolicy, Part, Per, PoolSpec, Shard, Sharding
from kvdock_cli.output import UsageProblem
from kvdock_cli.pool_files import describe, from_words, read

KV = "name=kv,kind=mha,layers=4,heads=8,dim=128"
POOL = {"name": "kv", "kind": "mla", "layers": 2}
PARTS = [{"name": "kv", "dtype": "bf16", "shape": [576]}]


def pools(*texts: str, **more: Any) -> tuple[PoolSpec, ...]:
    return describe({"pools": list(map(from_words, texts)), **more}, where="x").pools


def test_heads_and_dim_stand_for_the_parts_of_attention() -> None:
    (pool,) = pools(KV)
    assert pool.parts == tuple(
        Part(name, DType.BF16, (8, 128), shard_axis=0) for name in ("k", "v")
    )
    assert pool.layers == (0, 1, 2, 3)
    assert pool.page_tokens == 64


def test_without_heads_nothing_is_divided() -> None:
    (pool,) = pools("name=kv,kind=mla,layers=2-4,dim=576,dtype=f16")
    assert pool.parts == (Part("kv", DType.F16, (576,)),)
    assert (pool.sharding, pool.layers) == (Sharding.REPLICATED, (2, 3))


def test_parts_may_be_spelt() -> None:
    words = "temporal:f32:16x64x64@0/page+conv_0:bf16:1024x3@0/page"
    _, pool = pools(
        KV,
        f"name=mamba,kind=mamba,layers=2,sharding=rank,parts={words},"
        "hit_policy=trailing_pages,window_pages=1,required=false",
    )
    assert pool.parts == (
        Part("temporal", DType.F32, (16, 64, 64), Per.PAGE, 0),
        Part("conv_0", DType.BF16, (1024, 3), Per.PAGE, 0),
    )
    assert (pool.hit_policy, pool.required) == (HitPolicy.TRAILING_PAGES, False)


def test_the_first_pool_is_the_anchor_unless_one_says_so() -> None:
    first, second = pools(KV, KV.replace("kv", "other"))
    assert (first.anchor, second.anchor) == (True, False)
    first, second = pools(KV, KV.replace("kv", "other") + ",anchor")
    assert (first.anchor, second.anchor) == (False, True)


def test_a_page_is_as_long_as_its_pool_says_or_as_all_of_them() -> None:
    assert pools(KV, page_tokens=16)[0].page_tokens == 16
    assert pools(f"{KV},page_tokens=8", page_tokens=16)[0].page_tokens == 8


def test_a_shard_takes_layers_as_a_list() -> None:
    given = {"pools": [from_words(KV)], "shard": {"tp_size": 2, "layers": [0, 2]}}
    assert describe(given, where="x").shard == Shard(tp_size=2, layers=(0, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name=kv,knd=mha", "pool 'kv': unknown key 'knd'. Did you mean 'kind'?"),
        ("name=kv,kind=mh,dim=8,layers=1", "'mh' is no PoolKind. Did you mean 'mha'?"),
        ("name=kv,kind=mamba,dim=8,layers=1", "a mamba pool needs its parts spelt"),
        ("name=kv,kind=mla,layers=a-b", "invalid literal for int"),
        ("name=kv,kind=mla,layers=1,parts=kv", "'kv' is no part"),
        ("name=kv,kind=mla,layers=1,heads=8", "`dim` is missing"),
        ("kind=mla,layers=1,dim=8", "pool '?': key 'name' is missing"),
        ("name=kv,kind=mla,dim=8", "pool 'kv': key 'layers' is missing"),
        ("name=KV,kind=mla,layers=1,dim=8", "name 'KV' is not a valid name"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        pools(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "there are no pools"),
        ({"pools": "kv"}, "there are no pools"),
        ({"pool": []}, "unknown key 'pool'. Did you mean 'pools'?"),
        ({"pools": [{}], "shard": {"tp": 1}}, "shard: unknown key 'tp'"),
        ({"pools": [3]}, "a pool is a table of keys, not 3"),
        ({"pools": [POOL | {"parts": [{"nam": "k"}]}]}, "part: unknown key 'nam'"),
        ({"pools": [POOL | {"parts": [{"name": "k"}]}]}, "key 'dtype' is missing"),
        ({"pools": [POOL | {"parts": [3]}]}, "a part is a table of keys, not 3"),
        ({"pools": [from_words(KV)], "shard": 3}, "shard is a table of keys, not 3"),
        ({"pools": [from_words(KV)], "shard": {"tp_size": 0}}, "tp_size must be"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageProblem) as caught:
        describe(given, where="file")
    assert message in str(caught.value)


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = tmp_path / "pools.toml"
    toml.write_text(
        "page_tokens = 32\n[shard]\ntp_size = 2\n[[pools]]\nname = 'kv'\n"
        "kind = 'mla'\nlayers = 2\n"
        "parts = [{name = 'kv', dtype = 'bf16', shape = [576]}]\n"
    )
    given = {
        "page_tokens": 32,
        "shard": {"tp_size": 2},
        "pools": [{"name": "kv", "kind": "mla", "layers": 2, "parts": PARTS}],
    }
    other = tmp_path / "pools.json"
    other.write_text(json.dumps(given))
    assert read(toml) == read(other) == given


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", "x ="), ("a.json", "{"), ("a.json", "[]"), ("a.toml", None)],
    ids=["toml", "json", "list", "missing"],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, text: str | None
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageProblem, match=name):
        read(path)
