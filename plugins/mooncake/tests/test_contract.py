"""The conformance kit, against masters and owners that outlive each test."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from repeated import OF_RANKS, OF_SETTINGS

from kvdock import AttachConfig
from kvdock.config import structure
from kvdock.testing import BackendContract, Oracle
from kvdock_mooncake import plugin
from kvdock_mooncake.connect import join
from kvdock_mooncake.error_codes import LEASE_EXPIRED
from kvdock_mooncake.server import start_master, start_owner
from kvdock_mooncake.settings import MooncakeSettings

pytestmark = pytest.mark.mooncake

SCRATCH_BYTES = 8 << 20
LEASE_S = 0.25
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def roomy(library: Any, discard: str) -> Iterator[str]:
    """A master whose memory belongs to a process of its own."""
    del library
    # Short leases: a page that was just read can be deleted soon.
    master = start_master(f"-default_kv_lease_ttl={int(LEASE_S * 1000)}", discard)
    owner = start_owner(master.address, 512 << 20)
    yield master.address
    owner.stop()
    master.stop()


class RawStore(Oracle):
    """The library by itself: objects are replaced, as it has no other way."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        self.at = int(self.scratch.ctypes.data)
        assert store.register_buffer(self.at, SCRATCH_BYTES) == 0

    def peek(self, key: str) -> bytes | None:
        # On a busy machine a read may outlast the lease of a quarter of a second.
        end_s = time.monotonic() + PATIENCE_S
        while True:
            nbytes = self.store.get_into(key, self.at, SCRATCH_BYTES)
            if nbytes != LEASE_EXPIRED or time.monotonic() > end_s:
                break
        return self.scratch[:nbytes].tobytes() if nbytes > 0 else None

    def poke(self, key: str, offset: int, data: bytes) -> None:
        stored = bytearray(self.peek(key) or b"")
        stored[offset : offset + len(data)] = data
        self.replace(key, bytes(stored))

    def resize(self, key: str, nbytes: int) -> None:
        stored = self.peek(key) or b""
        self.replace(key, stored[:nbytes].ljust(nbytes, b"?"))

    def remove(self, key: str) -> None:
        self.store.remove(key, True)

    def replace(self, key: str, data: bytes) -> None:
        self.store.remove(key, True)
        self.scratch[: len(data)] = np.frombuffer(data, np.uint8)
        assert self.store.put_from(key, self.at, len(data)) == 0


@pytest.fixture(scope="module")
def raw(library: Any, roomy: str) -> Iterator[RawStore]:
    store = join(library, MooncakeSettings(master=roomy, segment_bytes=0))
    yield RawStore(store)
    store.close()


@pytest.mark.repeats(*OF_RANKS, "test_an_object_of_the_largest_size_is_kept")
class TestMooncake(BackendContract):
    """Without a small store: the kit looks at its first pages in every round.

    Each look is a use, so these are what the store evicts last. A full store
    is tried in test_pool.py.
    """

    plugin = "mooncake"

    @pytest.fixture
    def config(self, roomy: str) -> Mapping[str, object]:
        return {"master": roomy, "segment_bytes": 0, "lease_s": LEASE_S}

    @pytest.fixture
    def oracle(self, raw: RawStore) -> Oracle:
        return raw


@pytest.fixture(scope="module")
def through(library: Any, discard: str) -> Iterator[Mapping[str, object]]:
    """Settings of a process that goes through a client, with a connection kept.

    Each connection that is closed holds the interpreter for a second.
    """
    del library
    master = start_master(f"-default_kv_lease_ttl={int(LEASE_S * 1000)}", discard)
    owner = start_owner(master.address, 512 << 20)
    given = {"standalone": owner.address, "lease_s": LEASE_S}
    settings = structure(MooncakeSettings, given, where="tests")
    memory = plugin.kvdock_allocate(4096, AttachConfig(settings=settings))
    assert memory is not None
    yield given
    memory.give_back()
    owner.stop()
    master.stop()


@pytest.mark.slow
@pytest.mark.repeats(*OF_SETTINGS)
class TestStandalone(BackendContract):
    """The same through a client process, which reaches only what it shares."""

    plugin = "mooncake"

    @pytest.fixture
    def config(self, through: Mapping[str, object]) -> Mapping[str, object]:
        return through
