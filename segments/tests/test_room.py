"""Room for each tenant: who stored a page, how much it takes, and who loses first."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvdock.config.tenants import TenantRoom, Tenants
from kvdock_segments.inspect import segments_of

OpenDepot = Callable[..., Any]
ACME, BELL = 7, 2**32 - 1
QUOTA = 2 << 20


def tenants_on_disk(depot: Any) -> dict[int, int]:
    """Count the pages of each tenant as the records of all namespaces say."""
    found: dict[int, int] = {}
    for namespace in {depot.store.place.namespace}:
        for _, _, contents in segments_of(depot.root, namespace):
            live = contents.records[contents.records["check"] != 0]
            for number in live["tenant"].tolist():
                found[number] = found.get(number, 0) + 1
    return found


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_page_is_recorded_with_the_tenant_of_its_batch(
    open_depot: OpenDepot, count: int
) -> None:
    depot = open_depot()
    depot.put(range(count), tenant=ACME)
    depot.put(range(100, 100 + count), tenant=BELL)
    depot.put(range(200, 200 + count))
    # What is there already keeps its tenant.
    depot.put(range(count), tenant=BELL)
    assert tenants_on_disk(depot) == {ACME: count, BELL: count, 0: count}
    again = open_depot()
    assert again.get(range(count)) == [0] * count
    assert again.get(range(200, 200 + count)) == [0] * count


def test_a_page_without_a_tenant_has_that_of_its_namespace(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(tenant=BELL)
    depot.put(range(3))
    depot.put(range(10, 14), tenant=ACME)
    assert tenants_on_disk(depot) == {BELL: 3, ACME: 4}


def test_a_retained_page_keeps_its_tenant(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(5), tenant=ACME, expire_at=np.full(5, 2**32 - 2))
    assert tenants_on_disk(depot) == {ACME: 5}


def rooms(**quotas: int) -> Tenants:
    """Return tenants of which some have quotas, and the numbers ACME and BELL."""
    digests = {"acme": f"{ACME:08x}" + "0" * 56, "bell": f"{BELL:08x}" + "0" * 56}
    return Tenants(
        digests, {name: TenantRoom(quota=quota) for name, quota in quotas.items()}
    )


def fresh(start: int, count: int, calls: int) -> Iterator[range]:
    for call in range(calls):
        yield range(start + call * count, start + (call + 1) * count)


def used(depot: Any) -> dict[str, int]:
    found = depot.store.capacity().tenants
    return {name: one.used_bytes for name, one in found.items() if one.used_bytes}


def test_a_tenant_above_its_quota_pays_for_everyone(open_depot: OpenDepot) -> None:
    half = QUOTA // 2
    depot = open_depot(quota_bytes=QUOTA, tenants=rooms(acme=half, bell=half // 2))
    depot.put(range(60), tenant=ACME)
    for numbers in fresh(10_000, 20, 40):
        depot.put(numbers, tenant=BELL)
    assert depot.there(range(60)) == [True] * 60
    assert used(depot)["bell"] > half // 2  # room that no one uses is lent
    # Who lent it gets it back, from the one that is above its quota.
    stored = depot.put(range(60, 110), tenant=ACME)
    assert stored.ok.all()
    assert depot.there(range(110)) == [True] * 110
    assert depot.get(range(110)) == [0] * 110
