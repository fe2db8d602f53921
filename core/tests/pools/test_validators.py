"""What an engine may hand over for a number, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvdock.errors import NamespaceError, PoolError, RegionError
from kvdock.geometry.region import Region
from kvdock.namespace import Namespace, namespace_digest, namespace_record
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec

GIVEN: dict[str, Any] = {
    "name": "kv",
    "kind": "mha",
    "parts": [Part("k", "f16", (8, 16), shard_axis=0)],
    "layers": range(2),
    "page_tokens": 16,
}
ALIKE: list[dict[str, Any]] = [
    {"layers": np.arange(2)},
    {"layers": [np.int64(0), np.uint8(1)]},
    {"page_tokens": np.int64(16)},
    {"interleave_tokens": np.int32(1)},
    {"head_group": np.int64(0)},
    {
        "parts": [Part("k", "f16", np.array([8, 16]), shard_axis=np.int64(0))]  # type: ignore[arg-type]  # as an engine may
    },
]


def digest(pool: PoolSpec) -> str:
    return namespace_digest(namespace_record(Namespace(model="m"), [pool]))


@pytest.mark.parametrize("changes", ALIKE, ids="-".join)
def test_numbers_of_another_library_are_the_same_numbers(
    changes: dict[str, Any],
) -> None:
    plain = PoolSpec(**GIVEN)
    alike = PoolSpec(**(GIVEN | changes))
    assert alike == plain
    assert digest(alike) == digest(plain)
    json.dumps(namespace_record(Namespace(model="m"), [alike]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 16.0}, "page_tokens is a whole number, not 16.0"),
        ({"page_tokens": "16"}, "page_tokens is a whole number, not '16'"),
        ({"page_tokens": True}, "page_tokens is a whole number, not True"),
        ({"page_tokens": 0}, "page_tokens must be at least 1, not 0"),
        ({"window_pages": 1.5}, "window_pages is a whole number"),
        ({"block_pages": None}, "block_pages is a whole number"),
        ({"group_pages": -1}, "group_pages must be at least 0, not -1"),
        ({"interleave_tokens": 1.0}, "interleave_tokens is a whole number"),
        ({"head_group": 4.0}, "head_group is a whole number"),
        ({"layers": [0.0, 1.0]}, "layers is a row of whole numbers"),
        ({"layers": 3}, "layers is a row of whole numbers, not 3"),
        ({"layers": [False, 1]}, "layers is a row of whole numbers"),
        ({"required": "no"}, "required is true or false, not 'no'"),
        ({"anchor": "yes"}, "anchor is true or false, not 'yes'"),
        ({"draft": 1}, "draft is true or false, not 1"),
        ({"name": 5}, "name 5 is not a valid name"),
    ],
)
def test_a_field_of_a_pool_that_is_no_such_thing_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        PoolSpec(**(GIVEN | changes))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": (8.0, 16)}, "shape is a row of whole numbers"),
        ({"shape": 8}, "shape is a row of whole numbers, not 8"),
        ({"shape": (8,), "shard_axis": 0.0}, "shard_axis is a whole number"),
    ],
)
def test_a_field_of_a_part_that_is_no_such_thing_is_refused_by_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        Part("k", "f16", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_rank": "0"}, "tp_rank is a whole number, not '0'"),
        ({"tp_size": 2.0}, "tp_size is a whole number, not 2.0"),
        ({"layers": (0, 1, 2)}, "are not a range of layer numbers"),
        ({"layers": 4}, "layers is a row of whole numbers, not 4"),
    ],
)
def test_a_field_of_a_shard_that_is_no_such_thing_is_refused_by_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        Shard(**given)


def test_a_region_has_a_whole_number_of_pages() -> None:
    pool = PoolSpec(**GIVEN)
    memory = bytearray(4 * pool.page_bytes(Shard()))
    alike = Region.of(pool, Shard(), [memory], np.int64(4))  # type: ignore[arg-type]  # as an engine may
    assert type(alike.pages) is int
    for wrong in (4.0, "4", True):
        with pytest.raises(RegionError, match=f"not {wrong!r}"):
            Region.of(pool, Shard(), [memory], wrong)  # type: ignore[arg-type]  # as an engine may


TEXTS = ("revision", "draft_model", "lora", "salt", "page_format")


@pytest.mark.parametrize("field", TEXTS)
def test_nothing_said_of_a_namespace_is_the_same_in_both_ways(field: str) -> None:
    given: dict[str, Any] = {field: None}
    assert Namespace(model="m", **given) == Namespace(model="m")


@pytest.mark.parametrize("field", ["model", *TEXTS])
@pytest.mark.parametrize("wrong", [b"a", ["a"], 3])
def test_a_namespace_is_made_of_text(field: str, wrong: object) -> None:
    given: dict[str, Any] = {"model": "m", field: wrong}
    with pytest.raises(NamespaceError, match=f"^{field} is text, not "):
        Namespace(**given)
