"""An engine whose pools are kept in shelves, near first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from shelf import Engine, Heard, hashes, patient

from kvdock.batch import Outcome
from kvdock.events import PagesCopied

if TYPE_CHECKING:
    from kvdock.config.core import CoreSettings
    from kvdock.transfer.attachment import Attachment

NAMES = hashes(6)
WHERE = list(range(6))


class Listener(Heard[PagesCopied]):
    """Keeps what became of copies."""

    def __init__(self) -> None:
        super().__init__(PagesCopied)

    @property
    def copies(self) -> list[PagesCopied]:
        return self.events

    def count(self, outcome: str) -> int:
        return sum(one.outcomes.get(outcome, 0) for one in self.copies)


@attrs.define(eq=False)
class Tiers(Engine):
    """An engine whose pages are overwritten as soon as they are stored."""

    core: CoreSettings = attrs.field(factory=patient, kw_only=True)
    listener: Listener = attrs.field(factory=Listener, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.observers = (self.listener, *self.observers)
        self.tiers = self.tiers or [shelf.name for shelf in self.shelves]
        super().__attrs_post_init__()

    @property
    def cache(self) -> Attachment:
        return self.attachment

    def put(self, names: Sequence[str] = NAMES, pages: Sequence[int] = WHERE) -> int:
        self.fill(names, pages)
        stored = self.cache.put(names, self.where(pages))
        self.blank()
        return stored.pages

    def stored(
        self, names: Sequence[str] = NAMES, pages: Sequence[int] = WHERE
    ) -> None:
        """Store pages in all tiers."""
        assert self.put(names, pages) == len(names)
        self.settle()

    def get(self, names: Sequence[str] = NAMES, pages: Sequence[int] = WHERE) -> int:
        found = self.cache.get(names, self.where(pages))
        for pool in self.pools:
            ok = found.outcomes[pool.name] == Outcome.OK
            for at in np.flatnonzero(ok).tolist():
                self.check(pool.name, names[at], pages[at])
        return found.pages

    def check(self, pool: str, name: str, page: int) -> None:
        assert self.holds(pool, name, page), "wrong bytes"

    def settle(self) -> None:
        assert self.cache.wait_idle(60)
