"""Make the pools of a model description, all of them or an error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import KvdockError, PoolError, did_you_mean
from kvdock.models.description import bind_arguments
from kvdock.pools.enums import ContextSplit, DType, Layout, Per, PoolKind, Sharding
from kvdock.pools.factories import FAMILIES
from kvdock.pools.layout import stored_objects
from kvdock.pools.shard import Layers, Shard, even_shares, every_shard, stages_of
from kvdock.pools.spec import PoolSpec, check_pools
from kvdock.pools.validators import boolean, int_tuple, non_negative, positive
from kvdock.validators import as_int, as_int_tuple, is_int

if TYPE_CHECKING:
    from kvdock.models.description import ModelDescription, Table

# Families whose rows are attention KV and follow its element type.
_KV_FAMILIES = ("mha", "k_only", "mla", "swa")

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")


MAX_PROCESSES = 1 << 16
"""A deployment of more is a slip of the keyboard, and takes hours to divide."""


def _positive_row(_: object, field: attrs.Attribute[Any], value: Any) -> None:  # noqa: ANN401 - what a caller gives
    int_tuple(_, field, value)
    if any(count < 1 for count in value):
        raise PoolError(f"{field.name} are at least 1 each, not {value}")


@attrs.frozen(kw_only=True)
class Deployment:
    """How an engine runs a model, as far as its pools depend on it.

    Args:
        pp_layers: Target layers of each stage; empty divides them evenly.
        dcp_size: Decode-context-parallel ranks; above 1, attention pools are
            divided by token.
        context: How context-parallel ranks divide attention pools.
        interleave_tokens: Consecutive tokens that one rank takes, where
            tokens are divided.
        page_tokens: Tokens of a page; 0 for the model's own.
        dtype: Element type of attention KV, or None for the model's own.
        share_tp: Other TP sizes that are to share objects of heads with this one.
        packed: Draft layers lie behind the target's in the same pools.
    """

    tp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    pp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    pp_layers: tuple[int, ...] = attrs.field(
        default=(), converter=as_int_tuple, validator=_positive_row
    )
    cp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    dcp_size: int = attrs.field(default=1, converter=as_int, validator=positive)
    context: ContextSplit = attrs.field(
        default=ContextSplit.REPLICATED, converter=ContextSplit
    )
    interleave_tokens: int = attrs.field(
        default=1, converter=as_int, validator=positive
    )
    page_tokens: int = attrs.field(default=0, converter=as_int, validator=non_negative)
    dtype: DType | None = attrs.field(
        default=None, converter=attrs.converters.optional(DType)
    )
    layout: Layout = attrs.field(default=Layout.PAGE_OBJECT, converter=Layout)
    share_tp: tuple[int, ...] = attrs.field(
        default=(), converter=as_int_tuple, validator=_positive_row
    )
    packed: bool = attrs.field(default=False, validator=boolean)

    def __attrs_post_init__(self) -> None:
        """Reject more processes than a deployment can have."""
        stages = max(self.pp_size, len(self.pp_layers))
        processes = self.tp_size * stages * self.cp_size
        if processes > MAX_PROCESSES:
            raise PoolError(
                f"a deployment of {processes} processes is beyond {MAX_PROCESSES}"
            )


@attrs.frozen
class Assembly:
    """A model's pools, and the shards of the deployment that they are for.

    Args:
        pools: All pools, anchor first.
        stages: Layer range of each pipeline stage, or (None,) for one.
    """

    pools: tuple[PoolSpec, ...]
    stages: tuple[Layers | None, ...]
    deployment: Deployment

    def shards(self) -> Iterator[Shard]:
        """Yield the shard of every process."""
        return every_shard(
            tp_size=self.deployment.tp_size,
            cp_size=self.deployment.cp_size,
            dcp_size=self.deployment.dcp_size,
            stages=self.stages,
        )

    def largest(self) -> Shard:
        """Return the shard of the process whose pages take the most bytes."""
        return max(
            self._firsts(),
            key=lambda shard: sum(pool.page_bytes(shard) for pool in self.pools),
        )

    def check(self) -> None:
        """Refuse pools that some process cannot hold its part of.

        Raises:
            PoolError: For the first pool that cannot be divided.
        """
        for shard in self._firsts():
            for pool in self.pools:
                stored_objects(pool, shard)
                pool.writes(shard)

    def _firsts(self) -> Iterator[Shard]:
        # What divides for one rank of a stage divides for all of it.
        for shard in self.shards():
            if not shard.tp_rank and not shard.cp_rank:
                yield shard


def assemble(
    model: ModelDescription, deployment: Deployment | None = None, *, draft: str = ""
) -> Assembly:
    """Build all pools of a model and check that every rank can hold its part.

    Without a deployment it is run by one process.

    Raises:
        PoolError: For the first pool that cannot be built or divided; then
            there are none.
    """
    plan = deployment or Deployment()
    page_tokens = plan.page_tokens or model.page_tokens
    where = f"model {model.name!r}"
    _check_dtype(where, plan.dtype, model, draft)
    build = _Builder(where, plan, page_tokens)
    pools = [build.pool(table, range(model.layers)) for table in model.pools]
    layers = model.layers
    if draft:
        if draft not in model.drafts:
            raise PoolError(
                f"{where} has no draft {draft!r}",
                fix=did_you_mean(draft, model.drafts)
                or f"It has {', '.join(model.drafts) or 'none'}.",
            )
        with_it = model.drafts[draft]
        numbers = range(layers, layers + with_it.layers)
        layers += with_it.layers
        for table in with_it.pools:
            own = build.pool(table, numbers, draft=True)
            if plan.packed:
                _pack(where, own, table.get("packs_into"), pools)
            else:
                pools.append(own)
    check_pools(pools)
    assembly = Assembly(tuple(pools), _stages(model, plan, layers), plan)
    assembly.check()
    return assembly


def _stages(
    model: ModelDescription, plan: Deployment, layers: int
) -> tuple[Layers | None, ...]:
    if plan.pp_size > model.layers:
        raise PoolError(
            f"{plan.pp_size} pipeline stages are not a partition of the "
            f"{model.layers} layers of model {model.name!r}"
        )
    counts = list(plan.pp_layers or even_shares(model.layers, plan.pp_size))
    if sum(counts) != model.layers or (
        plan.pp_size > 1 and plan.pp_size != len(counts)
    ):
        raise PoolError(
            f"stages of {counts} layers do not make up the {model.layers} layers of "
            f"model {model.name!r} in {max(plan.pp_size, len(counts))} stages"
        )
    if len(counts) == 1:
        return (None,)
    # A draft runs where the target ends.
    counts[-1] += layers - model.layers
    return stages_of(counts)


def _check_dtype(
    where: str, dtype: DType | None, model: ModelDescription, draft: str
) -> None:
    """Refuse an element type that no pool of the model would take notice of."""
    tables = [*model.pools]
    if draft in model.drafts:
        tables += model.drafts[draft].pools
    if dtype is not None and not any(_follows(table, dtype) for table in tables):
        raise PoolError(
            f"{where} has no pool that could be kept in {dtype}: its rows are of "
            "fixed bytes",
            fix="Leave the element type out, or describe its pools with `when`.",
        )


def _follows(table: Table, dtype: DType) -> bool:
    """Return whether a pool is another one in an element type."""
    when = table.get("when")
    said = isinstance(when, Mapping) and dtype in when
    return said or table.get("family") in _KV_FAMILIES


def _pack(where: str, own: PoolSpec, into: object, pools: list[PoolSpec]) -> None:
    """Append a draft pool's layers to a target pool."""
    for place, pool in enumerate(pools):
        if pool.name == into:
            if (pool.kind, pool.parts) != (own.kind, own.parts):
                raise PoolError(
                    f"{where}: pool {own.name!r} cannot be packed into {into!r}, "
                    "whose parts are others",
                    fix="Keep the draft in pools of its own.",
                )
            pools[place] = attrs.evolve(pool, layers=(*pool.layers, *own.layers))
            return
    raise PoolError(
        f"{where}: pool {own.name!r} is packed into no pool of the target",
        fix="Keep the draft in pools of its own.",
    )


