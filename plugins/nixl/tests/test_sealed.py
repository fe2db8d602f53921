"""Sealed pages pass through memory that is registered."""

from __future__ import annotations

from pathlib import Path

from sealed import check_round_trip


def test_sealed_pages_come_back(tmp_path: Path) -> None:
    check_round_trip("nixl", {"root": str(tmp_path / "store"), "free_space": 0})
