"""Which deployments find none of a pool's objects."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvdock.pools.enums import ObjectUnit
from kvdock.pools.factories import mamba, mha, mla
from kvdock.pools.sharing import sharing_limits

KV = mha("kv", layers=range(4), page_tokens=64, heads=8, head_dim=16, anchor=True)
LATENT = mla("kv", layers=range(4), page_tokens=64, latent=32, rope=8, anchor=True)
STATES = mamba("mamba", layers=range(4), page_tokens=64, conv=[[64, 3]])


@pytest.mark.parametrize(
    ("pool", "deployment", "axes"),
    [
        (KV, {}, []),
        (KV, {"tp_size": 2, "share_tp": (4,)}, ["tp"]),
        (attrs.evolve(KV, head_group=2), {"tp_size": 2, "share_tp": (4,)}, []),
        # The larger size has objects as small as they get.
        (KV, {"tp_size": 4, "share_tp": (2,)}, []),
        (KV, {"tp_size": 8, "share_tp": (16,)}, []),
        (LATENT, {"tp_size": 2, "share_tp": (4,)}, []),
        (STATES, {"tp_size": 2}, []),
        (STATES, {"tp_size": 2, "share_tp": (4,)}, ["tp"]),
        (KV, {"stages": 2}, ["pp"]),
        (attrs.evolve(KV, object_unit=ObjectUnit.LAYER), {"stages": 2}, []),
        (KV, {"packed_layers": 1}, ["draft"]),
    ],
)
def test_an_axis_that_is_not_shared_is_named_with_its_reason(
    pool: Any, deployment: dict[str, Any], axes: list[str]
) -> None:
    found = sharing_limits(pool, **deployment)
    assert [limit.axis for limit in found] == axes
    for limit in found:
        assert str(limit).startswith(
            f"pool {pool.name} is not shared along {limit.axis}: "
        )