@attrs.frozen
class _Builder:
    """Turns tables into pools for one deployment."""

    where: str
    plan: Deployment
    page_tokens: int

    def pool(
        self, table: Table, numbers: Sequence[int], *, draft: bool = False
    ) -> PoolSpec:
        """Build one pool; its layers are numbered from `numbers[0]`."""
        name = table.get("name")
        where = f"{self.where}: " + ("a pool" if name is None else f"pool {name!r}")
        given = dict(table)
        family = str(given.pop("family", ""))
        given.pop("packs_into", None)
        if family not in FAMILIES:
            raise PoolError(
                f"{where}: no family {family!r}",
                fix=did_you_mean(family, FAMILIES)
                or f"Known are {', '.join(FAMILIES)}.",
            )
        given |= self._for_dtype(where, family, given.pop("when", {}))
        if family == "mamba" and not self._shares(given.get("heads")):
            # One object a rank, as ranks of equal TP sizes have always stored it.
            given.pop("heads", None)
            given.pop("conv_channels", None)
        layers = _layers(where, given.pop("layers", "all"), numbers)
        if "page_tokens" in given:
            raise PoolError(
                f"{where}: page_tokens is one number for all pools of a model",
                fix="Give it beside `layers` of the model, or in the deployment.",
            )
        given.setdefault("layout", self.plan.layout)
        if draft:
            given |= {"draft": True, "required": False}
        constructor = FAMILIES[family]
        words = bind_arguments(
            where, constructor, given, besides=("layers", "page_tokens")
        )
        try:
            pool = constructor(layers=layers, page_tokens=self.page_tokens, **words)
            return self._divided(pool, table)
        except KvdockError as error:
            raise PoolError(f"{where}: {error.what}", fix=error.fix) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise PoolError(f"{where}: {error}") from error

    def _for_dtype(self, where: str, family: str, when: object) -> Table:
        """Return the changes that another element type of KV makes."""
        if not isinstance(when, Mapping) or not all(
            isinstance(changes, Mapping) for changes in when.values()
        ):
            raise PoolError(
                f"{where}: `when` is a table of element types",
                fix="Write `when.fp8_e4m3.scale_block = 128`.",
            )
        for dtype in when:
            if dtype not in list(DType):
                raise PoolError(
                    f"{where}: `when` names {dtype!r}, which is not an element type",
                    fix=did_you_mean(str(dtype), DType)
                    or f"Known are {', '.join(DType)}.",
                )
        if self.plan.dtype is None:
            return {}
        kept = {"dtype": self.plan.dtype} if family in _KV_FAMILIES else {}
        return kept | dict(when.get(self.plan.dtype, {}))

    def _shares(self, heads: object) -> bool:
        """Return whether recurrent states can be shared by the TP sizes asked for.

        Other than attention heads, states are not copied to several ranks.
        """
        plan = self.plan
        ranks = math.lcm(plan.tp_size, *plan.share_tp)
        return bool(plan.share_tp) and isinstance(heads, int) and heads % ranks == 0

    def _divided(self, pool: PoolSpec, table: Table) -> PoolSpec:
        """Divide a pool as the deployment does, where its table says nothing."""
        plan = self.plan
        if pool.kind is PoolKind.LOGICAL:
            return pool
        if pool.kind is PoolKind.MAMBA:
            ranks = math.lcm(plan.tp_size, *plan.share_tp)
            return attrs.evolve(pool, head_group=pool.heads // ranks * pool.by_head)
        by_token = all(part.per is Per.TOKEN for part in pool.parts)
        changes: dict[str, Any] = {}
        if by_token or plan.context is not ContextSplit.TOKENS:
            changes["context"] = plan.context
        if by_token and plan.dcp_size > 1:
            changes["sharding"] = Sharding.DCP
        if by_token and (plan.dcp_size > 1 or plan.context is ContextSplit.TOKENS):
            changes["interleave_tokens"] = plan.interleave_tokens
        if plan.share_tp and pool.by_head:
            shared = math.lcm(plan.tp_size, *plan.share_tp)
            changes["head_group"] = max(1, pool.heads // shared)
        return attrs.evolve(
            pool, **{name: one for name, one in changes.items() if name not in table}
        )


def _layers(where: str, text: object, numbers: Sequence[int]) -> tuple[int, ...]:
    """Read "all", a list, or text such as "0, 3-9, 10-60:2"."""
    count = len(numbers)
    if text == "all":
        return tuple(numbers)
    if isinstance(text, str):
        found: list[int] = []
        for word in text.split(","):
            match = _RANGE.fullmatch(word.strip())
            if match is None:
                raise PoolError(
                    f"{where}: {word.strip()!r} is not a range of layers",
                    fix='Write "all", "0-60", "3-60:4" or "0, 5, 7-9".',
                )
            first, last, step = (int(number or 0) for number in match.groups())
            if match[2] is None:
                last = first
            if last < first:
                raise PoolError(f"{where}: layers {word.strip()!r} run backwards")
            # One past the end is enough to be refused below.
            found += range(first, max(first, min(last, count)) + 1, max(step, 1))
    elif isinstance(text, list) and all(map(is_int, text)):
        found = list(text)
    else:
        raise PoolError(f"{where}: layers {text!r} are neither text nor a list")
    outside = [layer for layer in found if not 0 <= layer < count]
    if outside:
        raise PoolError(f"{where}: layer {outside[0]} is outside of {count} layers")
    return tuple(numbers[layer] for layer in found)
