"""Policy: how much of a prefix an engine loads, decided for each request.

A decision stands until its load ends or is cut: at the moment from which computing
would have been faster. What is whole by then is used.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import attrs
import numpy as np

from kvdock.arrays import BoolArray, FloatArray, Int64Array
from kvdock.config.core import PaysMode, PaysSettings
from kvdock.events import LoadDecided, LookupSkipped
from kvdock.pays.choice import cheapest, costs
from kvdock.pays.curves import ComputeCurve, LoadCurve
from kvdock.strict_enum import StrictEnum

log = logging.getLogger("kvdock")

_SHARE = 1.05
"""What a load may take, in times of the computing that it spares."""
_TRY_SHARE = 0.25
"""Part of what computing takes that an exploring load may cost a request."""
_TRY_COMPUTED = 4
"""Least number of requests between two that are computed: few may come at all."""
_TRY_EVERY = 5.0
"""Pause between two explorations, in times of computing: they cost 5 % at most."""
_TRY_AFTER_S = 0.5
"""Least such pause."""
_LEARN_AFTER = 2
"""Requests that are loaded before what computing takes is measured."""
_LEARN_TOKENS = 512
"""Least tokens of such a piece."""
_LEARN_MOST = 4 * _LEARN_TOKENS
"""Most of them: where no shorter prefix can be restored, all is loaded."""
_PATIENCE = 1.25
"""Factor by which a load may seem slower than computing until it is cut."""
_SAY_EVERY_S = 60.0
"""Pause between two lines of the log that say what was learned."""
_STALE_S = 60.0
"""A load whose end was not heard of is forgotten after so long."""


class Choice(StrictEnum):
    """Choice that was made about the prefix that was found."""

    ALL = "all"
    """Load all of it."""
    PART = "part"
    """Load its beginning, compute the rest."""
    COMPUTE = "compute"
    """Load nothing."""
    EXPLORE = "explore"
    """Begin to load although computing seems faster, since loads were last measured
    too long ago; what does not go well is cut early."""
    LEARN = "learn"
    """Load its beginning and compute a piece, which says what computing takes: all that
    was computed before was too short to tell."""
    UNKNOWN = "unknown"
    """Load all of it, since one of the curves is not known."""


@attrs.define(eq=False)
class LoadLimit:
    """Moment from which computing would have been faster than a load.

    Args:
        compute_s: Seconds to compute from p pages on to the end, p = 0 to the pages
            that are to be loaded.
        share: Part of the time to compute all that the load may take without news.
    """

    compute_s: FloatArray
    share: float = 1.0
    _clock: Callable[[], float] = time.monotonic
    _begun_s: float = math.inf
    _latest_s: float = math.inf
    cut: bool = False
    """Whether a load was ended by it."""

    @property
    def gain_s(self) -> float:
        """Seconds of computing that the load spares."""
        return float(self.compute_s[0] - self.compute_s[-1])

    @property
    def over(self) -> bool:
        """Return whether it ends the load by now, before the load's own deadline."""
        ends_s = self.deadline_s
        return self.cut or (ends_s < self._latest_s and self._clock() >= ends_s)

    def until(self, deadline_s: float) -> float:
        """Return the earlier one of a deadline and of this limit; begins the load."""
        self._begun_s, self._latest_s = min(self._begun_s, self._clock()), deadline_s
        return self.deadline_s

    @property
    def deadline_s(self) -> float:
        """Until when a load may take, as far as is known by now."""
        return min(self._latest_s, self._begun_s + self.share * self.gain_s)

    def reached(self, done: float) -> bool:
        """Return whether a load that has done this share of its pages is to end.

        Called between batches. A load that goes well has the time of computing all.
        """
        took_s = self._clock() - self._begun_s
        at = min(int(done * (len(self.compute_s) - 1)), len(self.compute_s) - 1)
        rest_s = float(self.compute_s[at] - self.compute_s[-1])
        late = done <= 0 or took_s / done * (1 - done) > rest_s * _PATIENCE
        if not late:
            self.share = _SHARE
        self.cut |= late
        return late


LIMIT: ContextVar[LoadLimit | None] = ContextVar("kvdock_limit", default=None)
"""The limit of this thread's load; None for one without."""


@contextmanager
def limited_by(limit: LoadLimit | None) -> Iterator[None]:
    """Say which limit the loads inside have; their deadline is its `until`."""
    token = LIMIT.set(limit)
    try:
        yield
    finally:
        LIMIT.reset(token)


