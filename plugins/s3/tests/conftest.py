"""A server of our own that misbehaves on request, and pools attached to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from object_server import ObjectServer
from waiting import until

from kvdock import (
    Attachment,
    Batch,
    Dock,
    DType,
    Namespace,
    Operation,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.config import structure
from kvdock.pools import Part, Per
from kvdock_s3.client import ObjectClient
from kvdock_s3.settings import S3Settings

if TYPE_CHECKING:
    from kvdock.config import CoreSettings
    from kvdock_s3.pool import PoolHandle

PAGES, PAGE_BYTES = 8, 64 << 10


@attrs.define(eq=False)
class Engine:
    """Memory of some pages, attached to the backend as an engine does it."""

    attachment: Attachment
    memory: npt.NDArray[np.uint8]
    right: npt.NDArray[np.uint8]
    hashes: list[str]

    @property
    def places(self) -> dict[str, npt.NDArray[np.int64]]:
        return {"kv": np.arange(len(self.hashes))}

    @property
    def handle(self) -> PoolHandle:
        return cast("PoolHandle", self.attachment.pools_by_name["kv"].handle)

    def key(self, page: int) -> str:
        return f"{self.attachment.namespace}/{self.hashes[page]}.kv.L0-1"

    def put(self) -> list[int]:
        return list(self.attachment.put(self.hashes, self.places).outcomes["kv"])

    def get(self) -> list[int]:
        """Load all pages; those that are OK must be right."""
        self.memory[:] = 7
        outcomes = self.attachment.get(self.hashes, self.places).outcomes["kv"]
        assert self.attachment.wait_idle(10.0)
        good = outcomes == 0
        assert (self.memory[good] == self.right[good]).all(), "wrong bytes"
        return list(outcomes)

    def batch(self, operation: Operation, keys: list[str], within_s: float) -> Batch:
        """Build a batch for the plugin itself, past the core."""
        until = time.monotonic() + within_s
        if operation not in (Operation.PUT, Operation.GET):
            return Batch(operation, keys, deadline_s=until)
        rows = np.arange(len(keys)) % len(self.memory)
        at = self.memory.ctypes.data + rows[:, None] * self.memory.shape[1]
        return Batch(operation, keys, at, np.full_like(at, PAGE_BYTES), until)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    one = ObjectServer("kv").start()
    yield one
    one.stop()


@pytest.fixture
def client(server: ObjectServer) -> Iterator[Callable[..., ObjectClient]]:
    """Make clients of the server; they are closed with the test."""
    made: list[ObjectClient] = []

    def make(**settings: object) -> ObjectClient:
        given = server.settings(**settings)
        made.append(ObjectClient(structure(S3Settings, given, where="tests")))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def engine(server: ObjectServer) -> Iterator[Callable[..., Engine]]:
    """Attach engines to the server; they are closed with the test."""
    attached: list[Attachment] = []

    def attach(
        core: CoreSettings | None = None, generation: str = "", **settings: object
    ) -> Engine:
        pool = PoolSpec(
            name="kv",
            kind="mla",
            parts=(Part("kv", DType.U8, (PAGE_BYTES,), per=Per.PAGE),),
            layers=(0,),
            page_tokens=1,
            anchor=True,
        )
        rng = np.random.default_rng(5)
        memory = rng.integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)
        dock = Dock.load(require=("s3",))
        attachment = Attachment.open(
            dock,
            dock.plan([pool], Shard(), ("s3",)),
            Namespace(model="tests", generation=generation),
            {"kv": Region.of(pool, Shard(), (memory,), PAGES)},
            {"s3": server.settings(**settings)},
            core=core,
        )
        attached.append(attachment)
        hashes = [f"{page:064x}" for page in range(PAGES)]
        return Engine(attachment, memory, memory.copy(), hashes)

    yield attach
    for one in attached:
        one.close()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """Poll until something is true, and fail when a time has passed."""
    return until
