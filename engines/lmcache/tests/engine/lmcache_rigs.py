"""LMCache's first level in a test's memory, and tasks that are waited for."""

from __future__ import annotations

import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.memory_management import (
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.platform import consume_fd

from kvdock_lmcache.adapter import KvdockL2Adapter, KvdockL2AdapterConfig

SHAPE = (2, 4, 16, 64)
PATIENT = {"exists": "60 s", "get": "60 s", "put": "60 s"}
"""Deadlines that a busy machine keeps."""


def on_files(root: Path, **more: Any) -> dict[str, Any]:
    """Return settings of a file store."""
    root.mkdir(mode=0o700, exist_ok=True)
    return {
        "plugin": "file",
        "root": str(root),
        "free_space": "1 MiB",
        "revision": "weights of the test",
        "core": {"deadlines": PATIENT},
        **more,
    }


def keys(count: int, *, first: int = 0, **more: Any) -> list[ObjectKey]:
    """Return keys of chunks, with hashes as LMCache's blake3 has them."""
    return [
        ObjectKey(
            **{
                "chunk_hash": (first + at).to_bytes(32, "big"),
                "model_name": "org/model",
                "kv_rank": 0x01000100,
                **more,
            }
        )
        for at in range(count)
    ]


@attrs.define(eq=False)
class FirstLevel:
    """Memory with objects side by side."""

    memory: torch.Tensor = attrs.field(
        factory=lambda: torch.zeros(4 << 20, dtype=torch.uint8)
    )
    used: int = 0

    @property
    def described(self) -> L1MemoryDesc:
        """What LMCache tells an adapter."""
        return L1MemoryDesc(self.memory.data_ptr(), self.memory.numel(), 4096)

    def object(
        self,
        fill: int = 0,
        shape: Sequence[int] = SHAPE,
        dtype: torch.dtype = torch.bfloat16,
    ) -> TensorMemoryObj:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        raw = self.memory[self.used : self.used + nbytes]
        raw[:] = fill
        made = memory_object(raw, self.used, shape, dtype)
        self.used += -(-nbytes // 4096) * 4096
        return made

    def objects(self, fills: Sequence[int]) -> list[TensorMemoryObj]:
        """Return new objects, each with its own bytes."""
        return [self.object(fill) for fill in fills]


def memory_object(
    raw: torch.Tensor, address: int, shape: Sequence[int], dtype: torch.dtype
) -> TensorMemoryObj:
    """Return an object of LMCache's over some memory."""
    about = MemoryObjMetadata(
        shape=torch.Size(shape),
        dtype=dtype,
        address=address,
        phy_size=raw.numel(),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
    )
    return TensorMemoryObj(raw_data=raw, metadata=about, parent_allocator=None)


def layout(
    shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16
) -> dict[int, MemoryLayoutDesc]:
    """Return what LMCache tells of a group when it looks keys up."""
    return {0: MemoryLayoutDesc([torch.Size(shape)], [dtype])}


def wait(fd: int, timeout_s: float = 90) -> None:
    """Wait for a signal, and take it."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(timeout_s * 1000), "no task has ended"
    consume_fd(fd)


@attrs.define(eq=False)
class Rig:
    """An adapter over a first level."""

    settings: dict[str, Any]
    first: FirstLevel = attrs.field(factory=FirstLevel)
    adapter: KvdockL2Adapter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Open the adapter."""
        given = KvdockL2AdapterConfig.from_dict(self.settings)
        self.adapter = KvdockL2Adapter(given, l1_memory_desc=self.first.described)

    def restart(self) -> None:
        """Close the adapter, and open another one, with new memory."""
        self.adapter.close()
        self.first = FirstLevel()
        self.__attrs_post_init__()

    def store(self, names: list[ObjectKey], objects: list[Any]) -> Any:
        """Store objects; return LMCache's result."""
        number = self.adapter.submit_store_task(names, objects)
        wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[number]

    def lookup(
        self, names: list[ObjectKey], layouts: dict[int, Any] | None = None
    ) -> list[int]:
        """Return the positions that are there."""
        asked = layout() if layouts is None else layouts
        number = self.adapter.submit_lookup_and_lock_task(names, asked)
        wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(number)
        assert self.adapter.query_lookup_and_lock_result(number) is None
        return list(found.get_indices_list())

    def load(self, names: list[ObjectKey], objects: list[Any]) -> list[int]:
        number = self.adapter.submit_load_task(names, objects)
        wait(self.adapter.get_load_event_fd())
        found = self.adapter.query_load_result(number)
        assert self.adapter.query_load_result(number) is None
        return list(found.get_indices_list())


def values(objects: Sequence[Any]) -> list[int]:
    """Return the one byte of which each object consists."""
    found = [set(one.raw_data.tolist()) for one in objects]
    assert all(len(one) == 1 for one in found)
    return [one.pop() for one in found]
