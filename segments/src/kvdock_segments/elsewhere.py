"""What a root holds besides the pools of a store, looked at now and then.

Each release of a model, dtype or size of its tensor parallelism makes a namespace of
its own, and the pages of one that is opened no more would stay for ever. Where the
root or its disk is full, its segments go before any page of a namespace in use: of
the longest unused namespace first, and of that the longest unused segment. Promised
pages stay, and so does what a tenant has within its quota.

A namespace is open while a process holds its lock. Where locks do not reach every
host, it is open for a day after its last use.
"""

from __future__ import annotations

import fcntl
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.config.tenants import NO_TENANT, tenant_number
from kvdock.errors import KvdockError
from kvdock.units import format_age, format_bytes
from kvdock_segments import ownership, walk
from kvdock_segments.cleanup import collect_garbage, delete_if_unowned, remove_empty
from kvdock_segments.index_file import open_index, read_contents
from kvdock_segments.ledger import Ledger
from kvdock_segments.namespace_files import parse_record
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import SETTLED_NS, closing_fd, earlier_now_ns, open_root
from kvdock_segments.tenant_count import TenantCount, sums

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock_segments.directory import SegmentDirectory
    from kvdock_segments.paths import IndexName
    from kvdock_segments.walk import ListedSegment

UNUSED_S = 24 * 3600.0
"""Age of the last use after which a namespace counts as not open, where no lock of
another host would show."""
_LOOK_S = 0.5
"""Least seconds between two looks."""
_PATIENCE = 20
"""How many times as long as a look takes is waited before the next one."""


@attrs.frozen(eq=False)
class OtherSegment:
    """A segment that is in no index of this store.

    Args:
        settled: Whether no later change can have the same time as the one listed.
        tenants: Bytes of pages by tenant; empty where no tenant has a quota.
    """

    namespace: str
    folder: str
    name: IndexName
    listed: ListedSegment
    settled: bool
    tenants: Counter[int]


@attrs.define(eq=False)
class Seen:
    """What was found at one look.

    Args:
        nbytes: Bytes of each other namespace.
        segments: All segments, by namespace, folder and name.
        since_ns: When those namespaces were last used that are not open.
        unused: Their segments; those in front go first.
        promised: What is promised to each tenant in other namespaces.
    """

    nbytes: Counter[str] = attrs.field(factory=Counter)
    segments: dict[tuple[str, str, str], OtherSegment] = attrs.field(factory=dict)
    since_ns: dict[str, int] = attrs.field(factory=dict)
    unused: list[OtherSegment] = attrs.field(factory=list)
    promised: Counter[int] = attrs.field(factory=Counter)

    def used(self) -> Counter[int]:
        """Return the bytes of each tenant."""
        segments = list(self.segments.values())
        return sum((one.tenants for one in segments), Counter[int]())

    def unused_bytes(self) -> int:
        """Return the bytes of namespaces that are not open."""
        return sum(one.listed.nbytes for one in list(self.unused))

    def describe_unused(self) -> str:
        """Say what those that are not open hold; "" for nothing."""
        nbytes, since_ns = self.unused_bytes(), self.since_ns.values()
        if not nbytes:
            return ""
        count = len(since_ns)
        several = "one namespace" if count == 1 else f"{count} namespaces"
        age = format_age((time.time_ns() - min(since_ns)) / 1e9)
        return (
            f"no process has {several} open: {format_bytes(nbytes)}, not used for "
            f"{age}, make way where there is no room"
        )


