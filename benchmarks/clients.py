"""What the benchmarks of backends race: clients that move the pages of a memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import Attachment, DType, PoolSpec
from kvdock.config import Deadlines
from kvdock.pools import Part, Per

PATIENT = Deadlines(exists=60.0, get=60.0, put=60.0)
"""A call that a busy machine delays is slow, and not lost."""

Memory = npt.NDArray[np.uint8]
"""uint8 (pages, page_bytes)."""


class Client(Protocol):
    """One way to move the pages of a memory."""

    def put(self, hashes: Sequence[str]) -> None:
        """Store all pages."""

    def get(self, hashes: Sequence[str]) -> None:
        """Load all pages."""


@attrs.frozen
class Kvdock:
    """A whole attachment, as an engine has it."""

    attachment: Attachment
    pages: int

    def put(self, hashes: Sequence[str]) -> None:
        """Store all pages."""
        self._check(self.attachment.put(hashes, {"kv": np.arange(self.pages)}))

    def get(self, hashes: Sequence[str]) -> None:
        """Load all pages."""
        self._check(self.attachment.get(hashes, {"kv": np.arange(self.pages)}))

    def _check(self, moved: Any) -> None:  # noqa: ANN401 - what both return
        if moved.outcomes["kv"].any():
            raise SystemExit(f"pages were lost: {set(moved.outcomes['kv'].tolist())}")


def pool_of(memory: Memory) -> PoolSpec:
    """Return a pool whose pages are the rows of a memory."""
    return PoolSpec(
        name="kv",
        kind="mla",
        parts=(Part("kv", DType.U8, (memory.shape[1],), per=Per.PAGE),),
        layers=(0,),
        page_tokens=64,
        anchor=True,
    )


def nixl_agent(name: str) -> Any:  # noqa: ANN401 - NIXL has no types
    """Make an agent of NIXL without backends, safe to use from several threads."""
    from nixl_cu12 import _api as api  # noqa: PLC0415 - `nixl` asks for torch

    config = api.nixl_agent_config(
        enable_prog_thread=False,
        backends=[],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
    )
    return api.nixl_agent(name, config)


def finish(agent: Any, way: str, local: Any, remote: Any) -> None:  # noqa: ANN401 - same
    """Move descriptors, and wait until that is done."""
    handle = agent.initialize_xfer(way, local, remote, agent.name)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
