"""kvdock's tier where a test expects that a call returns when all is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvdock_vllm.tier import KvdockTier

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob


class AtOnce(KvdockTier):
    """kvdock's tier, waited for.

    Args:
        completed_jobs: What has ended and was not yet asked for.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        self.completed_jobs: list[JobResult] = []
        super().__init__(*given, **more)

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        while (found := super().lookup(key, req_context)) is LookupResult.RETRY:
            self._lookups.flush()
        return found

    def submit_store(self, job_metadata: TransferJob) -> None:
        super().submit_store(job_metadata)
        self._finish()

    def submit_load(self, job_metadata: TransferJob) -> None:
        super().submit_load(job_metadata)
        self._finish()

    def _finish(self) -> None:
        super().drain_jobs()
        self._look_s = 0.0
        self.completed_jobs += super().get_finished_jobs()

    def get_finished_jobs(self) -> list[JobResult]:
        ended, self.completed_jobs = self.completed_jobs, []
        return ended
