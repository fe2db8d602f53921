"""Room of tenants: what each takes in a store, and who is above its quota.

Counted from records alone: those of this pool as the index has them, those of all
other pools and namespaces of the root as their index files have them. Nothing is
written for it, so a process that is killed leaves no wrong count, and a restart or a
changed limit begins with the right one.

A record without a tenant counts for that of its namespace's salt; one of a tenant
that is not listed (any more) counts for `default`. Room is bytes of pages.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.capacity import TenantUse
from kvdock.config.tenants import NO_TENANT, tenant_number
from kvdock_segments import ownership, paths
from kvdock_segments.cleanup import delete_if_unowned
from kvdock_segments.index_file import open_index, read_contents
from kvdock_segments.ledger import Ledger
from kvdock_segments.namespace_files import read_record
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import (
    SETTLED_NS,
    IndexName,
    listing,
    open_folder,
    pool_folders,
)
from kvdock_segments.tenant_count import TenantCount, owners, sums

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock.arrays import BoolArray
    from kvdock.config.tenants import Tenants
    from kvdock_segments.index import Index
    from kvdock_segments.limits import StoreLocation

_LOOK_S = 0.5
"""Least seconds between two looks at the index files of other pools."""
_PATIENCE = 20
"""How many times as long as a look takes is waited before the next one."""


@attrs.frozen(eq=False)
class _Elsewhere:
    """What the tenants have in one segment that is in no index of this process.

    Args:
        stamp_ns: When that was changed, as it was read.
        settled: Whether no later change can have the same time.
        nbytes: Bytes of pages by tenant.
    """

    namespace: str
    folder: str
    name: IndexName
    stamp_ns: int
    settled: bool
    nbytes: Counter[int]


class RootRoom:
    """What tenants have in the index files of a store; each is read when it changes."""

    def __init__(self, root: Path, listed: Collection[int]) -> None:
        self._root = root
        self._listed = listed
        self._salted: dict[str, int] = {}
        self.segments: dict[tuple[str, str, str], _Elsewhere] = {}
        self.promised: Counter[int] = Counter()

    def look(self, namespace: str = "", skipped: Collection[str] = ()) -> None:
        """Bring `segments` and `promised` in line with the files.

        Folders of `namespace` in `skipped` are left out, and its promises.
        """
        found, promised = {}, Counter[int]()
        with suppress(OSError):
            root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for one in paths.namespaces_in(root):
                    left_out = skipped if one == namespace else ()
                    with suppress(OSError):  # it may be deleted meanwhile
                        found.update(self._look_at(root, one, left_out))
                        if one != namespace:
                            promised += self._promised_in(root, one)
            finally:
                os.close(root)
        self.segments, self.promised = found, promised

    def _promised_in(self, root: int, namespace: str) -> Counter[int]:
        fd = open_folder(root, namespace)
        try:
            found = Ledger(fd, WriterLiveness.LOCKS).by_tenant()
        finally:
            os.close(fd)
        return self._owned(found, namespace)

    def _owned(self, found: Counter[int], namespace: str) -> Counter[int]:
        numbers, nbytes = np.array([*found]), np.array([*found.values()])
        whose = owners(numbers.astype(np.int64), self._listed, self._salted[namespace])
        return Counter(dict(sums(whose, nbytes)))

    def _look_at(
        self, root: int, namespace: str, skipped: Collection[str]
    ) -> dict[tuple[str, str, str], _Elsewhere]:
        found = {}
        fd = open_folder(root, namespace)
        try:
            if namespace not in self._salted:
                self._salted[namespace] = _salted(fd)
            for pool in pool_folders(fd):
                if pool not in skipped:
                    folder = open_folder(fd, pool)
                    try:
                        for one in self._list(folder, namespace, pool):
                            found[namespace, pool, str(one.name)] = one
                    finally:
                        os.close(folder)
        finally:
            os.close(fd)
        return found

    def _list(self, folder: int, namespace: str, pool: str) -> Iterator[_Elsewhere]:
        now_ns = time.time_ns()
        with listing(folder) as entries:
            names = [one for entry in entries if (one := IndexName.parse(entry.name))]
        for name in names:
            with suppress(OSError):
                known = self.segments.get((namespace, pool, str(name)))
                stamp_ns = os.stat(str(name), dir_fd=folder).st_mtime_ns
                if known and known.settled and known.stamp_ns == stamp_ns:
                    yield known
                elif name.state != "new":
                    settled = now_ns - stamp_ns > SETTLED_NS
                    nbytes = self._read(folder, namespace, name)
                    yield _Elsewhere(namespace, pool, name, stamp_ns, settled, nbytes)

    def _read(self, folder: int, namespace: str, name: IndexName) -> Counter[int]:
        """Count bytes of pages in one segment."""
        fd = open_index(folder, str(name))
        try:
            data = os.stat(name.data, dir_fd=folder, follow_symlinks=False)
            contents = read_contents(fd, name, data.st_size)
        finally:
            os.close(fd)
        if contents is None:
            return Counter()
        live = contents.records[contents.records["check"] != 0]
        numbers = live["tenant"].astype(np.int64)
        whose = owners(numbers, self._listed, self._salted[namespace])
        each = np.full(len(live), contents.object_bytes)
        return Counter(dict(sums(whose, each)))

    def used(self) -> Counter[int]:
        """Return the bytes of each tenant as they were found."""
        return sum((one.nbytes for one in self.segments.values()), Counter[int]())

    def delete(self, one: _Elsewhere) -> bool:
        """Delete a segment, unless it has a writer or promised pages."""
        self.segments.pop((one.namespace, one.folder, str(one.name)), None)
        with suppress(OSError):
            root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fd = open_folder(root, one.namespace)
            finally:
                os.close(root)
            try:
                kept_by = ownership.read_liveness(fd)
                return delete_if_unowned(fd, one.folder, str(one.name), kept_by)
            finally:
                os.close(fd)
        return False


def _all_above(
    one: _Elsewhere, over: Mapping[int, int], *, but: int | None = None
) -> bool:
    """Return whether tenants have a segment's pages above their quotas, but for one."""
    return all(
        nbytes <= over.get(number, 0)
        for number, nbytes in one.nbytes.items()
        if number != but
    )


