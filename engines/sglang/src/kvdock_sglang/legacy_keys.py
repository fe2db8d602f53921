"""Keys as SGLang 0.5.23 spells them, to migrate what it has stored.

Only for reading an old store once: these keys say who wrote an object instead
of what it holds, and cover neither dtype nor layout nor weights. Where two
ranks wrote different bytes under one key there is nothing to migrate, and the
pool is rejected.

Source: SGLang 0.5.23, `mem_cache/hicache_storage.py:HiCacheFile` (whole pages)
and `mem_cache/storage/mooncake_store/mooncake_store.py` (components).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock import PoolKind, Sharding
from kvdock.errors import NamespaceError
from kvdock.keys import check_hashes
from kvdock.pools import PoolName
from kvdock.strict_enum import StrictEnum

if TYPE_CHECKING:
    from kvdock import PoolSpec, Shard


class Spelling(StrictEnum):
    """The engine's two families of names."""

    WHOLE_PAGES = "whole_pages"
    """One name for each pool of a page, as its own files are called."""
    COMPONENTS = "components"
    """One name for each component of a page, as its object store has them."""


@attrs.frozen(kw_only=True)
class LegacyKeys:
    """The names that one process of SGLang gave its objects.

    Args:
        spelling: The family of names.
        model: The served model's name.
        target: The anchor; whether its bytes are replicated decides much.
        shard: The process.
        tag: The engine's `extra_backend_tag`, or "".
    """

    spelling: Spelling = attrs.field(converter=Spelling)
    model: str
    target: PoolSpec
    shard: Shard
    tag: str = ""

    def of(self, page_hash: str, pool: PoolSpec) -> tuple[str, ...]:
        """Return the keys of one page of a pool, in the engine's order.

        Raises:
            KvdockError: If the hash could reach out of its place in a name.
            NamespaceError: If the engine gave one name to different bytes,
                or rejects the pool.
        """
        check_hashes([page_hash])
        if self.spelling is Spelling.WHOLE_PAGES:
            return (self._whole_page(page_hash, pool),)
        head = "_".join(filter(None, [self.tag, self._model(), self._topology()]))
        return tuple(f"{head}_{page_hash}_{end}" for end in self._components(pool))

    @property
    def _replicated(self) -> bool:
        return self.target.sharding in (Sharding.REPLICATED, Sharding.DCP)

    def _model(self) -> str:
        return "-".join(self.model.split("/"))

    def _topology(self) -> str:
        shard = self.shard
        if shard.dcp_size == 1:
            return ""
        return (
            f"tp{shard.tp_size}_dcp{shard.dcp_size}_page{self.target.page_tokens}"
            f"_pp{shard.pp_size}_cp{shard.cp_size}"
        )

    def _whole_page(self, page_hash: str, pool: PoolSpec) -> str:
        shard = self.shard
        by_rank = not self._replicated or pool.name == PoolName.MAMBA
        if pool.sharding in (Sharding.HEADS, Sharding.RANK) and not by_rank:
            self._reject_if_shared(pool)
        if len(pool.head_groups(shard)) > 1:
            raise NamespaceError(
                f"pool {pool.name!r}: these names keep a rank's heads together",
                fix="Describe it with head_group=0.",
            )
        words = [page_hash if pool.anchor else f"{page_hash}.{pool.name}"]
        words.append(self._model())
        if by_rank:
            words.append(f"{shard.tp_rank}_{shard.tp_size}")
        if shard.pp_size > 1:
            # Size before rank: the reverse of the tensor-parallel pair.
            words.append(f"{shard.pp_size}_{shard.pp_rank}")
        if shard.cp_size > 1:
            words.append(f"cp{shard.cp_rank}_{shard.cp_size}")
        if shard.dcp_size > 1:
            words.append(
                f"tp{shard.tp_size}_dcp{shard.dcp_rank}_{shard.dcp_size}"
                f"_page{self.target.page_tokens}"
            )
        return "_".join(words) + ".bin"

    def _reject_if_shared(self, pool: PoolSpec) -> None:
        if self.shard.tp_size > 1:
            raise NamespaceError(
                f"pool {pool.name!r} differs from rank to rank, but the engine gave "
                f"the same name to all {self.shard.tp_size} of them",
                fix="Nothing of it can be migrated; it is stored again.",
            )

    def _components(self, pool: PoolSpec) -> list[str]:
        """Return the ends of a page's keys: rank, then component."""
        shard = self.shard
        if pool.name == PoolName.AUXILIARY_SWA:
            raise NamespaceError(f"the engine stores no pool {pool.name!r} there")
        if not pool.physical:
            return []
        stage = [str(shard.pp_rank)] if shard.pp_size > 1 else []
        groups = len(pool.head_groups(shard))
        ranks = [
            "_".join([str(shard.tp_rank * groups + group), *stage])
            for group in range(groups)
        ]
        shared = "_".join(stage)
        if shard.dcp_size > 1:
            shared = "_".join([f"dcp{shard.dcp_rank}_cp{shard.cp_rank}", *stage])
        if groups > 1 and not pool.anchor:
            raise NamespaceError(
                f"pool {pool.name!r}: the engine formats a list of ranks into these "
                "names",
                fix="Nothing of it can be migrated; it is stored again.",
            )
        if pool.kind is PoolKind.MAMBA:
            names = [part.name for part in pool.parts if part.entry_bytes]
            return [f"{rank}_{name}" for rank in ranks for name in names]
        plain = pool.anchor or pool.name in _ATTENTION
        if pool.by_head and plain and pool.kind is not PoolKind.K_ONLY:
            infix = "" if pool.anchor else f"{pool.name}_"
            return [
                f"{rank}_{infix}{part.name}" for rank in ranks for part in pool.parts
            ]
        if pool.sharding in (Sharding.HEADS, Sharding.RANK):
            self._reject_if_shared(pool)
        if pool.anchor:
            return [f"{shared}_k"]
        return [f"{shared}_{pool.name}{'_k' if pool.name == PoolName.DRAFT else ''}"]


_ATTENTION = (PoolName.SWA, PoolName.DRAFT, PoolName.DRAFT_SWA)
