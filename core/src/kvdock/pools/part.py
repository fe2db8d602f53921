"""Parts: the physical components that a page is made of."""

from __future__ import annotations

import math

import attrs

from kvdock.errors import PoolError
from kvdock.pools.enums import DType, Per
from kvdock.pools.validators import identifier, int_tuple, integer
from kvdock.validators import as_int, as_int_tuple


@attrs.frozen
class Part:
    """One physical component of a page, for one layer.

    Args:
        name: `k`, `v`, `kv`, `temporal`, `conv_0`, `indexer` ...
        dtype: Logical element type; part of the namespace.
        shape: Extents of one token's or one page's entry in one layer, over
            all ranks. An extent may be 0: the part then takes no bytes.
        per: Whether `shape` is counted per token or per page.
        shard_axis: The axis of `shape` that is divided among ranks, or None.
        encoding: What opaque bytes mean, where type and shape do not say it:
            mixed rows, padding, a quantisation recipe. In the namespace.
    """

    name: str = attrs.field(validator=identifier)
    dtype: DType = attrs.field(converter=DType)
    shape: tuple[int, ...] = attrs.field(converter=as_int_tuple, validator=int_tuple)
    per: Per = attrs.field(default=Per.TOKEN, converter=Per)
    shard_axis: int | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(as_int),
        validator=attrs.validators.optional(integer),
    )
    encoding: str = ""

    def __attrs_post_init__(self) -> None:
        """Refuse shapes that cannot be stored."""
        if any(extent < 0 for extent in self.shape):
            raise PoolError(f"part {self.name!r} has a negative extent in {self.shape}")
        if self.shard_axis is not None and not 0 <= self.shard_axis < len(self.shape):
            raise PoolError(
                f"part {self.name!r}: shard_axis {self.shard_axis} is outside of "
                f"shape {self.shape}"
            )
        if self.row_bytes * 8 != self.row_bits:
            raise PoolError(
                f"part {self.name!r}: an innermost row of {self.shape} x {self.dtype} "
                "is not a whole number of bytes"
            )

    @property
    def units(self) -> int:
        """Extent of the divided axis (heads), or 1."""
        return 1 if self.shard_axis is None else self.shape[self.shard_axis]

    @property
    def row_bits(self) -> int:
        """Bits of what lies below the divided axis."""
        below = 0 if self.shard_axis is None else self.shard_axis + 1
        return math.prod(self.shape[below:]) * self.dtype.bits

    @property
    def row_bytes(self) -> int:
        """Bytes of what lies below the divided axis, rounded down."""
        return self.row_bits // 8

    @property
    def outer(self) -> int:
        """Product of the extents above the divided axis."""
        return (
            1 if self.shard_axis is None else math.prod(self.shape[: self.shard_axis])
        )

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry (a token's or a page's) of one layer, all ranks."""
        return self.outer * self.units * self.row_bytes
