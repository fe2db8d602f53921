from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import KvdockError, NamespaceError
from kvdock.keys import (
    adapter_hashes,
    build_keys,
    check_hashes,
    check_suffixes,
    key_suffixes,
)
from kvdock.namespace import (
    Namespace,
    canonical,
    namespace_digest,
    namespace_record,
)
from kvdock.pools.enums import DType, Layout, ObjectUnit, Per, PoolKind
from kvdock.pools.layout import stored_objects
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard, every_shard
from kvdock.pools.spec import PoolSpec

K, V = (Part(name, DType.FP8_E4M3, (4, 16), shard_axis=0) for name in ("k", "v"))
KV = PoolSpec(
    name="kv",
    kind=PoolKind.MHA,
    parts=(K, V),
    layers=range(4),
    page_tokens=16,
    anchor=True,
)
DRAFT = attrs.evolve(KV, name="draft", anchor=False, draft=True, layers=(0,))
INDEXER = PoolSpec(
    name="indexer",
    kind=PoolKind.INDEXER,
    parts=(Part("indexer", DType.U8, (132,)),),
    layers=range(4),
    page_tokens=16,
)
MODEL = Namespace(
    model="m", revision="r", draft_model="d", lora="l", salt="s", page_format="f"
)
HASHES = ["00ff", "17ab"]


def keys_of(namespace: Namespace, pools: list[PoolSpec]) -> set[str]:
    """Return all keys of all ranks of a few deployments."""
    digest = namespace_digest(namespace_record(namespace, pools))
    return {
        key
        for tp_size in (1, 2, 4)
        for shard in every_shard(tp_size=tp_size)
        for pool in pools
        for key in build_keys(digest, HASHES, key_suffixes(pool, shard))
    }


@given(
    st.sampled_from([field.name for field in attrs.fields(Namespace)]),
    st.text(min_size=1, max_size=5),
)
def test_any_change_of_the_namespace_changes_every_key(field: str, value: str) -> None:
    changed = attrs.evolve(MODEL, **{field: f"other {value}"})
    pools = [KV, DRAFT, INDEXER]
    assert not keys_of(MODEL, pools) & keys_of(changed, pools)


Change = Callable[[PoolSpec], PoolSpec]

CHANGES: dict[str, Change] = {
    "another dtype of equal width": lambda p: attrs.evolve(
        p, parts=(attrs.evolve(K, dtype=DType.FP8_E5M2), V)
    ),
    "another shape of equal size": lambda p: attrs.evolve(
        p, parts=[attrs.evolve(part, shape=(8, 8)) for part in (K, V)]
    ),
    "an opaque encoding": lambda p: attrs.evolve(
        p, parts=(attrs.evolve(K, encoding="scaled"), V)
    ),
    "another order of parts": lambda p: attrs.evolve(p, parts=(V, K)),
    "other names of parts": lambda p: attrs.evolve(
        p, parts=(attrs.evolve(K, name="key"), V)
    ),
    "counted per page": lambda p: attrs.evolve(
        p, parts=[attrs.evolve(part, per=Per.PAGE) for part in (K, V)]
    ),
    "longer pages": lambda p: attrs.evolve(p, page_tokens=32),
    "draft layers packed behind the target's": lambda p: attrs.evolve(
        p, layers=range(5)
    ),
    "other layers of equal number": lambda p: attrs.evolve(p, layers=(0, 1, 2, 4)),
    "another order of bytes": lambda p: attrs.evolve(p, layout=Layout.PAGE_FIRST),
    "another kind": lambda p: attrs.evolve(p, kind=PoolKind.SWA),
    "another role": lambda p: attrs.evolve(p, draft=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_a_pools_bytes_changes_every_key_of_every_pool(
    change: Change,
) -> None:
    def keys(kv: PoolSpec) -> set[str]:
        others = [attrs.evolve(p, page_tokens=kv.page_tokens) for p in (DRAFT, INDEXER)]
        return keys_of(MODEL, [kv, *others])

    assert not keys(KV) & keys(change(KV))


SAME: dict[str, dict[str, Any]] = {
    "a layout of equal bytes": {"layout": Layout.LAYER_FIRST},
    "another hit policy": {"hit_policy": "trailing_pages", "window_pages": 2},
    "no longer required": {"required": False},
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_changes_no_byte_keeps_every_key(change: dict[str, Any]) -> None:
    changed = attrs.evolve(KV, anchor=False, **change)
    assert keys_of(MODEL, [changed]) == keys_of(MODEL, [attrs.evolve(KV, anchor=False)])


@given(
    st.sets(st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True), min_size=2),
    st.sampled_from(ObjectUnit),
    st.integers(1, 4),
)
def test_no_two_pools_share_a_key(
    names: set[str], unit: ObjectUnit, tp_size: int
) -> None:
    if tp_size == 3:
        tp_size = 4
    for shard in every_shard(tp_size=tp_size):
        suffixes = [
            suffix
            for name in sorted(names)
            for suffix in key_suffixes(
                attrs.evolve(KV, name=name, object_unit=unit), shard
            )
        ]
        assert len(set(suffixes)) == len(suffixes)


def test_a_digest_is_the_same_in_every_process_and_has_all_its_bits() -> None:
    record = namespace_record(MODEL, [KV, INDEXER])
    assert namespace_digest(record) == namespace_digest(
        dict(reversed(list(record.items())))
    )
    assert len(namespace_digest(record)) == 64
    # Stored data depends on it: a change of this value needs a new schema.
    assert canonical({"b": [1, True], "a": "é"}) == b'{"a":"\\u00e9","b":[1,true]}'
    assert namespace_digest(record) == (
        "d83ebbffedf12e6fb59406c04a7a2e40aaef9af33cf6411c9db609bae7e2e191"
    )


def test_the_salt_is_recorded_as_a_digest_only() -> None:
    record = namespace_record(attrs.evolve(MODEL, salt="open sesame"), [KV])
    assert b"sesame" not in canonical(record)
    assert "open sesame" not in repr(attrs.evolve(MODEL, salt="open sesame"))
    unsalted = namespace_record(attrs.evolve(MODEL, salt=""), [KV])
    assert unsalted["salt_sha256"] == ""


def test_a_salt_may_hold_half_a_character() -> None:
    salts = ["\ud800", "\udfff", "?"]
    digests = {
        namespace_digest(namespace_record(attrs.evolve(MODEL, salt=salt), [KV]))
        for salt in salts
    }
    assert len(digests) == len(salts)


@pytest.mark.parametrize("bad", ["", "../x", "a/b", "a b", "é", "a.b", "a\n"])
def test_a_page_hash_cannot_leave_its_place(bad: str) -> None:
    with pytest.raises(KvdockError, match="not made of letters and digits"):
        check_hashes(["00", bad, "ff"])
    check_hashes(["00", "ff"])
    check_hashes([])


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("", "looks like a page hash"),
        ("kv", "looks like a page hash"),
        ("./../../etc", "only letters, digits"),
        (".kv\x00", "only letters, digits"),
        ("." + "x" * 200, "only letters, digits"),
    ],
)
def test_a_suffix_that_could_break_out_is_refused(suffix: str, message: str) -> None:
    objects = stored_objects(KV, Shard())
    with pytest.raises(KvdockError, match=message):
        check_suffixes("mine", [(KV, [suffix], objects)])


