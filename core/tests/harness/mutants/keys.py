"""Mutants whose keys name too little, too much, or something else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs
from reference import FolderShelf, Handle

from kvdock.batch import Outcome
from mutants.mutant import FolderMutant, MemoryMutant

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock.batch import Batch, BatchResult
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec


FILE_NAME_BYTES = 255


class KeyWithoutRank(MemoryMutant):
    """Leaves head range and rank out of the key."""

    image_of = "TP shards under one key: the file, nixl and hf3fs draft objects"
    caught_by = "test_no_two_objects_share_a_suffix"

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        right = super().suffixes(pool, shard)
        return tuple(re.sub(r"\.[HRD]\d+(-|of)\d+", "", one) for one in right)


class DraftKeyWithoutRank(MemoryMutant):
    """Names a draft's objects like those of its replicated target."""

    image_of = "MHA draft on an MLA target: rank 0's heads are loaded by every rank"
    caught_by = "test_an_mha_draft_on_an_mla_target_is_whole_on_every_rank"

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        right = super().suffixes(pool, shard)
        if not pool.draft:
            return right
        return tuple(re.sub(r"\.H\d+-\d+", "", one) for one in right)


class KeyWithoutPool(MemoryMutant):
    """Leaves the pool out of the key."""

    image_of = "side pools that share one key space with the target"
    caught_by = "test_no_two_objects_share_a_suffix"

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        right = super().suffixes(pool, shard)
        return tuple(one.replace(f".{pool.name}", ".page", 1) for one in right)


class DraftKeyOfTheTarget(MemoryMutant):
    """Gives draft pages the keys of target pages."""

    image_of = "draft support declared, but drafts stored over the target's pages"
    caught_by = "test_draft_pools_are_kept_as_declared"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        keys = [key.replace(".draft_", ".", 1) for key in batch.keys]
        return super().run(handle, attrs.evolve(batch, keys=keys))


class KeyWithoutStage(MemoryMutant):
    """Leaves the layer range out of the key."""

    image_of = (
        "nixl and hf3fs keys without a pipeline rank: stages overwrite each other"
    )
    caught_by = "test_pipeline_stages_do_not_overwrite_each_other"

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        right = super().suffixes(pool, shard)
        return tuple(re.sub(r"\.L\d+-\d+", "", one) for one in right)


class KeyWithoutNamespace(MemoryMutant):
    """Keeps all models in one namespace."""

    image_of = "hf3fs keys carry no model; W1, no layout or dtype in a key"
    caught_by = "test_namespaces_share_nothing"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        keys = [key.partition("/")[2] for key in batch.keys]
        return super().run(handle, attrs.evolve(batch, keys=keys))


class KeyNamesTheWriter(MemoryMutant):
    """Says who wrote an object instead of what it holds."""

    image_of = "mooncake keys by rank and no size: TP2 and TP4 share nothing or collide"
    caught_by = "test_ranks_that_hold_the_same_object_give_it_the_same_key"

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        return tuple(f"{s}.tp{shard.tp_rank}" for s in super().suffixes(pool, shard))


class SplitHeadsByNumber(MemoryMutant):
    """Numbers a rank's head groups from 0."""

    image_of = "split heads declared, but every rank's first group has one key"
    caught_by = "test_split_heads_are_shared_across_tp_sizes"

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        right = super().suffixes(pool, shard)
        if not pool.head_group:
            return right
        return tuple(
            re.sub(r"\.H\d+-\d+", f".G{at}", one) for at, one in enumerate(right)
        )


class KeyOfThisProcess(MemoryMutant):
    """Spells keys with Python's own hash."""

    image_of = "keys that no second process finds again"
    caught_by = "test_keys_are_the_same_in_every_process"

    def suffixes(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        return tuple(f".{hash(one):x}" for one in super().suffixes(pool, shard))


class KeyCutShort(MemoryMutant):
    """Keeps only so much of a key as fits its table."""

    image_of = "a fixed-width key column that cuts"
    caught_by = "test_hashes_that_differ_at_the_end_are_told_apart"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        keys = []
        for key in batch.keys:
            head, _, tail = key.partition("/")
            page, dot, rest = tail.partition(".")
            keys.append(f"{head}/{page[:48]}{dot}{rest}")
        return super().run(handle, attrs.evolve(batch, keys=keys))


class OverlongKeyLeavesAStub(MemoryMutant):
    """Makes room under a key before it finds the key too long."""

    image_of = "nixl: existence is the path's, so what was rejected or torn counts"
    caught_by = "test_a_key_over_the_limit_is_refused_and_alone"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        key = batch.keys[row]
        if len(key) > self.manifest().max_key_bytes:
            if key in handle.shelf.names():
                return self.exists(handle, key)
            handle.shelf.write(key, b"")
        return super().step(handle, batch, row)


class _PathShelf(FolderShelf):
    def path(self, key: str) -> Path:
        # A key becomes a path as it is; the only guard is its length.
        return self.root / (key if len(key) < 255 else key[-200:].lstrip("/"))


class KeyBecomesAPath(FolderMutant):
    """Uses keys as paths."""

    image_of = "model names reach the file system: '..' is not sanitised"
    caught_by = "test_a_hostile_key_reaches_nothing"

    folder = _PathShelf


class KeyInOneCase(MemoryMutant):
    """Keeps keys where upper and lower case are one."""

    image_of = "a file system or a column collation that folds case"
    caught_by = "test_hashes_that_differ_in_case_are_told_apart"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        keys = [key.lower() for key in batch.keys]
        return super().step(handle, attrs.evolve(batch, keys=keys), row)


class ShorterKeyThanDeclared(MemoryMutant):
    """Declares keys of 512 bytes and names files by them."""

    image_of = "a lying limit: max_key_bytes, where a file name ends at 255"
    caught_by = "test_a_key_of_the_largest_size_is_kept"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        if len(batch.keys[row]) > FILE_NAME_BYTES:
            return Outcome.REFUSED
        return super().step(handle, batch, row)
