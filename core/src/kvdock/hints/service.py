"""Apply hints to pages: to stored ones in the background, to others when they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Operation
from kvdock.events import HintAnswered, requested_by
from kvdock.hints.envelope import RequestHints, read_envelope
from kvdock.resilience.background_executor import BackgroundExecutor, DeadlineFuture
from kvdock.retention import Retention, RetentionAnswer

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.config.core import CoreSettings
    from kvdock.hints.envelope import Hint
    from kvdock.transfer.attached_pool import AttachedPool

_MOST_WAITING = 63
"""Requests whose hints wait to be applied to stored pages."""
_WORDS = MappingProxyType({int(one): one.name.lower() for one in RetentionAnswer})


@attrs.frozen(eq=False)
class PagesOfPool:
    """Pages of a request in one pool.

    Args:
        ends: int64 (n,), the token behind the last one of each.
    """

    pool: AttachedPool
    hashes: Sequence[str]
    ends: Int64Array


def by_times(times: Iterable[Retention]) -> dict[Retention, list[int]]:
    """Return which positions have the same times, so that one call stores them."""
    found: dict[Retention, list[int]] = {}
    for at, one in enumerate(times):
        found.setdefault(one, []).append(at)
    return found


class Hints:
    """The hints of one engine process."""

    def __init__(
        self, core: CoreSettings, notify: Callable[[HintAnswered], None]
    ) -> None:
        self._core = core
        self._notify = notify
        self._requests = BackgroundExecutor("kvdock-hints", 1, _MOST_WAITING)

    def read(self, request: str, given: object) -> RequestHints:
        """Read the envelope of a request, and count each of its actions."""
        if given is None or not self._core.retention.hints:
            return RequestHints(request)
        return read_envelope(request, given, partial(self._answer, request))

    def apply(
        self,
        hints: RequestHints,
        pages: Sequence[PagesOfPool],
        pools: Sequence[AttachedPool],
        hashes_of: Callable[[Sequence[int]], Sequence[str]],
    ) -> None:
        """Apply hints to what is stored, in the background; returns at once.

        `pages` are those of the request, as far as they are known, and `pools` all
        pools, for what is prefetched. `hashes_of` returns the page hashes of another
        prompt, as this request's engine would name them; called on the thread of the
        hints.
        """
        if not hints.hints:
            return

        def drop(_: OutcomeArray) -> None:
            for hint in hints.hints:
                self._answer(hints.request, *hint.name, "dropped")

        def work(*_: object) -> OutcomeArray:
            with requested_by(hints.request):
                for hint in hints.hints:
                    if hint.times:
                        self._retain(hints, hint, pages)
                    else:
                        named = hint.hashes or hashes_of(hint.tokens)
                        self._prefetch(hints, hint, pools, named)
            return np.zeros(0, np.uint8)

        future = DeadlineFuture(0)
        future.on_rejected = drop
        self._requests.submit(future, work)

    def _retain(
        self, hints: RequestHints, hint: Hint, pages: Sequence[PagesOfPool]
    ) -> None:
        for one in pages:
            which = hint.covers(one.ends, one.pool.pool.page_tokens).nonzero()[0]
            if len(which):
                names = [one.hashes[at] for at in which.tolist()]
                until_s = self._core.deadlines.until(Operation.RETAIN)
                counts = _counts(one.pool.retain(names, hint.times, until_s))
                self._answer(hints.request, *hint.name, "", one.pool, counts)

    def _prefetch(
        self,
        hints: RequestHints,
        hint: Hint,
        pools: Sequence[AttachedPool],
        hashes: Sequence[str],
    ) -> None:
        for pool in pools:
            until_s = self._core.deadlines.until(Operation.EXISTS)
            counts = pool.prefetch(hashes, until_s)
            self._answer(hints.request, *hint.name, "", pool, counts)

    def stored(
        self, hints: RequestHints, pool: AttachedPool, answers: OutcomeArray
    ) -> None:
        """Count what became of the times of pages that a request has stored.

        A write of several requests has no hints. `answers` is uint8 (n,), a
        `RetentionAnswer` for each page.
        """
        self._answer(hints.request, "stored", "", "", pool, _counts(answers))

    def _answer(
        self,
        request: str,
        action: str,
        number: str,
        outcome: str,
        pool: AttachedPool | None = None,
        pages: Mapping[str, int] | None = None,
    ) -> None:
        self._notify(
            HintAnswered(
                request=request,
                action=action,
                action_id=number,
                outcome=outcome,
                pool=pool.pool.name if pool else "",
                pages=pages or {},
            )
        )

    def close(self) -> None:
        """Apply no further hints; the one that is applied ends by its deadline."""
        self._requests.close()


def _counts(answers: OutcomeArray) -> dict[str, int]:
    found = np.bincount(answers).tolist()
    return {_WORDS[at]: pages for at, pages in enumerate(found) if pages}
