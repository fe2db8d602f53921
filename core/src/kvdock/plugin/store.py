"""Stores: objects that move the pages of one pool, as `kvdock_register_pool` returns.

A store needs no base class; a plugin is a manifest and a way to open stores:

    @hookimpl
    def kvdock_register_pool(pool, region, config):
        return Store(config.settings.root / config.namespace)

What a store can do besides `run` and `close` is declared in the manifest and
never read off its methods: a store that does not fit its manifest is rejected
when a pool is attached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvdock.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvdock.batch import Batch, BatchResult
    from kvdock.capacity import Capacity
    from kvdock.plugin.manifest import Manifest

MEMBERS = ("touch", "removed", "capacity", "peers")
"""Members of a store that the field of the same name in the manifest declares."""

MAX_ENDPOINT_BYTES = 64 << 10
"""Most bytes of an endpoint: it travels with an engine's messages."""


class PoolStore(Protocol):
    """What moves the pages of one attached pool.

    The optional members are those of `WholeStore`. A store has those that its manifest
    declares.
    """

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch that is not a SEND.

        Called from any thread, several at a time. Raises only for a defect: what
        fails for a key is that key's outcome.

        Once it has returned, nothing touches the batch's memory and no reference
        to it is kept, after a timeout or an error either: the engine uses that
        memory for other pages at once. A transfer that cannot be cancelled has to
        be waited for, past the deadline if need be. Only where a client library may
        still move bytes of a transfer that it has given up, the result has a
        `MemoryHold`, which keeps that memory reserved. The backend releases it once
        that is ruled out, at the latest when the last store of the client is
        closed.

        Ends by `batch.deadline_s`; keys that are not done by then are TIMEOUT. The
        core enforces it by abandoning the call: its caller gets misses in time, the
        memory stays reserved until the call has returned, and the backend is cut
        off for a while. A client library that waits while it holds Python's global
        interpreter lock defeats every deadline, those of other backends and of the
        engine too; call such a library in another process.

        Returns:
            One outcome per key, in the order of the keys.
        """

    def close(self) -> None:
        """End the use of the pool's memory.

        Called once when an attachment ends, after its last batch.
        """


class WholeStore(PoolStore, Protocol):
    """A store with all that a manifest can declare."""

    def touch(self, keys: Sequence[str]) -> None:
        """Count objects as used now, so that others are evicted before them.

        Called in the background, one call at a time, for pages that an engine
        serves from memory of its own and so does not load. A backend that does not
        order its objects by use, or would need I/O for each key, leaves it out.

        Args:
            keys: In the order of the prefix, `max_batch_keys` at most. Those that
                are not there count for nothing.
        """

    def removed(self, limit: int) -> Sequence[str]:
        """Return the keys of stored objects that are no longer there.

        Called on its own thread, for an engine that has asked for page events: once
        when the pool is attached, and then now and then. The first call begins to
        keep track of what this store keeps; a key is reported once. Costs no I/O
        for each key.

        Args:
            limit: How many keys to keep track of; the oldest are forgotten first.
        """

    def capacity(self) -> Capacity | None:
        """Return how full the store is.

        Called between batches on its own thread, at most once in
        `calls.capacity_interval`, and only if an observer is installed.

        Returns:
            What is used and what may be used, of all that shares one limit; or
            None if it is not known now.
        """

    @property
    def peers(self) -> PeerMemory:
        """Memory of the pool as peers see it."""


class PeerMemory(Protocol):
    """Moves pages straight into the memory of peers, and opens memory to them.

    It is the member `peers` of a store whose manifest declares `peers`.
    """

    def endpoint(self) -> bytes:
        """Open the pool's memory to peers; return what they need to reach it.

        Called when an engine offers the pool for the first time, and again after
        `withdraw`. Before that, nothing listens and no peer may write. From then
        on a peer that is connected may write anywhere in the region that was
        registered for this store, and nowhere else.

        Returns:
            Opaque bytes for the same backend in another process, at most
            `MAX_ENDPOINT_BYTES`.

        Raises:
            KvdockError: If it cannot be opened, with the reason.
        """

    def connect(self, endpoint: bytes, deadline_s: float) -> object:
        """Connect to the memory of a peer's pool.

        Called once per pool and peer; several batches use the connection at once.

        Nothing may be written, here or later, unless the receiver of this very endpoint
        is there: after `withdraw`, or in a process that was restarted, another endpoint
        may have the same address, and its memory belongs to other requests. That holds
        for a connection that the library opens again by itself as well.

        Args:
            endpoint: What `endpoint` returned there. It came over a network: nothing
                in it is trusted.
            deadline_s: When to give up, on `time.monotonic()`'s clock.

        Returns:
            The plugin's own peer, for `Batch.peer`.

        Raises:
            KvdockError: If the peer is not reached by the deadline, with the reason.
        """

    def disconnect(self, peer: object) -> bool:
        """End a connection to a peer.

        Called once per connection, on the side that sends, when no batch uses it. Not
        called for a peer whose last batch has not ended; the store's `close` ends
        those.

        Returns:
            Whether nothing that was sent on it can land at the peer after this. False
            where the library does not guarantee that.
        """

    def withdraw(self) -> bool:
        """Close the pool's memory to its peers, which may be in the middle of a batch.

        Called on the side that receives, while a sender's state is not known and its
        slots are needed. Deregistering memory is not enough: bytes of a transfer that
        has begun may land after it. Senders get UNAVAILABLE, now or with their
        next batch.

        Where the connections belong to several pools of one attachment, it may close
        all of them; the core then withdraws each before it offers one again.

        Returns:
            Whether no byte of any peer can land in this pool's memory after this
            returned, of what has begun or of what an old endpoint begins. False where
            the library does not guarantee that: the slots then stay held.
        """

    def send(self, batch: Batch) -> BatchResult:
        """Do one SEND, by the rules of `run`.

        They hold for the peer's memory as well: once the result is returned
        without a `MemoryHold`, no byte of this batch can land there any more, whatever
        the outcomes. On that word the receiver uses its slots for other requests. OK
        for a row says that it is whole in the peer's memory. Rows of a peer that is
        dead are UNAVAILABLE at once.
        """


class StorelessPool:
    """A store of no pages, for pools that only go straight to peers.

    A plugin whose stores have more members adds them in a subclass.

    Args:
        peers: The pool's memory as peers see it.
        release: Ends the use of that memory.
    """

    def __init__(self, peers: PeerMemory, release: Callable[[], None]) -> None:
        self.peers = peers
        self._release = release

    def run(self, batch: Batch) -> BatchResult:
        """Find nothing, and store nothing."""
        from kvdock.batch import (  # noqa: PLC0415 - numpy, 65 ms
            BatchResult,
            Operation,
            Outcome,
        )

        reads = batch.operation in (Operation.EXISTS, Operation.GET)
        return BatchResult.all(batch, Outcome.ABSENT if reads else Outcome.REFUSED)

    def close(self) -> None:
        """End the use of the pool's memory."""
        self._release()