@attrs.frozen(eq=False)
class Prefix:
    """Part of a prompt that was found, and its cost.

    Args:
        restorable: bool (n + 1,), prefixes of n found pages, as `Hits` has it.
        load_s: float64 (n + 1,), what loading them is expected to take.
        ends: int64 (n + 1,), the tokens that the engine has with each of them.
        end: Tokens of the prompt.
        curves: By backend and pool, those that `load_s` rests on.
    """

    request: str
    restorable: BoolArray
    load_s: FloatArray
    ends: Int64Array
    end: int
    curves: Mapping[tuple[str, str], LoadCurve]

    @property
    def found(self) -> int:
        """Pages of the longest prefix that can be restored."""
        return len(self.restorable) - 1 - int(self.restorable[::-1].argmax())

    @property
    def learned(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return seconds of a call, and bytes per second, of curves that are known."""
        return {
            at: (curve.latency_s, curve.bytes_per_s)
            for at, curve in self.curves.items()
            if curve.known
        }


@attrs.frozen(eq=False)
class Decision:
    """Decision how much of a prefix to load.

    Args:
        pages: So many, a restorable prefix; 0 for none.
        limit: Until when; None where the load is not limited.
    """

    pages: int
    limit: LoadLimit | None = None


class LoadPolicy:
    """Decides for one attachment. Thread-safe."""

    def __init__(
        self,
        settings: PaysSettings,
        notify: Callable[[LoadDecided | LookupSkipped], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compute = ComputeCurve(settings.recompute, clock)
        self._settings = settings
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._loading: dict[str, tuple[float, float]] = {}
        self._loaded: dict[int, bool] = {}
        self._tried_s = self._said_s = -math.inf
        self._computed = self._unknown = 0

    @property
    def decides(self) -> bool:
        """Return whether an engine has to ask at all."""
        return self._settings.mode is not PaysMode.ALWAYS

    def decide(self, prefix: Prefix) -> Decision:
        """Decide about one request; `done` ends what it begins."""
        found, now_s = prefix.found, self._clock()
        if not found:
            return Decision(0)
        if not self.compute.known:
            wait_s, compute_s = 0.0, np.zeros(len(prefix.ends))
            with self._lock:
                choice, pages = self._learn(prefix)
        else:
            compute_s = self.compute.seconds(prefix.ends, prefix.end)
            with self._lock:
                wait_s = self._wait_s(now_s)
                choice, pages = self._choose(prefix, compute_s, wait_s, now_s)
        share = _TRY_SHARE if choice is Choice.EXPLORE else _SHARE
        acts = self._settings.mode is PaysMode.ON
        acted = acts and (self.compute.known or choice is Choice.LEARN)
        self._tell(
            LoadDecided(
                request=prefix.request,
                choice=choice,
                acted=acted,
                found=found,
                pages=pages,
                wait_s=wait_s,
                load_s=float(prefix.load_s[found]),
                compute_s=float(compute_s[0]),
                tokens_per_s=self.compute.tokens_per_s,
                curves=prefix.learned,
            )
        )
        loaded = pages if acted else found
        if not loaded:
            return Decision(0)
        limit = None
        expected_s = float(prefix.load_s[loaded])
        if acted and self.compute.known:
            limit = LoadLimit(compute_s[: pages + 1], share, self._clock)
            expected_s = min(expected_s, share * limit.gain_s)
        with self._lock:
            self._loading[prefix.request] = now_s, expected_s
        return Decision(loaded, limit)

    def done(self, request: str) -> None:
        """Note that nothing is loaded for a request any more."""
        with self._lock:
            self._loading.pop(request, None)

    def _wait_s(self, now_s: float) -> float:
        """Return what is left to load for other requests; with the lock held."""
        for name, (begun_s, _) in list(self._loading.items()):
            if now_s - begun_s > _STALE_S:
                del self._loading[name]
        # What was loaded since the first of them began is not in front any more.
        first_s = min((begun_s for begun_s, _ in self._loading.values()), default=now_s)
        left_s = sum(expected_s for _, expected_s in self._loading.values())
        return max(0.0, left_s - (now_s - first_s))

    def _learn(self, prefix: Prefix) -> tuple[Choice, int]:
        """Choose where it is not known what computing takes; with the lock held."""
        every, self._unknown = prefix.found, self._unknown + 1
        if self._unknown > _LEARN_AFTER and self._settings.mode is PaysMode.ON:
            rest = prefix.end - prefix.ends
            least = min(_LEARN_TOKENS, prefix.end // 2)
            piece = (rest >= least) & (rest <= max(_LEARN_MOST, rest[every]))
            pages = np.flatnonzero(prefix.restorable & piece)
            if len(pages) and pages[-1] < every:
                return Choice.LEARN, int(pages[-1])
        return Choice.UNKNOWN, every

    def _choose(
        self, prefix: Prefix, compute_s: FloatArray, wait_s: float, now_s: float
    ) -> tuple[Choice, int]:
        found, margin = prefix.found, self._settings.margin
        if len(prefix.learned) < len(prefix.curves):
            return Choice.UNKNOWN, found
        cost_s = costs(prefix.load_s, compute_s, wait_s, margin)
        pages = cheapest(prefix.restorable, cost_s)
        some = prefix.restorable.copy()
        some[0] = False
        best = pages or cheapest(some, cost_s)
        # Requests of one size keep what they had unless the other is clearly better.
        size = int(compute_s[0] * 1e3).bit_length()
        before = self._loaded.get(size, bool(pages))
        other = best if before else 0
        if cost_s[other] <= cost_s[pages] * (1 + margin / 2):
            pages = other
        self._loaded[size] = bool(pages)
        if pages:
            return (Choice.ALL if pages == found else Choice.PART), pages
        measured_s = min((one.at_s for one in prefix.curves.values()), default=now_s)
        pause_s = max(_TRY_AFTER_S, _TRY_EVERY * float(compute_s[0]))
        self._computed += 1
        due = now_s - max(measured_s, self._tried_s) >= pause_s
        if due and self._computed > _TRY_COMPUTED:
            self._tried_s, self._computed = now_s, 0
            return Choice.EXPLORE, found
        return Choice.COMPUTE, 0

    def _tell(self, event: LoadDecided) -> None:
        self._notify(event)
        if event.acted and event.pages < event.found:
            reason = "learn" if event.choice is Choice.LEARN else "pays"
            self._notify(LookupSkipped(request=event.request, reason=reason))
        known = event.tokens_per_s and event.curves
        if known and self._clock() - self._said_s > _SAY_EVERY_S:
            self._said_s = self._clock()
            log.info("load or compute: %s", event)
