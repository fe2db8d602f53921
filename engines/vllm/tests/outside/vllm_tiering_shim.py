"""A pytest plugin: vLLM's tests of its tiering manager get kvdock's tier.

`ExampleSecondaryTierManager` is kvdock's tier on files here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import vllm.v1.kv_offload.tiering.example.manager as example
from at_once import AtOnce
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_tier_shim import Tier


class Chunks(dict[Any, bool]):
    """The pages that a test says are stored: they are."""

    def __init__(self, tier: ExampleSecondaryTierManager) -> None:
        self._tier = tier

    def __setitem__(self, key: Any, value: bool) -> None:
        request = ReqContext(req_id="put")
        job = TransferJob(-1, [key], np.zeros(1, np.int64), False, request)
        self._tier.submit_store(job)
        assert self._tier.completed_jobs.pop().success is value


class ExampleSecondaryTierManager(AtOnce, Tier):
    """kvdock's tier with the arguments of vLLM's example."""

    folder_of_test: ClassVar[Path]
    made: ClassVar[list[ExampleSecondaryTierManager]] = []

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: Any,
        tier_type: str,
        custom_param: int = 0,
        **_detector: None,
    ) -> None:
        del custom_param
        if not isinstance(primary_kv_view, memoryview):  # a mock of it
            primary_kv_view = memoryview(bytearray(16)).cast("B", (1, 16))
        folder = self.folder_of_test / str(len(self.made))
        folder.mkdir()
        self.chunks = Chunks(self)
        self.offered: set[Any] = set()
        super().__init__(offloading_spec, primary_kv_view, tier_type, str(folder))
        self.made.append(self)

    def get_num_chunks(self) -> int:
        """Return how many pages are stored."""
        return sum(self.stored([*self.offered], ReqContext(req_id="count")))

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.offered.update(job_metadata.keys)
        super().submit_store(job_metadata)


@pytest.fixture(autouse=True)
def tiers(tmp_path: Path) -> Iterator[None]:
    """Give tiers a folder, and close them after the test."""
    ExampleSecondaryTierManager.folder_of_test = tmp_path
    yield
    while ExampleSecondaryTierManager.made:
        ExampleSecondaryTierManager.made.pop().shutdown()


example.ExampleSecondaryTierManager = ExampleSecondaryTierManager
