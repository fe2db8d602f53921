"""One pool whose pages go straight to peers, or come from them."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import numpy as np
import xxhash

from kvdock.errors import AttachError, KvdockError
from kvdock.matching import Rows, coalesce, match, move, packed
from kvdock.pools.enums import Per
from kvdock.transfer.messages import Offer

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray, Int64Array, UInt64Array
    from kvdock.grid import Grid
    from kvdock.plugin.backend import Backend
    from kvdock.plugin.manifest import Manifest
    from kvdock.transfer.attached_pool import AttachedPool
    from kvdock.transfer.landing import LandingArea

log = logging.getLogger("kvdock")

_GATHER_BYTES = 8 << 20
"""How much is gathered at once to be hashed: no more than the caches hold."""

T = TypeVar("T")


def compatibility(record: Mapping[str, object], pool: str) -> str:
    """Return a digest of what must be equal where a pool's bytes go straight over.

    Everything of the namespace, and of its pools this one alone. Page size, layout
    and ranks are left out: the grids say how they differ.

    Args:
        record: The namespace's record.
        pool: The pool's name.
    """
    pools = cast("Mapping[str, Mapping[str, object]]", record["pools"])
    own = dict(pools[pool])
    for name in ("page_tokens", "stored_order", "interleave_tokens"):
        del own[name]
    covered = {**record, "pools": {pool: own}}
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@attrs.define(eq=False)
class DirectPool:
    """One pool of an attachment, with what its peers need.

    Args:
        attached: The pool, its memory and its leases.
        grid: Where its tokens lie.
        compatibility: Digest of all that must be equal on both sides.
        area: Where whole pages land, or None.
    """

    attached: AttachedPool
    grid: Grid
    compatibility: str
    area: LandingArea | None
    _endpoint: bytes = b""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, repr=False)
    _page_sizes: set[int] = attrs.field(factory=set, repr=False)

    @classmethod
    def of(
        cls,
        attached: AttachedPool,
        record: Mapping[str, object],
        area: LandingArea | None,
    ) -> DirectPool:
        """Prepare an attached pool for peers.

        Raises:
            AttachError: If its memory has no grid.
        """
        pool = attached.pool
        if attached.region.grid is None:
            raise AttachError(
                f"pool {pool.name!r} cannot go straight to peers: it lies in rows with "
                "gaps, or its parts are counted per token and per page",
                fix="Use Region.of, as pools whose parts are counted alike.",
            )
        digest = compatibility(record, pool.name)
        return cls(attached, attached.region.grid, digest, area)

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.attached.pool.name

    @property
    def manifest(self) -> Manifest:
        """What its backend declares."""
        return self.attached.channel.backend.manifest

    @property
    def slots(self) -> int:
        """Slots of its memory: tokens, or pages where parts are per page."""
        by_page = self.grid.per is Per.PAGE
        return self.grid.pages * (1 if by_page else self.grid.page_tokens)

    def offer(self, deadline_s: float, *, receives: bool) -> Offer:
        """Return what peers need to know; open an endpoint if it receives.

        Raises:
            KvdockError: If the backend cannot open one.
        """
        endpoint = b""
        if receives:
            # Two threads must not open two endpoints.
            with self._lock:
                if not self._endpoint:
                    backend, handle = self._backend, self.attached.handle
                    self._endpoint = self.call(
                        "offer", lambda: backend.endpoint(handle), deadline_s
                    )
                endpoint = self._endpoint
        return Offer(
            pool=self.name,
            transport=self.attached.backend,
            endpoint=endpoint,
            grid=self.grid,
            compatibility=self.compatibility,
            required=self.attached.pool.required,
        )

    def withdraw(self, deadline_s: float) -> bool:
        """Close the endpoint; return whether nothing can land after that."""
        if "kvdock_withdraw" not in self._backend.plugin.implemented:
            return False
        backend, handle = self._backend, self.attached.handle
        with self._lock:
            self._endpoint = b""
            try:
                return self.call(
                    "withdraw", lambda: backend.withdraw(handle), deadline_s
                )
            except KvdockError as error:
                log.warning("%s", error)
                return False

    def connect(self, endpoint: bytes, deadline_s: float) -> object:
        """Connect to a peer's pool.

        Raises:
            KvdockError: If it is not reached by the deadline.
        """
        backend, handle = self._backend, self.attached.handle

        def late(peer: object) -> None:
            if "kvdock_disconnect" in backend.plugin.implemented:
                backend.disconnect(handle, peer)

        return self.call(
            "connect to a peer of",
            lambda: backend.connect(handle, endpoint, deadline_s),
            deadline_s,
            late,
        )

    def disconnect(self, peer: object, deadline_s: float) -> bool:
        """End a connection; return whether nothing lands at the peer after that."""
        if "kvdock_disconnect" not in self._backend.plugin.implemented:
            return False
        backend, handle = self._backend, self.attached.handle
        try:
            return self.call(
                "disconnect a peer of",
                lambda: backend.disconnect(handle, peer),
                deadline_s,
            )
        except KvdockError as error:
            log.warning("%s", error)
            return False

    @property
    def _backend(self) -> Backend:
        return self.attached.channel.backend

    def call(
        self,
        what: str,
        hook: Callable[[], T],
        deadline_s: float,
        late: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Call a hook within a deadline.

        Raises:
            KvdockError: If it fails, or takes too long.
        """
        channel = self.attached.channel
        return channel.call_attach(
            self.attached.pool, hook, late, what=what, deadline_s=deadline_s
        )

    def check_peer(self, offer: Offer) -> None:
        """Check that a peer's pool holds the same bytes, reached the same way.

        Raises:
            KvdockError: If it does not.
        """
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


