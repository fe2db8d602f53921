"""One guarded client of the library, shared by the pools of an attachment.

Calls on a closed store crash the process, closing one under a running call does
too, and in a forked child every call hangs. So each call goes through
`Client.session`, which counts it, and nothing is closed or unregistered while a
call is counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import Block
from kvdock.errors import RegionError
from kvdock_mooncake.connect import join, limit_patience
from kvdock_mooncake.error_codes import MASTER_LOST, sentence_of
from kvdock_mooncake.health import Health
from kvdock_mooncake.held_memory import HeldMemory
from kvdock_mooncake.inflight import InFlightLimit
from kvdock_mooncake.library import Library, load
from kvdock_mooncake.lookup_cache import LookupCache
from kvdock_mooncake.master import Master
from kvdock_mooncake.namespace_state import NamespaceState
from kvdock_mooncake.put_options import PutOptions
from kvdock_mooncake.registered_memory import KnownMemory
from kvdock_mooncake.shared_segments import SHARED_SEGMENTS
from kvdock_mooncake.shutdown import BACKGROUND_CALLS
from kvdock_mooncake.spill import SpillDirectory
from kvdock_mooncake.teardown import end_store
from kvdock_mooncake.transfer_limits import pieces_at_once, warnings
from kvdock_mooncake.warmup import WarmUp

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings

log = logging.getLogger("kvdock")

_DRAIN_S = 2.0
_LEAVE_EVERY_S = 1.0
_NO_KEY = "kvdock/nothing"


class ClientClosed(Exception):  # noqa: N818 - handled by callers of `session`
    """The client makes no call: it is closed, or in a forked child."""


class State(StrEnum):
    """The state of the client: whether calls may be made."""

    READY = "ready"
    """Calls may be made."""
    RENEWING = "renewing"
    """The store is being replaced by a new one."""
    CLOSING = "closing"
    """The last pool has left; the last running call closes the store."""
    CLOSED = "closed"
    """The store is closed."""


@attrs.define(eq=False)
class PoolRegistration:
    """One pool's share of a client.

    Args:
        background: Whether it belongs to a background task instead of a pool,
            which ends with the last pool.
    """

    blocks: list[Block] = attrs.field(factory=list)
    background: bool = attrs.field(default=False, kw_only=True)
    calls: int = attrs.field(default=0, init=False)
    left: bool = attrs.field(default=False, init=False)


@attrs.define(eq=False)
class Client:
    """A store, its registered memory, and its running calls."""

    library: Library
    settings: MooncakeSettings
    _store: Any
    put_options: PutOptions
    lookup_cache: LookupCache
    in_flight: InFlightLimit
    spill: SpillDirectory | None
    memory: KnownMemory = attrs.field(factory=KnownMemory, init=False)
    state: State = attrs.field(default=State.READY, init=False)
    mark: Block = attrs.field(init=False)
    _scratch: WarmUp = attrs.field(init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)
    corrupt_keys: set[str] = attrs.field(factory=set, init=False)
    warm_up_status: int = attrs.field(default=0, init=False)
    _namespaces: dict[str, NamespaceState] = attrs.field(factory=dict, init=False)
    _close_with_last_pool: bool = attrs.field(init=False)
    _members: set[PoolRegistration] = attrs.field(factory=set, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _registering: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    health: Health = attrs.field(init=False)
    held: HeldMemory = attrs.field(init=False)
    master: Master = attrs.field(init=False)

    @classmethod
    def open(cls, settings: MooncakeSettings, owner: str, namespace: str) -> Client:
        """Join the cluster and prove that bytes can be stored and read back.

        `owner` names this process, for the directory that it spills into; the warm-up's
        key lies in `namespace`.

        Raises:
            KvdockError: If the library is missing, the cluster cannot be
                joined, or what is read back is not what was stored.
        """
        limit_patience(settings)
        for warning in warnings(settings):
            log.warning("mooncake: %s", warning)
        library = load()
        spill = SpillDirectory.claim(settings, owner) if settings.ssd_offload else None
        try:
            if spill:
                spill.wait_for_previous_owner(settings.client_ttl_s)
            store = join(library, settings, spill.path if spill else "")
        except BaseException:
            if spill:
                spill.mark_clean()
            raise
        client = cls(
            library=library,
            settings=settings,
            store=store,
            spill=spill,
            put_options=PutOptions.of(library, settings, store),
            lookup_cache=LookupCache(0.0 if library.probes else settings.lease_s),
            in_flight=InFlightLimit(pieces_at_once(settings)),
        )
        try:
            client._take_scratch()
            client.warm_up(namespace, leases=True)
        except BaseException:
            client._close_store()
            raise
        return client

    # --- Running calls -------------------------------------------------------

    @health.default
    def _hopeful(self) -> Health:
        # Two stores cannot spill into one directory.
        ttl_s = self.settings.client_ttl_s
        return Health(replaceable=self.spill is None, client_ttl_s=ttl_s)

    @held.default
    def _nothing_held(self) -> HeldMemory:
        return HeldMemory.of(self.settings)

    @master.default
    def _address(self) -> Master:
        return Master.of(self.settings)

    @_close_with_last_pool.default
    def _lends(self) -> bool:
        return bool(self.settings.segment_bytes or self.settings.standalone)

    @contextmanager
    def session(self, member: PoolRegistration) -> Iterator[Any]:
        """Lend the store for one call; raise ClientClosed if none may be made."""
        store = self.acquire(member)
        try:
            yield store
        finally:
            self.release(member)

    def acquire(self, member: PoolRegistration) -> Any:  # noqa: ANN401 - the library's own class
        """Lend the store until `release`; see `session`."""
        if os.getpid() != self._pid:
            raise ClientClosed("this process was forked after the client was set up")
        if not BACKGROUND_CALLS.begin():
            raise ClientClosed("the process ends")
        with self._changed:
            if self.state is State.READY and not member.left:
                self._calls += 1
                member.calls += 1
                return self._store
        BACKGROUND_CALLS.finish()
        raise ClientClosed(f"the client is {self.state}")

    def release(self, member: PoolRegistration) -> None:
        """End a call, and do what had to wait for its end."""
        try:
            self._leave(member)
        finally:
            BACKGROUND_CALLS.finish()

    def _leave(self, member: PoolRegistration) -> None:
        with self._changed:
            self._calls -= 1
            member.calls -= 1
            gone = member.left and not member.calls
            renew = self._may_renew()
            self._changed.notify_all()
        if renew:
            self._renew()
        if gone:
            self._dismiss(member)

    def _may_renew(self) -> bool:
        """Begin to replace a store, once no call runs, if that is needed."""
        if self._calls or self.state is not State.READY:
            return False
        if not (self.health.is_stuck or self.held.wants_renewal()):
            return False
        self.state = State.RENEWING
        return True

    def admit(
        self, blocks: tuple[Block, ...], *, background: bool = False
    ) -> PoolRegistration:
        """Register a pool's memory.

        If `background`, the member ends with the last pool.

        Raises:
            KvdockError: If the library rejects it.
            ClientClosed: If the client is closed.
        """
        member = PoolRegistration(background=background)
        with self._changed:
            if self.state is not State.READY:
                raise ClientClosed(f"the client is {self.state}")
            self._members.add(member)
        try:
            for block in blocks:
                self.extend(member, block)
        except BaseException:
            self.release_pool(member)
            raise
        return member

    def extend(self, member: PoolRegistration, block: Block) -> None:
        """Register one more piece of memory for a member."""
        with self._registering:
            member.blocks.append(
                self.memory.add(SHARED_SEGMENTS.whole(block), self._register)
            )

    def release_pool(self, member: PoolRegistration) -> None:
        """Release a pool; the last one closes the store.

        Waits a little for its running calls. What still runs then keeps the
        memory registered and the store open until it has ended, because the
        library would crash, or write into memory that it no longer owns.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            if member.left:
                return
            member.left = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not member.calls, _DRAIN_S)
            if member.calls:
                log.warning("a Mooncake call is still running; it is waited for")
                return
        self._dismiss(member)

    def _dismiss(self, member: PoolRegistration) -> None:
        with self._changed:
            if member not in self._members:
                return
            self._members.remove(member)
            tasks = [one for one in self._members if one.background]
            if len(tasks) < len(self._members):
                tasks = []
            # Held memory is free once its store is closed.
            ends = self._close_with_last_pool or bool(self.held.nbytes)
            last = not self._members and ends
            if last:
                self.state = State.CLOSING
        with self._registering:
            for block in member.blocks:
                self.memory.remove(block, self._unregister)
        for task in tasks:
            self.release_pool(task)
        if last:
            self._close_store()
            return
        with self._changed:
            renew = self._may_renew()
        if renew:
            self._renew()

    def left(self, member: PoolRegistration, within_s: float) -> bool:
        """Wait for a while; return whether a member is to end."""
        with self._changed:
            return self._changed.wait_for(lambda: member.left, within_s)

    def namespace_state(self, namespace: str, *, trial: bool = False) -> NamespaceState:
        """Return what the pools of a namespace share."""
        with self._changed:
            return self._namespaces.setdefault(
                namespace, NamespaceState(namespace, self.settings.lease_s, trial)
            )

    def removes(self, member: PoolRegistration, remove: Callable[[Any], int]) -> bool:
        """Make a call of a background task; return whether it succeeded."""
        try:
            with BACKGROUND_CALLS.call() as may, self.session(member) as store:
                return may and not remove(store)
        except ClientClosed:
            return False
        except Exception as error:  # noqa: BLE001 - the library's, of any kind
            log.debug("mooncake: a background task failed: %s", error)
            return False

    def close_when_idle(self) -> None:
        """Close the store when the last pool leaves, even if no memory is lent."""
        with self._changed:
            self._close_with_last_pool = True
            last = not self._members and self.state is State.READY
            if last:
                self.state = State.CLOSING
        if last:
            self._close_store()

    def _close_store(self) -> None:
        for block in self.memory.blocks:
            self.memory.remove(block, self._unregister)
        if self.reachable():
            self._close()
        else:
            # Without a master the library holds the interpreter for up to 11 s,
            # under a frozen standalone client for as long as that lasts.
            log.warning("the %s is away: leaving when it is back", self.master.what)
            threading.Thread(
                target=self._close_later, name="kvdock-leave", daemon=True
            ).start()

    def reachable(self) -> bool:
        """Return whether a call is answered: what is frozen listens as well."""
        if not self.master.answers():
            return False
        return int(self._store.is_exist(_NO_KEY)) not in MASTER_LOST

    def _close_later(self) -> None:
        while True:
            with BACKGROUND_CALLS.call() as may:
                if may and self.reachable():
                    self._close()
                    return
            time.sleep(_LEAVE_EVERY_S)

    def _close(self) -> None:
        if not end_store(self._store, self._closed):
            log.warning("the Mooncake store takes long to close; it is waited for")

    def _closed(self, status: int) -> None:
        self.state = State.CLOSED
        if self.spill:
            self.spill.mark_clean()
        if status:
            log.warning("the Mooncake store did not close: %s", sentence_of(status))
        else:
            self.held.release()

    # --- Memory --------------------------------------------------------------

    def _register(self, block: Block) -> None:
        self._register_with(self._store, block)

    def _register_with(self, store: Any, block: Block) -> None:  # noqa: ANN401 - the library's own class
        status = store.register_buffer(block.address, block.nbytes)
        if not status:
            SHARED_SEGMENTS.enter(block, self)
            return
        fix = "Look at the library's lines on standard error."
        if self.settings.standalone:
            fix = "Use Dock.plan(settings=...), or memory of Dock.allocate."
        raise RegionError(
            f"the Mooncake library does not register {block.nbytes} bytes at "
            f"{block.address:#x}: {sentence_of(status)}",
            fix=fix,
        )

    def _unregister(self, block: Block) -> None:
        status = self._store.unregister_buffer(block.address)
        if status:
            # A piece of shared memory that stays so can never be used again: the
            # library says yes when it is registered again, and no to each transfer.
            log.warning("memory stays registered: %s", sentence_of(status))
        else:
            SHARED_SEGMENTS.leave(block, self)

    def take(self, nbytes: int) -> int:
        """Get new memory that a standalone client shares: its address, or 0."""
        return int(self._store.alloc_from_mem_pool(nbytes))

    def _take_scratch(self) -> None:
        """Get a few bytes for marks and for the warm-up."""
        shared = self.settings.standalone
        self._scratch = WarmUp.of(
            (lambda size: SHARED_SEGMENTS.take(size, self, self.take))
            if shared
            else None
        )
        block = self._scratch.block
        self.memory.add(block, self._register)
        self.mark = Block(block.address, 1)

    # --- Health --------------------------------------------------------------

    def warm_up(self, namespace: str, *, leases: bool = False) -> None:
        """Store, read back and remove a few bytes; see `WarmUp.round_trip`."""
        with self.session(PoolRegistration()) as store:
            self.warm_up_status = self._scratch.round_trip(
                store, namespace, self.put_options.config(), leases=leases
            )

    def _renew(self) -> None:
        """Replace a store that is stuck or holds memory; its own segment is lost.

        The old one is shut only when there is a new one: a call on a store
        that is shut would end the process.
        """
        why = "every Mooncake transfer fails"
        if self.held.nbytes:
            why = "Mooncake transfers that were given up may still end"
        lost = "; its segment is lost" if self.settings.segment_bytes else ""
        log.warning("%s: joining the cluster again%s", why, lost)
        self.health.reset()
        try:
            self._swap(join(self.library, self.settings))
        except Exception as error:  # noqa: BLE001 - a stranger's code
            self.held.postpone_renewal()
            log.warning("the Mooncake cluster cannot be joined again: %s", error)
        self.lookup_cache.clear()
        with self._changed:
            if self.state is State.RENEWING:
                self.state = State.READY

    def _swap(self, store: Any) -> None:  # noqa: ANN401 - the library's own class
        """Take a new store and shut the old one, or the new one if it is unfit.

        The last pool may have left meanwhile, and shut the old one.
        """
        spare = store
        try:
            with self._registering:
                for block in self.memory.blocks:
                    self._register_with(store, block)
                options = PutOptions.of(self.library, self.settings, store)
                with self._changed:
                    if self.state is State.RENEWING:
                        spare, self._store = self._store, store
                        self.put_options = options
        finally:
            replaced = spare is not store
            end_store(spare, partial(self._ended_spare, replaced=replaced))

    def _ended_spare(self, status: int, *, replaced: bool) -> None:
        if replaced and not status:
            self.held.release()
