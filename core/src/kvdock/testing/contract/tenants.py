"""The quotas of tenants in a store that is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock.config.tenants import read_tenants
from kvdock.testing.cases import claimed, contract_test
from kvdock.testing.contract.reports import PAGE_BYTES, ROUND, flood
from kvdock.testing.samples import page_hashes

if TYPE_CHECKING:
    from kvdock.testing.harness import Harness

QUOTA = 4 * ROUND * PAGE_BYTES
"""Of a tenant that stores a quarter of that."""


class TenantTests:
    """Two tenants that share a store."""

    @contract_test(claimed("tenant_quotas"), proves="tenant_quotas")
    def test_a_tenant_within_its_quota_loses_nothing_to_others(
        self, tight: Harness
    ) -> None:
        tenants = read_tenants(
            {"quiet": {"salt": "quiet", "quota": QUOTA}, "busy": {"salt": "busy"}}
        )
        pool = tight.any_pool(page_bytes=PAGE_BYTES, name="tenants")
        rigs = tight.rig(pool, pages=2 * ROUND, tenants=tenants).divided(2)
        quiet, busy = (
            attrs.evolve(setup, tenant=tenants.number(name))
            for setup, name in zip(rigs, tenants, strict=True)
        )
        pages, others = page_hashes(ROUND, "quiet"), page_hashes(ROUND, "busy")
        quiet.stored(pages)
        busy.stored(others)
        flood(busy, others)
        assert quiet.exists(pages).all(), (
            f"a tenant with {ROUND * PAGE_BYTES} bytes of pages and a quota of {QUOTA} "
            "lost some of them to a tenant without one"
        )
        quiet.loaded(pages)
