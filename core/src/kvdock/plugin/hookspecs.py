"""The hooks: fifteen for backend plugins, and one for observers.

Where a plugin has no hook of a kind, the core asks the store that
`kvdock_register_pool` returned: see `kvdock.plugin.store`.

Hooks run per load, per pool and per batch, never per page or per key. All of
them are first-result hooks on a plugin manager of their own backend, so one
backend can neither see nor overrule another.

A plugin is a module or an object whose hooks are marked with `hookimpl`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from kvdock.config.tenants import Tenants
from kvdock.errors import AttachError
from kvdock.pools.shard import Shard

if TYPE_CHECKING:
    from kvdock.batch import Batch, BatchResult
    from kvdock.capacity import Capacity
    from kvdock.events import Event, Origin
    from kvdock.geometry.region import Region
    from kvdock.plugin.manifest import Capability, Manifest, Verdict
    from kvdock.pools.spec import PoolSpec

PROJECT = "kvdock"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_LABEL = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})?")

REQUIRED = ("kvdock_manifest", "kvdock_register_pool")
"""Hooks that every plugin has; the others may be left out."""

PEER_HOOKS = ("kvdock_endpoint", "kvdock_connect")
"""Hooks of a plugin that declares `peers` and runs batches itself."""

MAX_ENDPOINT_BYTES = 64 << 10
"""Most bytes of an endpoint: it travels with an engine's messages."""


@attrs.frozen
class Finding:
    """One finding of a probe.

    Args:
        ok: Whether this is as it should be, or at least works.
        what: What was looked at and found.
        hint: What to do if it is not.
        warning: Whether it works and still deserves attention; only with `ok`.
        skipped: Whether nothing was looked at, since it is not there or not
            configured; only with `ok`.
    """

    ok: bool
    what: str
    hint: str = ""
    warning: bool = False
    skipped: bool = False


@attrs.frozen(eq=False)
class HostMemory:
    """Host memory that a backend brings.

    Args:
        buffer: The bytes: writable and contiguous, with the buffer protocol.
            They may hold anything at first.
        give_back: Call it once, when they are no longer in use. A pool
            that lies in them keeps them until it is released.
    """

    buffer: Any = attrs.field(repr=False)
    give_back: Callable[[], None] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class AttachConfig:
    """The configuration that a backend receives when memory is attached to it.

    Args:
        settings: An instance of the manifest's settings class, or None.
        namespace: Hex digest that begins every key; 64 characters.
        namespace_record: Readable form of what the digest covers, to be kept
            beside the data where a backend can and compared when it is back.
        shard: The slice of the model that this process owns.
        shared: One mutable mapping for all pools of this backend in this
            attachment: the place for a client that they share.
        process: Distinguishes this process from others of its deployment, where
            they have their settings in common; the same after a restart. For
            names of local directories, never for what is stored.
        trial: Whether only pages of the core's own are moved, to try the
            backend out. It then brings nothing along that others could come
            to use, and what would only be a warning to an engine is an error.
        to_peers: Whether the pools go straight to peers. A backend that is given no
            place to store their pages then does without one; see `StorelessPool`.
        max_age_s: Pages that were stored longer ago are not served; 0 for any age.
        erase_within_s: How soon after its time the bytes of an expired page go. Both
            are for backends whose `retention` is native.
        tenant: Name of the tenant that the namespace's salt belongs to, for keys.
        tenants: The listed tenants, with their room.
    """

    settings: Any = None
    namespace: str = ""
    namespace_record: Mapping[str, object] = attrs.field(factory=dict)
    shard: Shard = attrs.field(factory=Shard)
    shared: dict[str, Any] = attrs.field(factory=dict)
    process: str = ""
    trial: bool = False
    to_peers: bool = False
    max_age_s: float = 0.0
    erase_within_s: float = 60.0
    tenant: str = "default"
    tenants: Tenants = attrs.field(factory=Tenants, repr=False)

    def __attrs_post_init__(self) -> None:
        """Refuse what could leave the directory that it names."""
        if not _LABEL.fullmatch(self.process):
            raise AttachError(
                f"the process is called {self.process!r}",
                fix="Use up to 64 letters, digits, dots, dashes and underscores, "
                "and no dot first.",
            )


# --- Load: once per process -------------------------------------------------


