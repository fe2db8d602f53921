from __future__ import annotations

import pytest

from kvdock.errors import PoolError
from kvdock.pools.enums import DType, Per
from kvdock.pools.part import Part


def test_an_entry_counts_what_lies_above_at_and_below_the_divided_axis() -> None:
    part = Part("kv", DType.BF16, (2, 8, 128), shard_axis=1)
    assert (part.outer, part.units, part.row_bytes) == (2, 8, 256)
    assert part.entry_bytes == 2 * 8 * 128 * 2


def test_two_fp4_numbers_share_a_byte() -> None:
    assert Part("payload", DType.FP4_E2M1, (128,)).entry_bytes == 64
    with pytest.raises(PoolError, match="not a whole number of bytes"):
        Part("payload", DType.FP4_E2M1, (3,))


def test_a_part_may_be_empty() -> None:
    assert Part("temporal", DType.F32, (0, 128), Per.PAGE, 0).entry_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("k", DType.BF16, (-1, 2)), "negative extent"),
        (("k", DType.BF16, (2,), Per.TOKEN, 1), "shard_axis 1 is outside"),
        (("K", DType.BF16, (2,)), "'K' is not a valid name"),
        (("k/../v", DType.BF16, (2,)), "not a valid name"),
    ],
)
def test_an_impossible_part_is_refused(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        Part(*arguments)  # type: ignore[arg-type]  # one case after the other