class StoreWrapper:
    """A store around a store, which passes on what the inner one has.

    A subclass has what it changes, and calls `inner` for the rest:

        class Slow(StoreWrapper):
            def run(self, batch):
                time.sleep(1.0)
                return self.inner.run(batch)

    A wrapper may as well be any other class with the members of a store. Which of
    them are used, the manifest says.
    """

    def __init__(self, inner: PoolStore) -> None:
        self.inner = inner

    def __getattr__(self, member: str) -> Any:  # noqa: ANN401 - of any type
        """Return what the inner store has."""
        return getattr(self.inner, member)


def endpoint_of(memory: PeerMemory, backend: str) -> bytes:
    """Open a pool's memory to peers; return what they need to reach it.

    Raises:
        KvdockError: If it cannot, or the answer is not an endpoint.
    """
    found: object = memory.endpoint()
    if not isinstance(found, bytes) or len(found) > MAX_ENDPOINT_BYTES:
        what = f"{len(found)} bytes" if isinstance(found, bytes) else repr(found)
        raise PluginError(
            f"endpoint() of {backend} returned {what}",
            fix=f"It returns at most {MAX_ENDPOINT_BYTES} bytes.",
        )
    return found


def check_store(
    store: object, manifest: Manifest, own: Collection[str], *, wrapped: bool = False
) -> None:
    """Check that a store has what its manifest declares.

    `own` are the plugin's hooks. A store that is `wrapped` may have more: its wrapper
    knows all members, and the inner store was checked.

    Raises:
        PluginError: If it lacks a member, or has one that is not declared.
    """
    kind, name = type(store).__name__, manifest.name
    needed = ("close",) if "kvdock_batch_io" in own else ("run", "close")
    lacking = [member for member in needed if not _has(store, member)]
    if lacking:
        raise PluginError(
            f"kvdock_register_pool of {name!r} returned a {kind}, which has no "
            + " and no ".join(lacking),
            fix="Return a store: an object with run(batch) and close().",
        )
    for member in MEMBERS:
        declared, present = bool(getattr(manifest, member)), _has(store, member)
        if declared and not present:
            raise PluginError(
                f"the manifest of {name!r} declares {member}, and its store, a {kind}, "
                f"has no member {member!r}",
                fix=f"Add it, or declare {member}=Support.NO.",
            )
        if present and not declared and not wrapped:
            raise PluginError(
                f"a store of type {kind} has the member {member!r}, and the manifest "
                f"of {name!r} does not declare it",
                fix=f"Declare {member}=Support.NATIVE, or remove the member.",
            )


def _has(store: object, member: str) -> bool:
    return getattr(store, member, None) is not None