@hookspec(firstresult=True)
def kvdock_manifest() -> Manifest:
    """Declare what the backend can do.

    Called once when the plugin is loaded. Does no I/O and imports no client
    library: a missing library is for `kvdock_probe` to report.

    Returns:
        The manifest; its name is the entry point's.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Check whether the backend can work with these settings.

    Called by `kvdock doctor` and the conformance kit, with settings but
    without a namespace, never while an engine attaches memory. May load
    libraries and connect to servers, within a few seconds.

    Returns:
        What was found, each with a hint where something is missing.
    """
    raise NotImplementedError


# --- Route: once per pool ---------------------------------------------------


@hookspec(firstresult=True)
def kvdock_check_capability(
    capability: Capability,
    pool: PoolSpec,
    shard: Shard,
    settings: Any,  # noqa: ANN401 - the plugin's own class
) -> Verdict | None:
    """Judge one capability for one pool, where the manifest is too coarse.

    Called while routing, for each capability that the pool needs. Without
    this hook, or where it returns None, the manifest answers. A limit of the
    manifest (object, batch and key size) can be tightened, never loosened.

    Args:
        capability: What is asked about. For `HOST_ALLOCATOR` a verdict that
            is true says that any memory will do.
        pool: Who needs it.
        shard: The slice of the model that this process owns.
        settings: An instance of the manifest's settings class; None where
            the plan is made without them, or there are none.

    Returns:
        A verdict with its reason, or None.
    """
    raise NotImplementedError


# --- Attach: once per pool --------------------------------------------------


@hookspec(firstresult=True)
def kvdock_allocate(nbytes: int, config: AttachConfig) -> HostMemory | None:
    """Allocate host memory that the backend reaches.

    Called on the thread that attaches, before the pool is registered: by the
    core for memory of its own, and for an engine's pools without a namespace.
    A manifest that declares `host_allocator` has this hook.

    Args:
        nbytes: How much, to the byte.
        config: As for `kvdock_register_pool`.

    Returns:
        The memory, or None where with these settings any memory will do.

    Raises:
        KvdockError: If there is none, with the reason.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> object:
    """Prepare to move pages of a pool.

    Called once per pool on the thread that attaches, before any batch. The
    region's memory stays where it is until `kvdock_release`.

    Returns:
        A store (`kvdock.plugin.PoolStore`), or any other handle of a plugin that
        has `kvdock_batch_io` itself. Client state lives in it or in
        `config.shared`, not in the module.

    Raises:
        KvdockError: To reject the pool, with the reason.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_key_suffix(pool: PoolSpec, shard: Shard) -> Sequence[str]:
    """Spell the end of the keys of a page's objects.

    Called once per pool when it is attached; the answer is kept. Most
    plugins leave it out: then the core answers
    `kvdock.keys.key_suffixes(pool, shard)`.

    Returns:
        One suffix for each of `stored_objects(pool, shard)`, in that order, never
        shared with another pool, rank or object, and the same in every
        process.
    """
    raise NotImplementedError


# --- Move: once per batch ---------------------------------------------------


@hookspec(firstresult=True)
def kvdock_batch_io(handle: object, batch: Batch) -> BatchResult:
    """Do one batch.

    Called from any thread, several at a time. Raises only for a defect: what
    fails for a key is that key's outcome.

    Once it has returned, nothing touches the batch's memory and no reference
    to it is kept, after a timeout or an error either: the engine uses that
    memory for other pages at once. A transfer that cannot be cancelled has to
    be waited for, past the deadline if need be. Only where a client library may
    still move bytes of a transfer that it has given up, the result has a
    `MemoryHold`, which keeps that memory reserved. The backend releases it once
    that is ruled out, at the latest when the last handle of the client is
    released.

    For a SEND the same holds for the peer's memory: once the result is returned
    without a `MemoryHold`, no byte of this batch can land there any more, whatever
    the outcomes. On that word the receiver uses its slots for other requests. OK
    for a row says that it is whole in the peer's memory. Rows of a peer that is
    dead are UNAVAILABLE at once.

    Ends by `batch.deadline_s`; keys that are not done by then are TIMEOUT. The
    core enforces it by abandoning the call: its caller gets misses in time, the
    memory stays reserved until the call has returned, and the backend is cut
    off for a while. A client library that waits while it holds Python's global
    interpreter lock defeats every deadline, those of other backends and of the
    engine too; call such a library in another process.

    Returns:
        One outcome per key, in the order of the keys.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_touch(handle: object, keys: Sequence[str]) -> None:
    """Count objects as used now, so that others are evicted before them.

    Called in the background, one call at a time, for pages that an engine
    serves from memory of its own and so does not load. A backend that does not
    order its objects by use, or would need I/O for each key, leaves it out.

    Args:
        handle: The pool's handle.
        keys: In the order of the prefix, `max_batch_keys` at most. Those that
            are not there count for nothing.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_release(handle: object) -> None:
    """Release a pool.

    Called once per handle when an attachment ends, after its last batch.
    """
    raise NotImplementedError


