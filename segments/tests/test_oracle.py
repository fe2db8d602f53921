"""The oracle reads and damages stored bytes past the store."""

from collections.abc import Callable
from typing import Any

import pytest

from kvdock.batch import Outcome
from kvdock_segments import SegmentOracle

OpenDepot = Callable[..., Any]


def test_an_oracle_sees_what_was_stored_and_nothing_else(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(3))
    oracle = SegmentOracle(depot.root)
    one, other = depot.keys([1, 7])
    assert oracle.peek(one) == depot.pages([1]).tobytes()
    assert oracle.peek(other) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda oracle, keys: oracle.poke(keys[0], 100, b"\xff\xfe"),
        lambda oracle, keys: oracle.resize(keys[0], 10),
        lambda oracle, keys: oracle.swap(keys[0], keys[1]),
        lambda oracle, keys: oracle.remove(keys[0]),
    ],
    ids=["poke", "resize", "swap", "remove"],
)
def test_damage_by_an_oracle_is_a_miss(
    open_depot: OpenDepot, damage: Callable[[SegmentOracle, list[str]], None]
) -> None:
    depot = open_depot()
    depot.put(range(3))
    damage(SegmentOracle(depot.root), depot.keys(range(3)))
    found = depot.get(range(3))
    assert found[0] == Outcome.CORRUPT
    assert found[2] == Outcome.OK


def test_a_slot_cannot_be_extended(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put([0])
    (key,) = depot.keys([0])
    with pytest.raises(NotImplementedError, match="extend a slot"):
        SegmentOracle(depot.root).resize(key, 9000)
