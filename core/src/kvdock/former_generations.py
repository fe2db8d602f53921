"""Pages of generations that no engine has any more are deleted, in the background."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.daemon_threads import DaemonThreads
from kvdock.errors import KvdockError
from kvdock.plugin import import_entry_point, usable_entry_points
from kvdock.stores import GROUP, delete_former

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock import Dock
    from kvdock.config import EngineConfiguration
    from kvdock.stores import Store

log = logging.getLogger("kvdock.generations")


@attrs.define(eq=False)
class FormerGenerations:
    """Deletes from the stores of an engine what only earlier weights could use.

    Args:
        run: The run of the engine, or "".
        kept: Earlier versions of it that stay.
    """

    run: str
    kept: int
    dock: Dock
    given: EngineConfiguration[Any]
    _thread: DaemonThreads = attrs.field(
        init=False, factory=lambda: DaemonThreads(1, "kvdock-generations")
    )

    def delete(self) -> None:
        """Delete in the background; what fails is logged."""
        self._thread.submit(self._delete)

    def _delete(self) -> None:
        for store in self._stores():
            try:
                freed = delete_former(store, self.run, self.kept)
            except KvdockError as error:
                log.warning("former generations stay: %s", error)
            else:
                log.info("%d bytes of former generations are deleted", freed)

    def _stores(self) -> Iterator[Store]:
        """Yield the directories of this engine's backends.

        A bucket does not show which process has a namespace open, so all of it stays.
        """
        openers = {one.name: one for one in usable_entry_points(GROUP)}
        for name in self.given.used:
            settings = dict(self.given.backends.get(name, {}))
            root, found = settings.pop("root", None), self.dock.backends.get(name)
            kind = found.manifest.name if found is not None else name
            if root and kind in openers:
                opener: Any = import_entry_point(openers[kind])
                if (store := opener(str(root), settings)) is not None:
                    yield store
