"""One pool whose pages go straight to peers, or come from them."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import attrs

from kvdock.errors import AttachError, KvdockError, did_you_mean
from kvdock.peers.digests import PageDigests
from kvdock.peers.landing import LandingArea
from kvdock.peers.messages import Offer
from kvdock.plugin.store import endpoint_of
from kvdock.pools.enums import Per

if TYPE_CHECKING:
    from kvdock.geometry.grid import Grid
    from kvdock.peers.keys import MessageKeys
    from kvdock.peers.messages import Epoch
    from kvdock.plugin.manifest import Manifest
    from kvdock.plugin.store import PeerMemory
    from kvdock.transfer.attached_pool import AttachedPool

log = logging.getLogger("kvdock")

T = TypeVar("T")


def compatibility(record: Mapping[str, object], pool: str) -> str:
    """Return a digest of what must be equal where a pool's bytes go straight over.

    Everything of the namespace, and of its pools this one alone. Page size, layout
    and ranks are left out: the grids say how they differ.
    """
    pools = cast("Mapping[str, Mapping[str, object]]", record["pools"])
    own = dict(pools[pool])
    for name in ("page_tokens", "stored_order", "interleave_tokens"):
        del own[name]
    covered = {**record, "pools": {pool: own}}
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_names(names: Iterable[str], pools: Mapping[str, PeerPool]) -> None:
    """Raise KvdockError for the first name that is none of the pools'."""
    for name in names:
        if name not in pools:
            raise KvdockError(
                f"pool {name!r} does not go to peers", fix=did_you_mean(name, pools)
            )


@attrs.define(eq=False)
class PeerPool:
    """One pool of an attachment, with what its peers need.

    Args:
        compatibility: Digest of all that must be equal on both sides.
        area: Where whole pages land, or None.
    """

    attached: AttachedPool
    grid: Grid
    compatibility: str
    area: LandingArea | None
    digests: PageDigests = attrs.field(factory=PageDigests, repr=False)
    _endpoint: bytes = b""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, repr=False)
    _page_sizes: set[int] = attrs.field(factory=set, repr=False)

    @classmethod
    def of(cls, attached: AttachedPool, record: Mapping[str, object]) -> PeerPool:
        """Prepare an attached pool for peers."""
        grid = attached.region.grid
        assert grid is not None, "attaching has checked it"  # noqa: S101
        landing = attached.landing
        area = LandingArea(landing.memory) if landing else None
        return cls(attached, grid, compatibility(record, attached.pool.name), area)

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.attached.pool.name

    @property
    def manifest(self) -> Manifest:
        """Return what its backend declares."""
        return self.attached.channel.backend.manifest

    @property
    def slots(self) -> int:
        """Slots of its memory: tokens, or pages where parts are per page."""
        by_page = self.grid.per is Per.PAGE
        return self.grid.pages * (1 if by_page else self.grid.page_tokens)

    def endpoint(self, deadline_s: float) -> bytes:
        """Open an endpoint for peers, unless there is one."""
        # Two threads must not open two endpoints.
        with self._lock:
            if not self._endpoint:
                memory, name = self._memory, self.attached.backend
                self._endpoint = self.call(
                    "offer", lambda: endpoint_of(memory, name), deadline_s
                )
            return self._endpoint

    def offer(
        self, endpoint: bytes, epoch: Epoch, keys: MessageKeys | None = None
    ) -> Offer:
        """Return what peers need to know.

        The endpoint is empty for a side that only sends.
        """
        return Offer(
            pool=self.name,
            transport=self.attached.backend,
            endpoint=endpoint,
            grid=self.grid,
            compatibility=self.compatibility,
            required=self.attached.pool.required,
            epoch=epoch,
            keys=keys,
        )

    def withdraw(self, deadline_s: float) -> bool:
        """Close the endpoint; return whether nothing can land after that."""
        memory = self._memory
        with self._lock:
            self._endpoint = b""
            try:
                return self.call(
                    "withdraw", lambda: memory.withdraw() is True, deadline_s
                )
            except KvdockError as error:
                log.warning("%s", error)
                return False

    def connect(self, endpoint: bytes, deadline_s: float) -> object:
        """Connect to a peer's pool."""
        memory = self._memory

        def late(peer: object) -> None:
            memory.disconnect(peer)

        return self.call(
            "connect to a peer of",
            lambda: memory.connect(endpoint, deadline_s),
            deadline_s,
            late,
        )

    def disconnect(self, peer: object, deadline_s: float) -> bool:
        """End a connection; return whether nothing lands at the peer after that."""
        memory = self._memory
        try:
            return self.call(
                "disconnect a peer of",
                lambda: memory.disconnect(peer) is True,
                deadline_s,
            )
        except KvdockError as error:
            log.warning("%s", error)
            return False

    @property
    def _memory(self) -> PeerMemory:
        return self.attached.handle.peers

    def call(
        self,
        what: str,
        method: Callable[[], T],
        deadline_s: float,
        late: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Call a method of the store within a deadline."""
        channel = self.attached.channel
        return channel.call_attach(
            self.attached.pool, method, late, what=what, deadline_s=deadline_s
        )

    def check_peer(self, offer: Offer) -> None:
        """Check that a peer's pool holds the same bytes, reached the same way."""
        if offer.compatibility != self.compatibility:
            raise AttachError(
                f"pool {self.name!r}: the peer's pages have other bytes: digest "
                f"{offer.compatibility[:16]}, here {self.compatibility[:16]}",
                fix="Model, revision, draft, LoRA, salt and the types and shapes of "
                "all parts must be the same on both sides.",
            )
        if offer.transport != self.attached.backend:
            raise AttachError(
                f"pool {self.name!r} goes over {self.attached.backend!r} here, and "
                f"over {offer.transport!r} at the peer",
                fix="Route it to the same backend on both sides.",
            )
        theirs, mine = offer.grid.page_tokens, self.grid.page_tokens
        if theirs != mine and theirs not in self._page_sizes:
            self._page_sizes.add(theirs)
            log.info(
                "pool %s: pages of %d tokens here, of %d at the peer: each token is "
                "sent to its slot",
                self.name, mine, theirs,
            )  # fmt: skip
