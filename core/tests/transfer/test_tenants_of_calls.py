"""Pages of several tenants in one attachment, and who each batch is stored for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from shelf import Shelf, attention, patient
from tiered import NAMES, WHERE, Tiers
from timed import TimedShelf

from kvdock.batch import Operation
from kvdock.config.tenants import read_tenants
from kvdock.errors import KvdockError
from kvdock.events import TENANT, stored_for
from kvdock.retention import RetentionAnswer
from kvdock.transfer.manager import TransferManager

TENANTS = read_tenants({"acme": {"salt": "salt-of-acme"}, "bell": {"salt": "b"}})
ACME = TENANTS.number("acme")
POOL = attention().name
PAGES = {POOL: WHERE}
UNKNOWN = {RetentionAnswer.ABSENT, RetentionAnswer.UNSUPPORTED}


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    near, far = Shelf("near"), Shelf("far")
    core = attrs.evolve(patient(), tenants=TENANTS)
    rules: list[Any] = [
        {"backend": "near", "promote": "always"},
        {"backend": "far", "write": "behind"},
    ]
    made = Tiers((near, far), tiers=rules, core=core)
    yield made
    made.cache.close()


def stored(shelf: Shelf) -> list[int]:
    return [one.tenant for one in shelf.calls if one.operation is Operation.PUT]


def test_every_tier_hears_whose_pages_it_stores(tiers: Tiers) -> None:
    near, far = tiers.shelves
    with stored_for(ACME):
        tiers.put()
    assert tiers.cache.wait_idle(30)
    assert stored(near) == stored(far) == [ACME]
    assert TENANT.get() == 0
    # A copy that is made nearer, for the tenant that loads.
    near.objects.clear()
    near.calls.clear()
    with stored_for(ACME):
        assert tiers.get() == len(NAMES)
    assert tiers.cache.wait_idle(30)
    assert stored(near) == [ACME]


def test_a_transfer_that_waits_in_a_queue_keeps_its_tenant(tiers: Tiers) -> None:
    with TransferManager(tiers.cache) as manager:
        with stored_for(ACME):
            manager.write(POOL, NAMES, WHERE)
        assert manager.drain(30)
        manager.write(POOL, [f"{name}0" for name in NAMES], WHERE)
        assert manager.drain(30)
    assert stored(tiers.shelves[0]) == [ACME, 0]


def test_pages_of_one_tenant_are_found_for_no_other(tiers: Tiers) -> None:
    cache = tiers.cache
    acme = cache.for_tenant("acme")
    assert acme.put(NAMES, PAGES).pages == len(NAMES)
    assert stored(tiers.shelves[0]) == [ACME]
    assert acme.exists(NAMES).best == len(NAMES)
    assert acme.get(NAMES, PAGES).pages == len(NAMES)
    for other in (cache, cache.for_tenant("default"), cache.for_tenant("bell")):
        assert other.exists(NAMES).best == 0
        assert other.get(NAMES, PAGES).pages == 0
        assert set(other.expire(NAMES, 60).tolist()) <= UNKNOWN
        assert set(other.retain(NAMES, 60).tolist()) <= UNKNOWN
    every = "".join(tiers.shelves[0].objects)
    assert not any(secret in every for secret in (*NAMES, "acme", *TENANTS.values()))


def test_times_of_a_tenant_are_those_of_its_pages() -> None:
    tiers = Tiers([TimedShelf("near")], core=attrs.evolve(patient(), tenants=TENANTS))
    try:
        acme = tiers.cache.for_tenant("acme")
        assert acme.put(NAMES, PAGES).pages == len(NAMES)
        accepted = [RetentionAnswer.ACCEPTED] * len(NAMES)
        assert acme.retain(NAMES, 60).tolist() == accepted
        assert acme.expire(NAMES, 0).tolist() == accepted
        assert acme.get(NAMES, PAGES).pages == 0
    finally:
        tiers.cache.close()


def test_a_tenant_that_is_not_listed_is_an_error(tiers: Tiers) -> None:
    with pytest.raises(KvdockError, match="tenant 'acm' is not listed") as caught:
        tiers.cache.for_tenant("acm")
    assert "acme" in str(caught.value)
