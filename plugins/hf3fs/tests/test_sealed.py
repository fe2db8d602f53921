"""Sealed pages pass through memory of the library's."""

from __future__ import annotations

from pathlib import Path

from sealed import check_round_trip


def test_sealed_pages_come_back(root: Path) -> None:
    check_round_trip("hf3fs", {"root": str(root), "free_space": 0})
