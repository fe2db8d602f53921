"""A pytest plugin: LMCache's own tests of a second level get kvdock's adapter.

They make a `MockL2Adapter` or an `FSL2Adapter`. Both names are kvdock's adapter here,
on files. Their objects lie anywhere, and not in LMCache's first level, so each is
copied into memory that the adapter knows, and back once it is loaded.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import lmcache.v1.distributed.l2_adapters.fs_l2_adapter as fs
import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from lmcache_rigs import FirstLevel, on_files

from kvdock_lmcache.adapter import KvdockL2Adapter, KvdockL2AdapterConfig


class Config:
    """What the tests say of the store: its size or its folder."""

    def __init__(
        self, max_size_gb: float = 0.0, base_path: str = "", **_speed: Any
    ) -> None:
        self.root = Path(base_path or tempfile.mkdtemp(prefix="kvdock-outside-"))
        self.more: dict[str, Any] = {}
        if max_size_gb:
            self.more["quota"] = f"{max(int(max_size_gb * 2**30), 8 << 20)} B"
        self.max_size_gb = max_size_gb


class Adapter(KvdockL2Adapter):
    """kvdock's adapter for objects that lie anywhere."""

    def __init__(self, config: Config) -> None:
        self.level = FirstLevel(torch.zeros(64 << 20, dtype=torch.uint8))
        self.loads: dict[int, list[tuple[Any, Any]]] = {}
        settings = on_files(config.root / "kv", **config.more)
        super().__init__(
            KvdockL2AdapterConfig.from_dict(settings), self.level.described
        )

    def inside(self, given: Any) -> Any:
        """Return a copy of an object in the first level."""
        if hasattr(given, "metadata"):
            shape, dtype = given.metadata.shape, given.metadata.dtype
        else:
            shape, dtype = (len(given.byte_array),), torch.uint8
        made = self.level.object(0, shape, dtype)
        _copy(given, made)
        return made

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return super().submit_store_task(keys, [self.inside(one) for one in objects])

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        copies = [self.inside(one) for one in objects]
        number = super().submit_load_task(keys, copies)
        self.loads[number] = list(zip(objects, copies, strict=True))
        return number

    def query_load_result(self, task_id: int) -> Any:
        found = super().query_load_result(task_id)
        if found is not None:
            for given, copy in self.loads.pop(task_id, ()):
                _copy(copy, given)
        return found


def _copy(source: Any, target: Any) -> None:
    target.byte_array.cast("B")[:] = source.byte_array.cast("B")


mock.MockL2Adapter = fs.FSL2Adapter = Adapter
mock.MockL2AdapterConfig = fs.FSL2AdapterConfig = Config
