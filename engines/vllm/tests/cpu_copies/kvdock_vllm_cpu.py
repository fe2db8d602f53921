"""Copies between device and host where the device is a CPU, for tests.

vLLM's offloading rejects a CPU: its copies are for CUDA and XPU. Everything above
them, the connector, the manager and the shared region, runs on a CPU as it is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


class CpuCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Copies blocks one by one, at once."""

    def __init__(
        self, caches: Any, blocks_per_chunk: int, region: Any, *, canonical: bool
    ) -> None:
        self._region = region
        self._per = blocks_per_chunk
        self._refs = caches.group_data_refs
        self._device = [one.tensor for one in caches.tensors]
        self._canonical = canonical
        self._host = [
            region.create_next_canonical_view(size * blocks_per_chunk)
            if canonical
            else region.create_next_worker_view(size * blocks_per_chunk)
            for size in self._sizes(caches.tensors)
        ]
        self._ended: list[TransferResult] = []

    def _sizes(self, tensors: Any) -> list[int]:
        """Return the host's bytes of a block in each tensor."""
        sizes = [int(one.page_size_bytes) for one in tensors]
        if self._canonical:
            sizes = [0] * len(sizes)
            for ref in (one for refs in self._refs for one in refs):
                page = int(ref.mapping.canonical_page_size_bytes)
                sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], page)
        return sizes

    def _places(
        self, device: Any, chunks: Any, *, store: bool
    ) -> Iterator[tuple[Any, Any]]:
        """Yield each block's bytes on the device and in the host's row."""
        first_block = first_chunk = 0
        for group, (count, index) in enumerate(
            zip(device.group_sizes, device.block_indices, strict=True)
        ):
            if not count:
                continue
            skipped = index % self._per
            for number in range(count):
                block = int(device.block_ids[first_block + number])
                chunk, part = divmod(number + skipped, self._per)
                row = int(chunks[first_chunk + chunk])
                for ref in self._refs[group]:
                    used = ref.page_size_bytes
                    host = self._host[ref.tensor_idx][row]
                    start = part * (host.shape[0] // self._per)
                    if self._canonical:
                        mapping = ref.mapping
                        if store and not mapping.is_writer(row * self._per + part):
                            continue
                        page = self._device[ref.tensor_idx][block]
                        yield from _fragments(mapping, page, host[start:])
                        continue
                    yield (
                        self._device[ref.tensor_idx][block][:used],
                        host[start : start + used],
                    )
            first_block += count
            first_chunk += -(-(count + skipped) // self._per)

    def _end(self, job_id: int, nbytes: int, began: float) -> bool:
        spent = time.monotonic() - began
        self._ended.append(TransferResult(job_id, True, nbytes, spent))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        began, nbytes = time.monotonic(), 0
        for device, host in self._places(src_spec, dst_spec.chunk_ids, store=True):
            host.copy_(device)
            nbytes += host.numel()
        return self._end(job_id, nbytes, began)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        began, nbytes = time.monotonic(), 0
        for device, host in self._places(dst_spec, src_spec.chunk_ids, store=False):
            device.copy_(host)
            nbytes += host.numel()
        return self._end(job_id, nbytes, began)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:  # noqa: ARG002 - vLLM's interface
        return None

    def shutdown(self) -> None:
        self._host = []
        self._region.cleanup()


def _fragments(mapping: Any, page: Any, host: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the fragments of a page that one rank has, by vLLM's own mapping."""
    for run in mapping.runs:
        for number in range(run.num_fragments):
            here = run.local_offset + number * run.local_stride
            there = run.canonical_offset + number * run.canonical_stride
            yield (
                page[here : here + run.fragment_size],
                host[there : there + run.fragment_size],
            )


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # same
    """vLLM's own, with copies for a CPU."""

    def get_worker(self, kv_caches: Any) -> CpuCopies:
        worker: CpuCopies | None = self.__dict__["_worker"]
        if worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            canonical = self.config.canonical_layout
            if canonical:
                self._validate_canonical_refs(kv_caches)
            worker = CpuCopies(
                kv_caches, self.blocks_per_chunk, region, canonical=canonical
            )
            self._worker = worker
        return worker


def register() -> None:
    """Add what a CPU lacks to the registries of this process."""
    OffloadingSpecFactory._registry["TieringOffloadingSpec"] = lambda: CpuTieringSpec
    WeightTransferEngineFactory._registry.pop("folder", None)
    WeightTransferEngineFactory.register_engine(
        "folder", "kvdock_vllm_folder", "FromFolder"
    )


__all__ = ["CpuCopies", "CpuTieringSpec", "register"]
