"""The fill level of the place where a backend keeps pages."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class TenantUse:
    """What one tenant takes of a store.

    Args:
        used_bytes: Bytes of its pages, in all namespaces.
        quota_bytes: What it may take before it pays for others; 0 for no quota.
        promised_bytes: Bytes of its pages that are promised to be kept.
    """

    used_bytes: int
    quota_bytes: int = 0
    promised_bytes: int = 0


@attrs.frozen
class Capacity:
    """The fill level of the place where a backend keeps pages.

    Args:
        used_bytes: What its pages take, or what is set aside for them.
        limit_bytes: What they may take, by quota or by free space; 0 where
            that is not known.
        failed_bytes: What could not be written and is set aside: a disk may be
            failing.
        promised_bytes: What is promised to be kept.
        promise_limit_bytes: What may be promised; 0 where nothing may.
        other_bytes: What other namespaces of the same place take.
        tenants: What listed tenants take of the whole store, and `default`, all
            others together, by name; empty where no quota is set.
    """

    used_bytes: int
    limit_bytes: int = 0
    failed_bytes: int = 0
    promised_bytes: int = 0
    promise_limit_bytes: int = 0
    other_bytes: int = 0
    tenants: Mapping[str, TenantUse] = attrs.field(factory=dict)
