"""A backend that declares pools of sliding windows and no others, for tests."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs

from kvdock import KindSupport, Manifest, PoolKind

# vLLM's processes load this by its entry point, without pytest's own paths.
sys.path.append(str(Path(__file__).resolve().parents[4] / "core/tests/harness"))

from reference import FolderReference


class WindowsOnly(FolderReference):
    """Keeps the pages of sliding windows in a folder."""

    name = "windows_only"

    def manifest(self) -> Manifest:
        """Declare one kind of pool."""
        whole = super().manifest()
        kinds: dict[PoolKind, KindSupport] = {PoolKind.SWA: whole.kinds[PoolKind.SWA]}
        return attrs.evolve(whole, kinds=kinds)


plugin = WindowsOnly()
