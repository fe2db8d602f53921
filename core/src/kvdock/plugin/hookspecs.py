"""The hooks: seven for backend plugins, and one for observers.

What a backend does for one attached pool are methods of the store that
`kvdock_register_pool` returns: see `kvdock.plugin.store`.

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
    from kvdock.events import Event, Origin
    from kvdock.geometry.region import Region
    from kvdock.plugin.manifest import Capability, Manifest, Verdict
    from kvdock.plugin.store import PoolStore
    from kvdock.pools.spec import PoolSpec

PROJECT = "kvdock"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_LABEL = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})?")

REQUIRED = ("kvdock_manifest", "kvdock_register_pool")
"""Hooks that every plugin has; the others may be left out."""


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
) -> PoolStore:
    """Prepare to move pages of a pool.

    Called once per pool on the thread that attaches, before any batch. The
    region's memory stays where it is until the store is closed.

    Returns:
        A store, with the members that the manifest declares. Client state lives in
        it or in `config.shared`, not in the module.

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
def kvdock_batch_io(store: PoolStore, batch: Batch) -> BatchResult:
    """Do one batch.

    Called from any thread, several at a time. Most plugins leave it out: then the
    core calls the store's `run`, whose rules hold here as well, or for a SEND the
    `send` of its `peers`. A plugin that has this hook answers every batch in it, and
    its stores need no `run`.

    Returns:
        One outcome per key, in the order of the keys.
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
