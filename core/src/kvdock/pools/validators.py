"""Validators of pools, parts, shards and deployments: they raise `PoolError`."""

from __future__ import annotations

from kvdock.errors import PoolError
from kvdock.validators import Validators

_POOLS = Validators(PoolError)
boolean = _POOLS.boolean
identifier = _POOLS.identifier
int_tuple = _POOLS.int_tuple
integer = _POOLS.integer
non_negative = _POOLS.non_negative
positive = _POOLS.positive
