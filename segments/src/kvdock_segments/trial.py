"""A store for test pages, in a temporary root that is removed with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvdock_segments.store import SegmentStore

if TYPE_CHECKING:
    from typing import Self

    from kvdock_segments.io import IOEngine
    from kvdock_segments.limits import StoreLocation
    from kvdock_segments.settings import SegmentSettings

PREFIX = ".kvdock-trial-"
_SCRATCH = "scratch"


@attrs.define(eq=False)
class _Scratch:
    """A temporary root for test pages, on the file system of the real one."""

    path: Path
    users: int = 0

    @classmethod
    def beside(cls, root: Path) -> Self:
        """Make one in a root, or where that root would be created."""
        whole = root.absolute()
        place = next(one for one in (whole, *whole.parents) if os.access(one, os.F_OK))
        return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)))

    def leave(self) -> None:
        """Remove it with its last user."""
        self.users -= 1
        if self.users <= 0:
            shutil.rmtree(self.path, ignore_errors=True)


class TrialStore(SegmentStore):
    """A store for test pages: an engine never finds any of them.

    For attachments whose configuration says `trial`.
    """

    _scratch: _Scratch | None = None

    @classmethod
    def open(
        cls,
        place: StoreLocation,
        engine: IOEngine,
        settings: SegmentSettings,
        shared: MutableMapping[str, Any],
    ) -> Self:
        """Open a store beside the place where an engine's store would be.

        All pools of the attachment share the mapping, and are in one temporary root.

        Raises:
            KvdockError: If the root cannot be used.
            OSError: If no directory can be made there.
        """
        scratch: _Scratch | None = shared.get(_SCRATCH)
        if scratch is None or scratch.users <= 0:
            scratch = shared[_SCRATCH] = _Scratch.beside(place.root)
        scratch.users += 1
        try:
            store = cls(attrs.evolve(place, root=scratch.path), engine, settings)
        except BaseException:
            scratch.leave()
            raise
        store._scratch = scratch
        return store

    def close(self) -> None:
        """Close the store; the last one removes the directory."""
        super().close()
        scratch, self._scratch = self._scratch, None
        if scratch:
            scratch.leave()
