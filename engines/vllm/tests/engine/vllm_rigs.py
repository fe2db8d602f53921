"""A tier without an engine: rows, keys and jobs as vLLM's manager gives them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvdock.throttled_log import ThrottledLog
from kvdock_vllm.adapters import AdapterFiles
from kvdock_vllm.identity import Identity
from kvdock_vllm.pools import Handover
from kvdock_vllm.rows import Group
from kvdock_vllm.settings import collect
from kvdock_vllm.tier import KvdockTier

ROW = 8192


def identity(**more: Any) -> Identity:
    """Return what pages of two groups belong to."""
    given: dict[str, Any] = {
        "model": "m",
        "revision": "r",
        "draft": "",
        "page_format": {"engine": "test"},
        "groups": (
            Group(
                number=0,
                spec_class="FullAttentionSpec",
                spec="full",
                layers=("a", "b"),
                tokens=16,
                pieces=((0, 4096), (4096, 4096)),
            ),
            Group(
                number=2,
                spec_class="MambaSpec",
                spec="mamba",
                layers=("c",),
                tokens=16,
                pieces=((0, 1000),),
            ),
        ),
        "stages": 1,
        "process": "dp0",
    }
    return Identity(**{**given, **more})


def storage(folder: Path, **core: Any) -> dict[str, Any]:
    """Return settings of a file store, with deadlines that a test never reaches."""
    folder.mkdir(mode=0o700, exist_ok=True)
    deadlines = {"exists": "60 s", "get": "60 s", "put": "60 s"}
    deadlines |= core.pop("deadlines", {})
    return {
        "plugin": "file",
        "root": str(folder),
        "free_space": "1 MiB",
        "host_memory": "1 MiB",
        "core": {"deadlines": deadlines, **core},
    }


@attrs.define(eq=False)
class Rig:
    """A tier, the rows that it sees, and the numbers of its jobs."""

    tier: KvdockTier
    rows: Any
    next_job: int = 0

    def keys(self, *, group: int = 0, first: int = 0, count: int = 4) -> list[Any]:
        """Return keys of vLLM's, with block hashes of 32 bytes."""
        return [
            make_offload_key(number.to_bytes(32, "big"), group)
            for number in range(first, first + count)
        ]

    def submit(self, keys: list[Any], rows: list[int], *, load: bool) -> int:
        """Submit a job; return its number."""
        self.next_job += 1
        job = TransferJob(
            self.next_job, keys, np.array(rows), load, ReqContext(req_id="r")
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.next_job

    def result(self, timeout_s: float = 60) -> JobResult:
        """Return the next ended job, as vLLM's manager would see it."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            found = list(self.tier.get_finished_jobs())
            if found:
                assert len(found) == 1
                return found[0]
            time.sleep(0.002)
        raise TimeoutError("no job has ended")

    def store(self, keys: list[Any], rows: list[int]) -> JobResult:
        self.submit(keys, rows, load=False)
        return self.result()

    def load(self, keys: list[Any], rows: list[int]) -> JobResult:
        self.submit(keys, rows, load=True)
        return self.result()

    def lookup(self, keys: list[Any], *, timeout_s: float = 60) -> list[str]:
        """Ask as vLLM's scheduler does, step by step; return the final answers."""
        context = ReqContext(req_id="r")
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            answers = [self.tier.lookup(key, context).name for key in keys]
            self.tier.on_schedule_end(SimpleNamespace())
            if "RETRY" not in answers:
                return answers
            time.sleep(0.002)
        raise TimeoutError("lookups have not been answered")

    def finish_request(self) -> None:
        """End the request of all lookups, so that the next ones ask again."""
        self.tier.on_request_finished(ReqContext(req_id="r"))


def open_rig(
    given: Mapping[str, Any], *, rows: int = 64, told: Identity | None = None
) -> Rig:
    """Attach a tier to fresh rows."""
    memory = np.frombuffer(mmap.mmap(-1, rows * ROW), np.uint8).reshape(rows, ROW)
    spec = SimpleNamespace(
        kv_bytes_per_chunk=ROW,
        cpu_page_size_per_worker=ROW,
        replicated_layout=False,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        config=SimpleNamespace(
            canonical_layout=False, parallel=SimpleNamespace(world_size=1)
        ),
    )
    handover = Handover(
        collect(given, environ={}), told or identity(), AdapterFiles(ThrottledLog())
    )
    view: Any = memory
    tier = KvdockTier(spec, memoryview(view), "KvdockTier", handover=handover)
    tier.open(handover.identity)
    return Rig(tier, memory)
