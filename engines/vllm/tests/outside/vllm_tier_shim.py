"""A pytest plugin: vLLM's own tests of its file tier get kvdock's tier.

`FileSystemTierManager` is kvdock's tier on files here, with one KV cache group. Where
the tests look for the file of a page, there is one as long as the page is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm.v1.kv_offload.tiering.fs.manager as fs
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from vllm_rigs import identity, storage

from kvdock.throttled_log import ThrottledLog
from kvdock_segments.oracle import SegmentOracle
from kvdock_vllm.adapters import AdapterFiles
from kvdock_vllm.pools import Handover
from kvdock_vllm.rows import Group
from kvdock_vllm.settings import collect
from kvdock_vllm.tier import KvdockTier


class Tier(KvdockTier):
    """kvdock's tier with the arguments of vLLM's own."""

    _store_job_keys: dict[int, Any] = {}  # noqa: RUF012 - looked at by the tests
    _use_o_direct = False

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        enable_kv_events: bool = False,  # noqa: FBT001, FBT002 - vLLM's
        locality: str | None = None,
        **_threads: int,
    ) -> None:
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        events = enable_kv_events and offloading_spec.config.enable_kv_cache_events
        spec = SimpleNamespace(
            kv_bytes_per_chunk=row_bytes,
            cpu_page_size_per_worker=row_bytes,
            replicated_layout=False,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
            config=SimpleNamespace(
                canonical_layout=False, parallel=SimpleNamespace(world_size=1)
            ),
        )
        group = Group(
            number=0,
            spec_class="FullAttentionSpec",
            spec="full",
            layers=("a",),
            tokens=16,
            pieces=((0, row_bytes),),
        )
        folder = Path(root_dir)
        given = storage(folder / "kv")
        name = given.pop("plugin")
        own = {word: given.pop(word) for word in ("root", "free_space")}
        given["backends"] = {name: own}
        given |= {"host_memory": "1 GiB", "enable_kv_events": enable_kv_events}
        given["tiers"] = [{"backend": name, "locality": (locality or "auto").lower()}]
        handover = Handover(
            collect(given, environ={}),
            identity(groups=(group,)),
            AdapterFiles(ThrottledLog()),
        )
        super().__init__(spec, primary_kv_view, tier_type, handover=handover)
        self.open(handover.identity)
        self._lookup_manager = self._lookups
        self.folder = folder
        self.file_mapper = SimpleNamespace(
            base_path=root_dir, get_file_name=lambda key: str(self._file(key))
        )
        self.events: list[Any] | None = [] if events else None

    def _file(self, key: Any) -> Path:
        """Return where a file is exactly if the page is stored."""
        file = self.folder / bytes(key).hex()
        file.unlink(missing_ok=True)
        if self.stored([key], ReqContext(req_id="file")) == [True]:
            file.touch()
        return file

    def submit_load(self, job_metadata: Any) -> None:
        """Damage the pages whose files were written to; then as it is."""
        for key in job_metadata.keys:
            file = self.folder / bytes(key).hex()
            if file.is_file() and (written := file.read_bytes()):
                ((name, part),) = self._split([key], ReqContext(req_id="file")).items()
                (placement,) = self.attached[name].placements
                (stored,) = placement.keys(part.hashes)
                SegmentOracle(self.folder / "kv").poke(stored, 0, written)
                file.unlink()
        super().submit_load(job_metadata)


fs.FileSystemTierManager = Tier
SecondaryTierFactory._registry["fs"] = lambda: Tier
