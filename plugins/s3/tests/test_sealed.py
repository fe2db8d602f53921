"""Sealed pages lie in a bucket as any others do."""

from __future__ import annotations

from sealed import check_round_trip

from kvdock_s3.server import local_server


def test_sealed_pages_come_back() -> None:
    with local_server({}) as (settings, _):
        check_round_trip("s3", settings)