def _salted(namespace_fd: int) -> int:
    """Return the number of the tenant that a namespace's salt would belong to."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        salt = json.loads(read_record(namespace_fd)).get("salt_sha256")
        if salt:
            return tenant_number(str(salt))
    return NO_TENANT


class Room:
    """The room of all tenants, as one pool of one namespace sees it.

    Args:
        tenants: The listed tenants; one of them has a quota.
        count: What its pages take.
        sizes: Sizes of the objects that the index holds.
    """

    def __init__(
        self,
        place: StoreLocation,
        tenants: Tenants,
        index: Index,
        count: TenantCount,
        lock: threading.RLock,
        sizes: Collection[int],
    ) -> None:
        self._place = place
        self._names = tenants.names
        self._rooms = {tenants.number(name): one for name, one in tenants.rooms.items()}
        self._index = index
        self._lock = lock
        self._sizes = sizes
        self._count = count
        self._elsewhere = RootRoom(place.root, self._count.listed)
        self._looking = threading.Lock()
        self._next_look_s = -math.inf
        self._asks = (NO_TENANT, 0)

    def ask(self, tenant: int, nbytes: int) -> None:
        """Note who is about to store how much: it pays before others for that."""
        whose = self._count.owners(np.array([tenant]))
        self._asks = (int(whose[0]), nbytes)

    def used(self) -> Counter[int]:
        """Return the bytes that each tenant takes, by number."""
        self._look()
        with self._lock:
            return self._count.nbytes + self._elsewhere.used()

    @property
    def writer(self) -> int:
        """Return the number of the tenant that is about to store, or was the last."""
        return self._asks[0]

    def over(self) -> dict[int, int]:
        """Return the bytes by which tenants are above their quotas, by number.

        What a tenant without a quota has is all above it: it is lent.
        """
        used = self.used()
        used.update(dict([self._asks]))
        rooms = self._rooms
        quotas = {one: rooms[one].quota if one in rooms else 0 for one in used}
        return {one: nbytes for one in used if (nbytes := used[one] - quotas[one]) > 0}

    def report(self, promised: Counter[int]) -> dict[str, TenantUse]:
        """Return what each tenant takes and may take, by name.

        `promised` is what is promised in this namespace, by numbers of its records.
        """
        return report(self.used(), self._promised(promised), self._names, self._rooms)

    def promisable(
        self, tenants: npt.NDArray[np.integer[Any]], each_bytes: int, here: Counter[int]
    ) -> BoolArray:
        """Return which pages may be promised by their tenants' shares, bool (n,).

        Args:
            tenants: (n,), numbers as the pages' records have them.
            each_bytes: Bytes of a page.
            here: What is promised in this namespace, by such numbers.
        """
        may = np.ones(len(tenants), np.bool_)
        whose, promised = self._count.owners(tenants), self._promised(here)
        for number, room in self._rooms.items():
            pages = np.flatnonzero(whose == number)
            if len(pages) and each_bytes:
                left = room.promise_bytes - promised[number]
                may[pages[max(0, left // each_bytes) :]] = False
        return may

    def _promised(self, here: Counter[int]) -> Counter[int]:
        """Return what is promised to each tenant, in all namespaces."""
        self._look()
        found = self._elsewhere.promised.copy()
        for number, nbytes in here.items():
            found[int(self._count.owners(np.array([number]))[0])] += nbytes
        return found

    def may_lose(
        self, segments: Iterable[tuple[str, str]], namespace: str = ""
    ) -> Iterator[tuple[str, str]]:
        """Yield which segments of other pools of a namespace, or this, may go whole.

        By folder and name. Not those that hold room of another tenant, nor those that
        were not looked at yet.
        """
        over, writer = self.over(), self.writer
        here = namespace or self._place.namespace
        for segment in segments:
            one = self._elsewhere.segments.get((here, *segment))
            if not over or (one and _all_above(one, over, but=writer)):
                yield segment

    def evict_segment(self, *, everywhere: bool) -> bool:
        """Delete a segment elsewhere that holds nothing but pages above a quota.

        If `everywhere`, in other namespaces as well, not in other pools alone: and
        there pages of the tenant that stores, which may be of one prefix here.
        """
        over, here = self.over(), self._place.namespace
        choice = [
            one
            for one in self._elsewhere.segments.values()
            if one.name.state == "idx" and one.nbytes
            if everywhere or one.namespace == here
            if one.namespace != here or self.writer not in one.nbytes
            if _all_above(one, over)
        ]
        choice.sort(key=lambda one: one.stamp_ns)
        return any(map(self._elsewhere.delete, choice))

    def _look(self) -> None:
        """Look at the files of other pools, if it is time and no one else does."""
        began_s = time.monotonic()
        if began_s < self._next_look_s or not self._looking.acquire(blocking=False):
            return
        try:
            place = self._place
            own = [paths.pool_folder(place.pool, size) for size in list(self._sizes)]
            self._elsewhere.look(place.namespace, own)
            ended_s = time.monotonic()
            pause_s = max(_LOOK_S, _PATIENCE * (ended_s - began_s))
            self._next_look_s = ended_s + pause_s
        finally:
            self._looking.release()


def report(
    used: Mapping[int, int],
    promised: Mapping[int, int],
    names: Mapping[int, str],
    rooms: Mapping[int, object],
) -> dict[str, TenantUse]:
    """Return what each tenant takes and may take, by name."""
    return {
        name: TenantUse(
            used.get(number, 0),
            getattr(rooms.get(number), "quota", 0),
            promised.get(number, 0),
        )
        for number, name in names.items()
    }


def tenants_in(root: Path, tenants: Tenants) -> dict[str, TenantUse]:
    """Count what tenants take in a store that no process has to have open."""
    found = RootRoom(root, set(tenants.names))
    found.look()
    rooms = {tenants.number(name): room for name, room in tenants.rooms.items()}
    return report(found.used(), found.promised, tenants.names, rooms)