def test_suffixes_are_one_for_each_object_and_never_shared() -> None:
    objects = stored_objects(KV, Shard())
    check_suffixes("mine", [(KV, [".a"], objects), (DRAFT, [".b"], objects)])
    with pytest.raises(KvdockError, match="2 suffixes for 1 objects"):
        check_suffixes("mine", [(KV, [".a", ".b"], objects)])
    with pytest.raises(KvdockError, match="'kv' and 'draft' the same suffix"):
        check_suffixes("mine", [(KV, [".a"], objects), (DRAFT, [".a"], objects)])


@pytest.mark.parametrize(
    "given",
    ["00ff", b"00", [b"00"], [0], ["00", None], 7, {"00"}, {"00": 1}, {}, iter(["00"])],
)
def test_hashes_that_are_no_row_of_strings_are_refused_in_our_words(given: Any) -> None:
    with pytest.raises(KvdockError, match="page hashes are a row") as raised:
        check_hashes(given)
    assert "hex" in raised.value.fix


def test_pages_of_an_adapter_have_hashes_of_their_own() -> None:
    alone = adapter_hashes(HASHES, "")
    one, other = (adapter_hashes(HASHES, name) for name in ("a", "b"))
    assert alone == HASHES
    assert len({*alone, *one, *other}) == 3 * len(HASHES)
    assert all(len(page) == 64 for page in one)
    check_hashes(one)
    assert adapter_hashes(list(reversed(HASHES)), "a") == list(reversed(one))


def test_an_adapter_and_a_hash_are_not_confused_where_they_meet() -> None:
    assert adapter_hashes(["bc"], "a") != adapter_hashes(["c"], "ab")
    nested = adapter_hashes(adapter_hashes(["c"], "b"), "a")
    assert nested != adapter_hashes(adapter_hashes(["c"], "a"), "b")


def test_hashes_of_an_adapter_are_the_same_in_every_process() -> None:
    assert adapter_hashes(["00ff"], "files:1") == [
        "87059879954470f8bfa18ac0f92dc0ed0335048553d70d11b0202d545056170b"
    ]


def test_a_namespace_without_a_model_is_refused() -> None:
    with pytest.raises(NamespaceError, match="would mix all models"):
        Namespace(model="")
