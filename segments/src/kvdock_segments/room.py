"""Room of tenants: what each takes in a store, and who is above its quota.

Counted from records alone: those of this pool as the index has them, those of all
other pools and namespaces of the root as their index files have them. Nothing is
written for it, so a process that is killed leaves no wrong count, and a restart or a
changed limit begins with the right one.

A record without a tenant counts for that of its namespace's salt; one of a tenant
that is not listed (any more) counts for `default`. Room is bytes of pages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvdock.capacity import TenantUse
from kvdock.config.tenants import NO_TENANT
from kvdock_segments.elsewhere import Elsewhere, OtherSegment

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock.arrays import BoolArray
    from kvdock.config.tenants import Tenants
    from kvdock_segments.tenant_count import TenantCount


def _all_above(
    one: OtherSegment, over: Mapping[int, int], *, but: int | None = None
) -> bool:
    """Return whether tenants have a segment's pages above their quotas, but for one."""
    return all(
        nbytes <= over.get(number, 0)
        for number, nbytes in one.tenants.items()
        if number != but
    )


class Room:
    """The room of all tenants, as one pool of one namespace sees it.

    Args:
        tenants: The listed tenants; one of them has a quota.
        count: What its pages take.
        lock: Held around every use of the count.
        elsewhere: All other pools and namespaces.
    """

    def __init__(
        self,
        namespace: str,
        tenants: Tenants,
        count: TenantCount,
        lock: threading.RLock,
        elsewhere: Elsewhere,
    ) -> None:
        self.namespace = namespace
        self._tenants = tenants
        self._rooms = {tenants.number(name): one for name, one in tenants.rooms.items()}
        self._lock = lock
        self._count = count
        self._elsewhere = elsewhere
        self._asks = (NO_TENANT, 0)

    def ask(self, tenant: int, nbytes: int) -> None:
        """Note who is about to store how much: it pays before others for that."""
        whose = self._count.owners(np.array([tenant]))
        self._asks = (int(whose[0]), nbytes)

    def used(self) -> Counter[int]:
        """Return the bytes that each tenant takes, by number."""
        used = self._elsewhere.look().used()
        with self._lock:
            return self._count.nbytes + used

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
        return _report(self._tenants, self.used(), self._promised(promised))

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
        found = self._elsewhere.look().promised.copy()
        for number, nbytes in here.items():
            found[int(self._count.owners(np.array([number]))[0])] += nbytes
        return found

    def may_lose(self) -> Callable[[tuple[str, str, str]], bool]:
        """Return what says of a segment, by namespace and folder, whether it may go.

        Not if it holds room of a tenant other than the one that stores, nor if it was
        not looked at yet.
        """
        segments = self._elsewhere.look().segments
        over, writer = self.over(), self.writer

        def may_go(place: tuple[str, str, str]) -> bool:
            segment = segments.get(place)
            known = segment is not None and _all_above(segment, over, but=writer)
            return known or not over

        return may_go

    def evict_segment(self, *, everywhere: bool) -> bool:
        """Delete a segment elsewhere that holds nothing but pages above a quota.

        If `everywhere`, in other namespaces as well, not in other pools alone: and
        there pages of the tenant that stores, which may be of one prefix here.
        """
        over, here = self.over(), self.namespace
        choice = [
            one
            for one in list(self._elsewhere.look().segments.values())
            if one.name.state == "idx" and one.tenants
            if everywhere or one.namespace == here
            if one.namespace != here or self.writer not in one.tenants
            if _all_above(one, over)
        ]
        choice.sort(key=lambda one: one.listed.changed_ns)
        return any(map(self._elsewhere.delete, choice))


def _report(
    tenants: Tenants, used: Mapping[int, int], promised: Mapping[int, int]
) -> dict[str, TenantUse]:
    quotas = {tenants.number(name): room.quota for name, room in tenants.rooms.items()}
    return {
        name: TenantUse(
            used.get(number, 0), quotas.get(number, 0), promised.get(number, 0)
        )
        for number, name in tenants.names.items()
    }


def tenants_in(root: Path, tenants: Tenants) -> dict[str, TenantUse]:
    """Count what tenants take in a store that no process has to have open."""
    seen = Elsewhere(root, "", Counter(), set(tenants.names)).look()
    return _report(tenants, seen.used(), seen.promised)
