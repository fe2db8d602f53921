"""A backend that declares pools of sliding windows and no others, for tests."""

from __future__ import annotations

import attrs

from kvdock import KindSupport, Manifest, PoolKind
from kvdock.testing.reference import FolderReference


class WindowsOnly(FolderReference):
    """Keeps the pages of sliding windows in a folder."""

    name = "windows_only"

    def manifest(self) -> Manifest:
        """Declare one kind of pool."""
        whole = super().manifest()
        kinds: dict[PoolKind, KindSupport] = {PoolKind.SWA: whole.kinds[PoolKind.SWA]}
        return attrs.evolve(whole, kinds=kinds)


plugin = WindowsOnly()
