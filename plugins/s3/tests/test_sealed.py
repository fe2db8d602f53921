"""Sealed pages lie in a bucket as any others do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sealed import check_pages_of_a_lost_key_are_replaced, check_round_trip

from kvdock.wrappers import key_ring
from kvdock_s3.server import local_server

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_sealed_pages_come_back() -> None:
    with local_server({}) as (settings, _):
        check_round_trip("s3", settings)


def test_pages_of_a_destroyed_key_are_misses_that_a_put_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_ring, "_CHECK_S", 0.0)
    with local_server({}) as (settings, _):
        check_pages_of_a_lost_key_are_replaced("s3", settings, tmp_path)
