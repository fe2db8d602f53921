"""Room for each tenant: who stored a page, how much it takes, and who loses first."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdock_segments.inspect import segments_of

OpenDepot = Callable[..., Any]
ACME, BELL = 7, 2**32 - 1


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
