"""A prompt's pages in an attachment: what is there, loading, storing."""

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from kvdock import (
    NO_PAGE,
    Attachment,
    Dock,
    Namespace,
    Outcome,
    Plan,
    PoolSpec,
    RouteRequirements,
    Shard,
)
from kvdock.arrays import BoolArray, Int64Array
from kvdock.config import CoreSettings, Deadlines
from kvdock_transformers.paged import PagedModel
from model_demo.backends import Settings

Progress = Callable[[int, int], None]
"""Called with (pages moved, pages in all)."""

SEND_S = 120.0
"""How long a send may take; a machine may be busy."""

PATIENT = CoreSettings(
    deadlines=Deadlines(
        exists=20.0, get=60.0, put=60.0, delete=20.0, clear=20.0, send=SEND_S
    )
)
"""A server in Python on a busy machine is slow, and what counts here is the bytes."""

_PAGES_PER_CALL = 32
"""Pages stored per call, so that progress can be shown in between."""


def plan_for(
    dock: Dock,
    models: Sequence[PagedModel],
    backend: str,
    settings: Mapping[str, Settings] | None = None,
    needs: RouteRequirements | None = None,
) -> Plan:
    """Route all pools of the models.

    Args:
        dock: The loaded backends.
        models: Target and draft.
        backend: The backend to use; "" for any that can.
        settings: Backend to the settings that it will be attached with.
        needs: What a backend must be able to do; all pools need one then.

    Raises:
        NoRoute: If no backend takes a pool that is required.
    """
    pools = [pool for model in models for pool in model.pools.all]
    prefer = (backend,) if backend else ()
    return dock.plan(
        pools,
        Shard(),
        prefer,
        strict=needs is not None,
        needs=needs or RouteRequirements(),
        settings=settings,
    )


def attach(
    dock: Dock,
    plan: Plan,
    namespace: Namespace,
    settings: Mapping[str, Settings],
    models: Sequence[PagedModel],
) -> Attachment:
    """Attach the host memory of the models to a plan's backends."""
    regions = {
        name: host.region() for model in models for name, host in model.hosts.items()
    }
    return Attachment.open(dock, plan, namespace, regions, settings, core=PATIENT)


@attrs.frozen
class Loaded:
    """The result of a restore.

    Args:
        found: Longest restorable prefix at the first lookup, in pages.
        pages: Prefix whose pages are in the target's host memory.
        draft_pages: Prefix whose pages are in the draft's host memory.
        moved: Pool name to the number of pages loaded.
    """

    found: int = 0
    pages: int = 0
    draft_pages: int = 0
    moved: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class PromptPages:
    """The pages of one prompt, of a target and perhaps a draft.

    Args:
        attachment: Where they are kept.
        hashes: One per full page of the prompt.
        models: The target and, where there is one, the draft, each with its
            host memory.
    """

    attachment: Attachment
    hashes: Sequence[str]
    models: Sequence[PagedModel]

    def _pools(self) -> list[tuple[PagedModel, PoolSpec]]:
        attached = {pool.name for pool in self.attachment.pools}
        return [
            (model, pool)
            for model in self.models
            for pool in model.pools.all
            if pool.name in attached
        ]

    def found(self) -> int:
        """Return the longest restorable prefix, in pages."""
        return self.attachment.exists(self.hashes).best

    def load(self) -> Loaded:
        """Load the longest prefix that is whole into host memory.

        A page that turns out to be bad while it is read shortens the prefix,
        and a shorter one needs other trailing pages, so it is looked up
        again. Each attempt is shorter than the one before: a backend that
        goes on announcing a page it cannot deliver does not stop this.
        """
        first: int | None = None
        limit = len(self.hashes)
        while limit:
            best = self.attachment.exists(self.hashes[:limit]).best
            first = best if first is None else first
            if not best:
                break
            moved = self.attachment.get(self.hashes[:best], self._needed(best))
            ok = {name: codes == Outcome.OK for name, codes in moved.outcomes.items()}
            if moved.pages == best:
                counts = {name: int(good.sum()) for name, good in ok.items()}
                return Loaded(first, best, self._draft_prefix(best, ok), counts)
            limit = min(best - 1, _leading(ok[self.models[0].pools.attention.name]))
        return Loaded(found=first or 0)

    def _needed(self, pages: int) -> dict[str, Int64Array]:
        places = {}
        for model, pool in self._pools():
            positions = model.needed(pool, pages)
            places[pool.name] = np.full(pages, NO_PAGE, np.int64)
            places[pool.name][positions] = model.slots_of(pool, positions)
        return places

    def _draft_prefix(self, pages: int, ok: Mapping[str, BoolArray]) -> int:
        if len(self.models) == 1:
            return 0
        draft = self.models[1]
        attention = ok.get(draft.pools.attention.name)
        prefix = 0 if attention is None else _leading(attention)
        for pool in draft.pools.all[1:]:
            # Trailing pages were loaded for the whole prefix only.
            good = ok.get(pool.name)
            if (
                prefix < pages
                or good is None
                or not good[draft.needed(pool, pages)].all()
            ):
                return 0
        return prefix

    def store(self, progress: Progress) -> dict[str, list[int]]:
        """Store the pages that the models kept while they computed them.

        Returns:
            Pool name to the numbers of the pages that are stored now.
        """
        kept = {pool.name: set(model.kept[pool.name]) for model, pool in self._pools()}
        positions = sorted(set().union(*kept.values()))
        stored: dict[str, list[int]] = {name: [] for name in kept}
        progress(0, len(positions))
        for start in range(0, len(positions), _PAGES_PER_CALL):
            some = positions[start : start + _PAGES_PER_CALL]
            places = {
                pool.name: np.array(
                    [
                        model.slots_of(pool, [page])[0]
                        if page in kept[pool.name]
                        else NO_PAGE
                        for page in some
                    ],
                    np.int64,
                )
                for model, pool in self._pools()
            }
            moved = self.attachment.put([self.hashes[page] for page in some], places)
            for name, codes in moved.outcomes.items():
                stored[name] += [
                    page
                    for page, code in zip(some, codes, strict=True)
                    if code == Outcome.OK
                ]
            progress(start + len(some), len(positions))
        return stored


def _leading(good: BoolArray) -> int:
    return int(np.logical_and.accumulate(good).sum())
