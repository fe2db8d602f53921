"""Stores: objects that move the pages of one pool, as `kvdock_register_pool` returns.

A store needs no base class. Where a plugin leaves a hook out, the core asks the
store instead, so a plugin is a manifest and a way to open stores:

    @hookimpl
    def kvdock_register_pool(pool, region, config):
        return Store(config.settings.root / config.namespace)

What a store can do besides `run` and `close` is declared in the manifest and
never read off its methods: a store that does not fit its manifest is rejected
when a pool is attached.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from kvdock.errors import PluginError
from kvdock.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvdock.batch import Batch, BatchResult
    from kvdock.capacity import Capacity
    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec


class PoolStore(Protocol):
    """What moves the pages of one attached pool.

    The optional members are those of `WholeStore`. A store has those that its manifest
    declares.
    """

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch that is not a SEND; the rules are `kvdock_batch_io`'s."""

    def close(self) -> None:
        """End the use of the pool's memory; the rules are `kvdock_release`'s."""


class PeerMemory(Protocol):
    """Moves pages straight into the memory of peers, and opens memory to them.

    It is the member `peers` of a store whose manifest declares `peers`.
    """

    def endpoint(self) -> bytes:
        """Open the pool's memory to peers; the rules are `kvdock_endpoint`'s."""

    def connect(self, endpoint: bytes, deadline_s: float) -> object:
        """Connect to a peer's pool; the rules are `kvdock_connect`'s."""

    def disconnect(self, peer: object) -> bool:
        """End a connection; the rules are `kvdock_disconnect`'s."""

    def withdraw(self) -> bool:
        """Close the pool's memory to peers; the rules are `kvdock_withdraw`'s."""

    def send(self, batch: Batch) -> BatchResult:
        """Do one SEND; the rules are `kvdock_batch_io`'s."""


class WholeStore(PoolStore, Protocol):
    """A store with all that a manifest can declare."""

    def touch(self, keys: Sequence[str]) -> None:
        """Count objects as used now, if `touch` is declared; as `kvdock_touch`."""

    def removed(self, limit: int) -> Sequence[str]:
        """Return removed keys, if `removed` is declared; as `kvdock_removed`."""

    def capacity(self) -> Capacity | None:
        """Return how full it is, if `capacity` is declared; as `kvdock_capacity`."""

    @property
    def peers(self) -> PeerMemory:
        """Memory of the pool as peers see it, if `peers` is declared."""


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
    """A store around a store, which passes on exactly what the inner one has.

    A subclass overrides what it changes, and calls `inner` for the rest:

        class Slow(StoreWrapper):
            def run(self, batch):
                time.sleep(1.0)
                return self.inner.run(batch)

    What it overrides and the inner store lacks is lacking here as well: the manifest
    says what there is.
    """

    def __init__(self, inner: PoolStore) -> None:
        self.inner = inner
        for member in ("run", "close", *MEMBERS):
            there = getattr(inner, member, None)
            own = getattr(type(self), member, None)
            if own is None or own is getattr(StoreWrapper, member, None):
                # The inner store's own method: it costs no frame to pass it on.
                setattr(self, member, there)
            elif there is None:
                setattr(self, member, None)

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch that is not a SEND."""
        return self.inner.run(batch)

    def close(self) -> None:
        """End the use of the pool's memory."""
        self.inner.close()


MEMBERS = ("touch", "removed", "capacity", "peers")
"""Members of a store that the field of the same name in the manifest declares."""

STORE_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "kvdock_batch_io": "run",
        "kvdock_release": "close",
        "kvdock_touch": "touch",
        "kvdock_removed": "removed",
        "kvdock_capacity": "capacity",
    }
)
"""Hook to the method of a store that answers it by default."""


# --- Default hooks: what the core answers in the place of a plugin -----------


@hookimpl
def kvdock_key_suffix(pool: PoolSpec, shard: Shard) -> Sequence[str]:
    """Return the suffixes of the core, one for each object of a page."""
    from kvdock.keys import key_suffixes  # noqa: PLC0415 - numpy, 65 ms

    return key_suffixes(pool, shard)


