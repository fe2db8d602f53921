# ruff: noqa: ARG002, B027 - the signatures and the empty methods are SGLang's
"""Storage classes with SGLang's signatures, in the memory of this process.

Source: SGLang 0.5.23, `mem_cache.hicache_storage`.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict[str, Any] | None = None


class PoolName(str, Enum):  # noqa: UP042 - as SGLang's
    KV = "kv"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: list[str] | None = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.registered_pools = {host_pool_name: host_pool}

    def on_host_pools_registered(self) -> None:
        pass

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> Any:
        pass

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> Any:
        pass

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> Any: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next(
            (at for at, key in enumerate(keys) if not self.exists(key)), len(keys)
        )


SPACES: dict[str, dict[str, bytes]] = {}
"""Name of a store to its objects."""


class Shelf(HiCacheStorage):
    """Keeps objects under the `space` of its extra config; generic methods alone."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]
    ) -> None:
        assert kwargs == {}
        assert storage_config.is_mla_model
        extra = storage_config.extra_config or {}
        self.kept = SPACES.setdefault(extra["space"], {})
        self.room = int(extra.get("room", 1 << 30))
        self.fails = str(extra.get("fails", ""))
        self.busy = threading.Lock()
        self.closed = False

    def exists(self, key: str) -> bool:
        return key in self.kept

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        # SGLang reads on one thread, and so may we.
        assert self.busy.acquire(blocking=False), "two reads at once"
        try:
            return [
                self._get(key, to)
                for key, to in zip(keys, target_locations, strict=True)
            ]
        finally:
            self.busy.release()

    def _get(self, key: str, to: torch.Tensor) -> torch.Tensor | None:
        data = self.kept.get(key)
        if data is None:
            return None
        if self.fails == "short reads" and len(data) < to.numel():
            raise OSError(f"Short read for {key}")
        if self.fails != "says yes and writes nothing":
            part = data[: to.numel()]
            to[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        return to

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> Any:
        for key, value in zip(keys, values, strict=True):
            data = bytes(value.numpy())
            if sum(map(len, self.kept.values())) + len(data) > self.room:
                return False
            self.kept[key] = data
        return True

    def clear(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        self.closed = True


class Pointers(Shelf):
    """Moves pages by address, as classes with a client library do: `_v1` alone."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, mem_pool: Any = None
    ) -> None:
        super().__init__(storage_config, {})
        assert mem_pool is not None

    def batch_get(self, *given: Any) -> Any:
        raise AssertionError("generic")

    def batch_set(self, *given: Any) -> Any:
        raise AssertionError("generic")

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        found = []
        for key, at, nbytes in zip(
            keys, *self.mem_pool_host.get_page_buffer_meta(host_indices), strict=True
        ):
            data = self.kept.get(key, b"")
            ctypes.memmove(at, data, min(len(data), nbytes))
            found.append(key in self.kept)
        return found

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        for key, at, nbytes in zip(
            keys, *self.mem_pool_host.get_page_buffer_meta(host_indices), strict=True
        ):
            self.kept[key] = ctypes.string_at(at, nbytes)
        return [True] * len(keys)


class Transfers(Shelf):
    """Moves pages of registered pools: `_v2`."""

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        (one,) = transfers
        pool = self.registered_pools[one.name]
        found = []
        for key, index in zip(one.keys or [], one.host_indices, strict=True):
            page = self._get(key, pool.get_dummy_flat_data_page())
            if page is not None:
                pool.set_from_flat_data_page(index.item(), page)
            found.append(page is not None)
        return {one.name: found}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        (one,) = transfers
        pool = self.registered_pools[one.name]
        for key, index in zip(one.keys or [], one.host_indices, strict=True):
            self.kept[key] = bytes(pool.get_data_page(index.item(), flat=True).numpy())
        return {one.name: [True] * len(one.keys or [])}
