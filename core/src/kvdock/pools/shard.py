"""Shards: which slice of a model one process of a deployment owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, cast

import attrs

from kvdock.errors import PoolError
from kvdock.pools.validators import int_tuple, integer, positive
from kvdock.validators import as_int, as_int_tuple

Layers = tuple[int, int]
"""Half-open range of global layer numbers: first, past the last."""


def _range(layers: Layers) -> Layers:
    return cast("Layers", as_int_tuple(layers))


def _ordered(_: object, field: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
    int_tuple(_, field, value)
    if len(value) != 2 or not 0 <= value[0] < value[1]:  # noqa: PLR2004 - first, past the last
        raise PoolError(
            f"layers {value} are not a range of layer numbers",
            fix="Pass layers=(first, past_the_last) of this pipeline stage.",
        )


@attrs.frozen(kw_only=True)
class Shard:
    """The slice of the model that this process owns.

    Args:
        tp_rank: Rank among those that divide heads (tensor parallelism).
        tp_size: How many of them there are.
        pp_rank: Rank among those that divide layers (pipeline parallelism).
        pp_size: How many of them there are.
        cp_rank: Rank among those that divide a prompt (context parallelism).
        cp_size: How many of them there are.
        dcp_rank: Rank among those that divide the tokens of decoding.
        dcp_size: How many of them there are.
        layers: The half-open range of global layer numbers of this pipeline
            stage; None means that one stage holds all of them.
    """

    tp_rank: int = attrs.field(default=0, converter=as_int, validator=integer)
    tp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    pp_rank: int = attrs.field(default=0, converter=as_int, validator=integer)
    pp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    cp_rank: int = attrs.field(default=0, converter=as_int, validator=integer)
    cp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    dcp_rank: int = attrs.field(default=0, converter=as_int, validator=integer)
    dcp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    layers: Layers | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_range),
        validator=attrs.validators.optional(_ordered),
    )

    def __attrs_post_init__(self) -> None:
        """Refuse ranks outside their group and stages without layers."""
        for axis in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise PoolError(f"{axis}_rank {rank} is outside of {axis}_size {size}")
        if self.pp_size > 1 and self.layers is None:
            raise PoolError(
                f"pp_size is {self.pp_size} but the stage's layers are not given",
                fix="Pass layers=(first, past_the_last) of this pipeline stage.",
            )
        if self.tp_size % self.dcp_size:
            raise PoolError(
                f"dcp_size {self.dcp_size} does not divide tp_size {self.tp_size}"
            )
        if self.dcp_size > 1 and self.tp_rank % self.dcp_size != self.dcp_rank:
            raise PoolError(
                f"dcp_rank {self.dcp_rank} does not belong to tp_rank {self.tp_rank} "
                f"in groups of {self.dcp_size}",
                fix="A DCP rank is the TP rank modulo the DCP size.",
            )


def even_shares(total: int, ranks: int) -> tuple[int, ...]:
    """Divide a count among ranks; the first ones take what is left over.

    Source: SGLang 0.5.23, `layers/cp/utils.py:get_layer_shard_range`.
    """
    each, rest = divmod(total, ranks)
    return tuple(each + (rank < rest) for rank in range(ranks))


def stages_of(counts: Sequence[int]) -> tuple[Layers, ...]:
    """Turn the layer counts of pipeline stages into layer ranges.

    Raises:
        PoolError: If there is no stage, or one has no layer.
    """
    if not counts or min(counts) < 1:
        raise PoolError(f"pipeline stages of {list(counts)} layers are not a partition")
    return tuple(pairwise(accumulate(counts, initial=0)))


def every_shard(
    *,
    tp_size: int = 1,
    cp_size: int = 1,
    dcp_size: int = 1,
    stages: Sequence[Layers | None] = (None,),
) -> Iterator[Shard]:
    """Yield the shards of all processes of a deployment.

    Args:
        tp_size: Tensor-parallel ranks.
        cp_size: Context-parallel ranks.
        dcp_size: Decode-context-parallel ranks, taken out of the TP ranks.
        stages: Layer range of each pipeline stage; (None,) for one stage.
    """
    for (pp_rank, layers), cp_rank, tp_rank in product(
        enumerate(stages), range(cp_size), range(tp_size)
    ):
        yield Shard(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=len(stages),
            cp_rank=cp_rank,
            cp_size=cp_size,
            dcp_rank=tp_rank % dcp_size,
            dcp_size=dcp_size,
            layers=layers,
        )
