"""Pages of generations that no engine has any more are deleted, in the background.

Where a store shows its namespaces, all that no engine needs go. Others keep pages until
they evict them, but for those of a private generation: these are deleted while the
engine that leaves it still has it open.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.batch import Outcome
from kvdock.daemon_threads import DaemonThreads
from kvdock.errors import KvdockError
from kvdock.generations import Generation
from kvdock.plugin import import_entry_point, usable_entry_points
from kvdock.stores import GROUP, delete_former

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock import Attachment, Dock
    from kvdock.config import EngineConfiguration
    from kvdock.stores import Store

log = logging.getLogger("kvdock.generations")

CLEAR_S = 2.0
"""How long an engine that changes its generation waits for its pages to go."""


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
    _left: set[str] = attrs.field(init=False, factory=set)
    _thread: DaemonThreads = attrs.field(
        init=False, factory=lambda: DaemonThreads(1, "kvdock-generations")
    )

    def leave(self, attachments: Collection[Attachment]) -> None:
        """Delete private pages from stores that do not show them; never raises.

        Called before the attachments are closed, when nothing uses them.
        """
        for one in attachments:
            generation = Generation.of(one.namespace_record)
            if generation is None or generation.run:
                continue
            self._left.add(one.namespace)
            try:
                cleared = one.clear(CLEAR_S, self._unlisted)
            except KvdockError as error:
                log.warning("pages of generation %s stay: %s", generation, error)
                continue
            for backend, outcome in cleared.items():
                if outcome is not Outcome.OK:
                    log.warning(
                        "pages of generation %s stay until %s evicts them: its clear "
                        "answers %s",
                        generation,
                        backend,
                        outcome.name.lower(),
                    )

    def delete(self, attachments: Collection[Attachment]) -> None:
        """Delete in the background all but the present; what fails is logged."""
        present = {one.namespace for one in attachments}
        self._left -= present
        left = frozenset(self._left)
        self._thread.submit(lambda: self._delete(left, present))

    def _delete(self, left: Collection[str], present: Collection[str]) -> None:
        for store in self._stores():
            try:
                freed = delete_former(
                    store, self.run, self.kept, left=left, present=present
                )
            except KvdockError as error:
                log.warning("former generations stay: %s", error)
            else:
                log.info("%d bytes of former generations are deleted", freed)

    @property
    def _unlisted(self) -> set[str]:
        """The backends of this engine that do not show what they keep."""
        return {name for name in self.given.used if self._opener(name) is None}

    def _stores(self) -> Iterator[Store]:
        """Yield what this engine's backends keep, where they show it."""
        for name in self.given.used:
            opener, found = self._opener(name), self.dock.backends.get(name)
            if opener is None or found is None:
                continue
            settings = dict(self.given.backends.get(name, {}))
            where = found.manifest.path_setting or "url"
            target = str(settings.pop(where, ""))
            store: Store | None = opener(target, settings) if target else None
            if store is not None:
                yield store

    def _opener(self, name: str) -> Any:  # noqa: ANN401 - the entry point's function
        """Return what opens a backend's store, or None."""
        found = self.dock.backends.get(name)
        kind = found.manifest.name if found is not None else name
        candidates = [one for one in usable_entry_points(GROUP) if one.name == kind]
        return import_entry_point(candidates[0]) if candidates else None