@hookimpl
def kvdock_batch_io(handle: WholeStore, batch: Batch) -> BatchResult:
    """Run the batch in the store, or send its rows."""
    # Only a SEND has addresses of another process.
    return handle.run(batch) if batch.remote is None else handle.peers.send(batch)


@hookimpl
def kvdock_release(handle: PoolStore) -> None:
    """Close the store."""
    handle.close()


@hookimpl
def kvdock_touch(handle: WholeStore, keys: Sequence[str]) -> None:
    """Tell the store."""
    handle.touch(keys)


@hookimpl
def kvdock_removed(handle: WholeStore, limit: int) -> Sequence[str]:
    """Ask the store."""
    return handle.removed(limit)


@hookimpl
def kvdock_capacity(handle: WholeStore) -> Capacity | None:
    """Ask the store."""
    return handle.capacity()


@hookimpl
def kvdock_endpoint(handle: WholeStore) -> bytes:
    """Open the store's memory."""
    return handle.peers.endpoint()


@hookimpl
def kvdock_connect(handle: WholeStore, endpoint: bytes, deadline_s: float) -> object:
    """Connect the store's memory."""
    return handle.peers.connect(endpoint, deadline_s)


@hookimpl
def kvdock_disconnect(handle: WholeStore, peer: object) -> bool:
    """Disconnect the store's memory."""
    return handle.peers.disconnect(peer)


@hookimpl
def kvdock_withdraw(handle: WholeStore) -> bool:
    """Close the store's memory to peers."""
    return handle.peers.withdraw()


_ALWAYS = (kvdock_key_suffix, kvdock_batch_io)

_DECLARED: Mapping[str, tuple[Callable[..., object], ...]] = MappingProxyType(
    {
        "touch": (kvdock_touch,),
        "removed": (kvdock_removed,),
        "capacity": (kvdock_capacity,),
        "peers": (
            kvdock_endpoint,
            kvdock_connect,
            kvdock_disconnect,
            kvdock_withdraw,
        ),
    }
)
"""Field of the manifest to the hooks that need what it declares."""


def returns_stores(own: frozenset[str]) -> bool:
    """Return whether a plugin's handles are stores, by the hooks that it has.

    One that does its batches itself knows what its handles are; the core does not.
    """
    return "kvdock_batch_io" not in own


def default_hooks(
    manifest: Manifest, own: frozenset[str]
) -> dict[str, Callable[..., object]]:
    """Return the hooks that the core answers in a plugin's place, by name."""
    found: list[Callable[..., object]] = list(_ALWAYS)
    if returns_stores(own):
        found.append(kvdock_release)
    for field, hooks in _DECLARED.items():
        if getattr(manifest, field):
            found += hooks
    named = {getattr(one, "__name__", ""): one for one in found}
    return {name: one for name, one in named.items() if name not in own}


def check_store(store: object, manifest: Manifest, own: frozenset[str]) -> None:
    """Check that a store has what its manifest declares, and nothing else."""
    kind, name = type(store).__name__, manifest.name
    is_store = returns_stores(own)
    lacking = [one for one in ("run", "close") if not _has(store, one)]
    if is_store and lacking:
        raise PluginError(
            f"kvdock_register_pool of {name!r} returned a {kind}, which has no "
            + " and no ".join(lacking),
            fix="Return a store (kvdock.plugin.PoolStore), or add the hooks "
            "kvdock_batch_io and kvdock_release.",
        )
    for field in MEMBERS:
        declared, there = bool(getattr(manifest, field)), _has(store, field)
        asked = [getattr(one, "__name__", "") not in own for one in _DECLARED[field]]
        if declared and any(asked) and not there:
            raise PluginError(
                f"the manifest of {name!r} declares {field}, and its store, a {kind}, "
                f"has no member {field!r}",
                fix=f"Add it, or declare {field}=Support.NO.",
            )
        if there and not declared and is_store and all(asked):
            raise PluginError(
                f"a store of type {kind} has the member {field!r}, and the manifest "
                f"of {name!r} does not declare it",
                fix=f"Declare {field}=Support.NATIVE, or remove the member.",
            )


def _has(store: object, member: str) -> bool:
    return getattr(store, member, None) is not None