def sent_digests(
    mine: Grid, theirs: Grid, pages: Int64Array, slots: Int64Array
) -> UInt64Array:
    """Return XXH3-64 of what is sent of each page, uint64 (pages,).

    Args:
        mine: The sender's grid.
        theirs: Where it goes.
        pages: As for `match`.
        slots: As for `match`.
    """

    def gather(into: Grid, first: int, last: int) -> Rows:
        part = _part(slots, mine, first, last)
        numbers = np.where(part >= 0, np.arange(len(part)), -1)
        return match(mine, into, pages[first:last], numbers)

    return _digests(mine, theirs, len(pages), gather)


def arrived_digests(
    theirs: Grid, mine: Grid, positions: int, slots: Int64Array
) -> UInt64Array:
    """Return the same of what arrived in slots of this process.

    Args:
        theirs: The sender's grid.
        mine: The grid of the slots.
        positions: Pages of the sender.
        slots: As for `match`.
    """

    def gather(into: Grid, first: int, last: int) -> Rows:
        part = _part(slots, theirs, first, last)
        rows = match(into, mine, np.arange(last - first), part)
        return Rows(rows.remote, rows.local, rows.sizes, rows.count)

    return _digests(theirs, mine, positions, gather)


def landed_digests(memory: ByteArray, page_bytes: int) -> UInt64Array:
    """Return the same of pages in a landing area.

    Args:
        memory: uint8 (pages * page_bytes,).
        page_bytes: Bytes of each.
    """
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, len(memory), page_bytes) if page_bytes else ()
    with memoryview(cast("Any", memory)) as view:
        found = [digest(view[at : at + page_bytes]) for at in starts]
    return np.array(found, np.uint64)


def _part(slots: Int64Array, grid: Grid, first: int, last: int) -> Int64Array:
    """Return the slots of some pages of a sender."""
    tokens = 1 if grid.per is Per.PAGE else grid.page_tokens
    return slots[first * tokens : last * tokens]


def _digests(
    sender: Grid,
    receiver: Grid,
    positions: int,
    gather: Callable[[Grid, int, int], Rows],
) -> UInt64Array:
    page_bytes = packed(sender, receiver, 0, 1).page_bytes
    step = max(1, _GATHER_BYTES // max(1, page_bytes))
    found = [np.zeros(0, np.uint64)]
    for first in range(0, positions if page_bytes else 0, step):
        last = min(positions, first + step)
        area = np.empty((last - first) * page_bytes, np.uint8)
        into = packed(sender, receiver, int(area.ctypes.data), last - first)
        rows = coalesce(gather(into, first, last))
        if rows.nbytes < len(area):
            area[:] = 0
        move(rows)
        found.append(landed_digests(area, page_bytes))
    return np.concatenate(found)
