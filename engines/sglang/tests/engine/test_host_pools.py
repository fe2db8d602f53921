"""Which of SGLang's host pools are taken, and why the others are not."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest
import test_families as families
import zoo
from sglang.srt.mem_cache import pool_host
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.base import HostKVCache

from kvdock import Shard
from kvdock.errors import KvdockError, PoolError
from kvdock_sglang import host_pools
from kvdock_sglang.pool_names import POOL_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_every_host_pool_of_sglang_is_known_or_rejected_for_a_reason() -> None:
    """A class that a new version brings is found here first."""
    for module in pkgutil.iter_modules(pool_host.__path__, f"{pool_host.__name__}."):
        importlib.import_module(module.name)
    found = {host_pools.class_name_of(cls) for cls in _below(HostKVCache)}
    # It serves another feature, which has no storage: pages of requests that
    # are being decoded.
    found -= {name for name in found if name.endswith(".HiSparseMHATokenToKVPoolHost")}
    known = set(host_pools.KNOWN) | set(host_pools.REJECTED)
    assert found <= known
    # These stand beside that base class.
    beside = {name.rpartition(".")[2] for name in known - found}
    assert beside == {"LogicalHostPool", "PageInterleaveHostPool"}


def test_every_pool_that_sglang_names_may_be_routed() -> None:
    assert {name.value for name in PoolName} == POOL_NAMES


@pytest.mark.parametrize("name", host_pools.REJECTED)
def test_a_class_that_cannot_be_described_is_rejected_with_its_reason(
    name: str,
) -> None:
    cls: Any = pkgutil.resolve_name(name)
    place = host_pools.EngineContext(shard=Shard(), page_tokens=zoo.PAGE)
    with pytest.raises(PoolError, match=host_pools.REJECTED[name]) as rejected:
        host_pools.describe("kv", cls.__new__(cls), place)
    assert name in str(rejected.value)


def _below(cls: type) -> Iterator[type]:
    below: list[type] = cls.__subclasses__()
    for one in below:
        if one.__module__.startswith("sglang."):
            yield one
        yield from _below(one)


def test_a_pool_of_a_subclass_is_rejected_by_name(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    subclass = type("Faster", (type(pool),), {})
    pool.__class__ = subclass
    with (
        pytest.raises(PoolError, match="Faster, which kvdock-sglang does not know"),
        families.attached(families.config(tmp_path), {"kv": pool}),
    ):
        pass


def test_a_pool_that_reports_other_addresses_is_rejected(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    honest = pool.get_page_buffer_meta
    pool.get_page_buffer_meta = lambda slots: (
        [at + 2 for at in honest(slots)[0]],
        honest(slots)[1],
    )
    with (
        pytest.raises(KvdockError, match="according to SGLang"),
        families.attached(families.config(tmp_path), {"kv": pool}),
    ):
        pass