class Elsewhere:
    """The other namespaces of a root and, for tenants, the other pools of this one.

    Counted from files alone, so a process that is killed leaves no wrong count, and a
    restart or a changed limit begins with the right one. Safe to use from several
    threads.

    Args:
        namespace: The one that is not other; "" for none.
        counts: Counters of events, by name.
        tenants: Numbers of the listed tenants, if one of them has a quota: then index
            files are read as well, each when it has changed.
        own: Folders of the namespace that are in the index of the store.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        counts: Counter[str],
        tenants: Collection[int] = (),
        own: Mapping[int, SegmentDirectory] | None = None,
    ) -> None:
        self._root = root
        self._namespace = namespace
        self._counts = counts
        self._tenants = tenants
        self._own = {} if own is None else own  # it grows
        self._lock = threading.Lock()
        self._next_look_s = -math.inf
        self._salted: dict[str, int] = {}
        self._seen = Seen()

    def look(self) -> Seen:
        """Return what is there, as of a moment ago."""
        began_s = time.monotonic()
        first = self._next_look_s == -math.inf
        # While another thread looks, what was found before is good enough.
        if began_s < self._next_look_s or not self._lock.acquire(blocking=first):
            return self._seen
        try:
            seen = Seen()
            for namespace, fd in walk.namespaces(self._root):
                if namespace != self._namespace or self._tenants:
                    with suppress(OSError):  # it may be deleted meanwhile
                        self._look_at(seen, namespace, fd)
            seen.unused.sort(
                key=lambda one: (
                    seen.since_ns[one.namespace],
                    one.listed.changed_ns,
                    one.namespace,
                    one.folder,
                    str(one.name),
                )
            )
            self._seen, ended_s = seen, time.monotonic()
            pause_s = max(_LOOK_S, _PATIENCE * (ended_s - began_s))
            self._next_look_s = ended_s + pause_s
        finally:
            self._lock.release()
        return self._seen

    def _look_at(self, seen: Seen, namespace: str, fd: int) -> None:
        """Add what a namespace holds to what was found."""
        own: set[str] = set()
        if namespace == self._namespace:
            own = {folder.name for folder in list(self._own.values())}
        elif self._tenants:
            promised = Ledger(fd, WriterLiveness.LOCKS).by_tenant()
            nbytes = np.array([*promised.values()])
            numbers = np.array([*promised])
            seen.promised += self._owned(namespace, fd, numbers, nbytes)
        listed: list[OtherSegment] = []
        for folder, folder_fd in walk.pools(fd, OSError):
            if folder in own:
                continue
            now_ns = time.time_ns()
            for files in walk.list_segments(folder_fd):
                if namespace != self._namespace:
                    seen.nbytes[namespace] += files.nbytes
                if files.name is None:
                    continue
                key = namespace, folder, str(files.name)
                segment = self._seen.segments.get(key)
                if not (segment and segment.settled and segment.listed == files):
                    tenants = self._tenants_in(namespace, fd, folder_fd, files)
                    settled = now_ns - files.changed_ns > SETTLED_NS
                    segment = OtherSegment(
                        namespace, folder, files.name, files, settled, tenants
                    )
                seen.segments[key] = segment
                listed.append(segment)
        used_ns = max((one.listed.changed_ns for one in listed), default=0)
        if listed and namespace != self._namespace and is_unused(fd, used_ns):
            seen.since_ns[namespace] = used_ns
            seen.unused += listed

    def _tenants_in(
        self, namespace: str, namespace_fd: int, folder: int, files: ListedSegment
    ) -> Counter[int]:
        """Count bytes of pages in one segment, if tenants are to be counted."""
        if self._tenants and files.name:
            with (
                suppress(OSError),
                closing_fd(open_index(folder, str(files.name))) as fd,
            ):
                contents = read_contents(fd, files.name, files.data_bytes)
                if contents is not None:
                    live = contents.records[contents.records["check"] != 0]
                    nbytes = np.full(len(live), contents.object_bytes)
                    return self._owned(namespace, namespace_fd, live["tenant"], nbytes)
        return Counter()

    def _owned(
        self,
        namespace: str,
        fd: int,
        numbers: npt.NDArray[np.integer[Any]],
        nbytes: Int64Array,
    ) -> Counter[int]:
        """Add up bytes by whose room they take."""
        if namespace not in self._salted:
            salt = parse_record(fd, namespace).get("salt_sha256")
            self._salted[namespace] = tenant_number(str(salt)) if salt else NO_TENANT
        count = TenantCount(self._tenants, self._salted[namespace])
        return Counter(dict(sums(count.owners(numbers), nbytes)))

    def evict_segment(
        self, may_go: Callable[[tuple[str, str, str]], bool] | None = None
    ) -> bool:
        """Delete the next segment that is not in use; return whether there was one.

        `may_go` says of its namespace, folder and name whether it may.
        """
        unused = self.look().unused
        while unused:
            segment = unused.pop(0)
            place = segment.namespace, segment.folder, str(segment.name)
            if (may_go is None or may_go(place)) and self.delete(segment):
                return True
        return False

    def delete(self, one: OtherSegment) -> bool:
        """Delete a segment, unless it has a writer or promised pages.

        One of a namespace that was not open stays as well where that is open by now.
        """
        namespace, last = one.namespace, False
        with self._lock, suppress(KvdockError):
            seen = self._seen
            since_ns = seen.since_ns.get(namespace)
            seen.segments.pop((namespace, one.folder, str(one.name)), None)
            # A process that opens it waits until its descriptor is closed.
            with walk.namespace_of(self._root, namespace) as fd:
                if since_ns is not None and not is_unused(fd, since_ns):
                    return False
                kept_by = ownership.read_liveness(fd)
                if not delete_if_unowned(fd, one.folder, str(one.name), kept_by):
                    return False
                if since_ns is not None:
                    last = namespace not in {left.namespace for left in seen.unused}
                for _, folder in walk.pools(fd) if last else ():
                    collect_garbage(folder, kept_by, lost=True)
            if last:
                del seen.since_ns[namespace]
                with closing_fd(open_root(self._root, shared=True, create=False)) as fd:
                    remove_empty(fd, namespace)
            if namespace != self._namespace:
                seen.nbytes[namespace] -= one.listed.nbytes
            self._counts["segments_deleted"] += 1
            return True
        return False


def is_unused(namespace_fd: int, used_ns: int) -> bool:
    """Return whether no process has a namespace open; others wait until it is closed.

    `used_ns` is when it was last used, by its file system's clock.
    """
    locked = True
    try:
        fcntl.flock(namespace_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        locked = False
    if locked and ownership.read_liveness(namespace_fd) is WriterLiveness.LOCKS:
        return True
    return used_ns < earlier_now_ns(namespace_fd) - UNUSED_S * 1e9
