"""Pools: what a page of cached state consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.pools.enums import ContextSplit as ContextSplit
    from kvdock.pools.enums import DType as DType
    from kvdock.pools.enums import HitPolicy as HitPolicy
    from kvdock.pools.enums import Layout as Layout
    from kvdock.pools.enums import ObjectUnit as ObjectUnit
    from kvdock.pools.enums import Per as Per
    from kvdock.pools.enums import PoolKind as PoolKind
    from kvdock.pools.enums import PoolName as PoolName
    from kvdock.pools.enums import Sharding as Sharding
    from kvdock.pools.factories import FAMILIES as FAMILIES
    from kvdock.pools.factories import compressed as compressed
    from kvdock.pools.factories import indexer as indexer
    from kvdock.pools.factories import k_only as k_only
    from kvdock.pools.factories import logical as logical
    from kvdock.pools.factories import mamba as mamba
    from kvdock.pools.factories import mha as mha
    from kvdock.pools.factories import mla as mla
    from kvdock.pools.factories import ring_state as ring_state
    from kvdock.pools.factories import swa as swa
    from kvdock.pools.layout import stored_objects as stored_objects
    from kvdock.pools.part import Part as Part
    from kvdock.pools.rows import RowLayout as RowLayout
    from kvdock.pools.shard import Shard as Shard
    from kvdock.pools.sharing import sharing_limits as sharing_limits
    from kvdock.pools.spec import PoolSpec as PoolSpec

__getattr__, __dir__, __all__ = lazy_names(__name__)