# --- Send: straight to a peer's memory ---------------------------------------


@hookspec(firstresult=True)
def kvdock_endpoint(handle: object) -> bytes:
    """Open a pool's memory to peers; return what they need to reach it.

    Called when an engine offers the pool for the first time, and again after
    `kvdock_withdraw`. Before that, nothing listens and no peer may write. From then
    on a peer that is connected may write anywhere in the region that was
    registered for this handle, and nowhere else. A manifest that declares
    `peers` has this hook and `kvdock_connect`.

    Returns:
        Opaque bytes for the same backend in another process, at most
        `MAX_ENDPOINT_BYTES`.

    Raises:
        KvdockError: If it cannot be opened, with the reason.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_connect(handle: object, endpoint: bytes, deadline_s: float) -> object:
    """Connect to the memory of a peer's pool.

    Called once per pool and peer; several batches use the connection at once.

    Nothing may be written, here or later, unless the receiver of this very endpoint is
    there: after `kvdock_withdraw`, or in a process that was restarted, another endpoint
    may have the same address, and its memory belongs to other requests. That holds for
    a connection that the library opens again by itself as well.

    Args:
        handle: The pool's handle on this side, whose memory is read.
        endpoint: What `kvdock_endpoint` returned there. It came over a network:
            nothing in it is trusted.
        deadline_s: When to give up, on `time.monotonic()`'s clock.

    Returns:
        The plugin's own peer, for `Batch.peer`.

    Raises:
        KvdockError: If the peer is not reached by the deadline, with the reason.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_disconnect(handle: object, peer: object) -> bool:
    """End a connection to a peer.

    Called once per connection, on the side that sends, when no batch uses it. Not
    called for a peer whose last batch has not ended; `kvdock_release` ends those.

    Returns:
        Whether nothing that was sent on it can land at the peer after this. False
        where the library does not guarantee that.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_withdraw(handle: object) -> bool:
    """Close a pool's memory to its peers, which may be in the middle of a batch.

    Called on the side that receives, while a sender's state is not known and its
    slots are needed. Deregistering memory is not enough: bytes of a transfer that
    has begun may land after it. Senders get UNAVAILABLE, now or with their
    next batch.

    Where the connections belong to several pools of one attachment, it may close
    all of them; the core then withdraws each before it offers one again.

    Returns:
        Whether no byte of any peer can land in this pool's memory after this
        returned, of what has begun or of what an old endpoint begins. False where the
        library does not guarantee that: the slots then stay held.
    """
    raise NotImplementedError


# --- Look: now and then ------------------------------------------------------


@hookspec(firstresult=True)
def kvdock_capacity(handle: object) -> Capacity | None:
    """Return how full the store is.

    Called between batches on its own thread, at most once in
    `calls.capacity_interval`, and only if an observer is installed. Backends that
    cannot know it leave it out.

    Returns:
        What is used and what may be used, of all that shares one limit; or
        None if it is not known now.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kvdock_removed(handle: object, limit: int) -> Sequence[str]:
    """Return the keys of stored objects that are no longer there.

    Called on its own thread, for an engine that has asked for page events: once
    when the pool is attached, and then now and then. The first call begins to
    keep track of what this handle stores; a key is reported once. Costs no I/O
    for each key. Backends that cannot know it leave it out.

    Args:
        handle: The pool's handle.
        limit: How many keys to keep track of; the oldest are forgotten first.
    """
    raise NotImplementedError


# --- Observe: once per batch at most ----------------------------------------


@hookspec
def kvdock_observe(event: Event, origin: Origin) -> None:
    """Record what no wrapper of another hook can see.

    Called on any thread, after the fact, for observers; a backend leaves it
    out. Returns at once and raises nothing: what it costs, every batch pays.

    Args:
        event: What happened.
        origin: The attachment that it happened in.
    """
    raise NotImplementedError
