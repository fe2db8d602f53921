"""The store of a pool: its pages in files, and its memory for peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.errors import KvdockError
from kvdock.peers.connections import ConnectedPool
from kvdock.plugin import StorelessPool, StoreWrapper
from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.io_engine import NixlIOEngine
from kvdock_nixl.peers import Connections
from kvdock_segments import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock import AttachConfig, Batch, BatchResult, PoolSpec, Region
    from kvdock_nixl.settings import NixlSettings
    from kvdock_segments import SegmentStore


class NixlStore(StoreWrapper):
    """Pages of one pool in files, and the memory that peers write to."""

    def __init__(self, pages: SegmentStore, peers: ConnectedPool) -> None:
        super().__init__(pages)
        self.peers = peers

    def close(self) -> None:
        """Close files and deregister memory; stored pages stay."""
        self.peers.release()
        self.inner.close()


class TrialStore(NixlStore):
    """A store of test pages, which only NIXL may move."""

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch; what the kernel moved does not show that NIXL works.

        Raises:
            KvdockError: If the kernel has moved a byte in NIXL's place.
        """
        before = MOVED.read()
        result = self.inner.run(batch)
        after = MOVED.read()
        if any(
            after[way] != before[way] for way in (Way.KERNEL_READ, Way.KERNEL_WRITE)
        ):
            raise KvdockError(
                "NIXL did not move a page, and the kernel did",
                fix="Use another io, or a file system of another kind.",
            )
        return result


class NoPages(StorelessPool):
    """A pool that goes to peers alone."""

    def touch(self, keys: Sequence[str]) -> None:
        """Do nothing: there are no pages."""

    def removed(self, limit: int) -> Sequence[str]:
        """Return nothing, for the same reason."""
        del limit
        return ()

    def capacity(self) -> None:
        """Return None, for the same reason."""


def open_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> NixlStore | NoPages:
    """Open the store of one pool of a namespace, and note its memory.

    Pools that only go to peers need no store: without a root none is opened.

    Raises:
        KvdockError: If NIXL cannot be used here, or the root or a stored namespace
            record cannot be trusted.
    """
    settings: NixlSettings = config.settings
    own = Connections(settings.ucx_transports)
    if settings.root is None and config.to_peers:
        peers = ConnectedPool.of(config, region.blocks, own)
        return NoPages(peers, peers.release)
    settings.require_root()
    engine = NixlIOEngine.open(settings.io, region.blocks, direct=settings.direct)
    store = open_store(engine, pool, region, config)
    kind = TrialStore if config.trial else NixlStore
    return kind(store, ConnectedPool.of(config, region.blocks, own))
