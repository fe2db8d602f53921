"""Curves: what loading and computing take, learned from calls and steps.

Both are least squares over two or three features, in which old samples fade. Nothing
here is a table: a disk that became slow is known after two calls.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvdock.arrays import FloatArray, Int64Array
from kvdock.synchronization import SharedTime

_LOADS_FADE_S = 5.0
"""Half-life of what is known of loads: a store changes within seconds."""
_STEPS_FADE_S = 60.0
"""Half-life of what is known of steps: an engine computes as it did a minute ago."""
_PRIOR = 0.02
"""Weight of what was known before, as a share of the samples'."""
_FLOOR = 0.3
"""Share of a sample that a feature of no known cost is taken to have."""
_OFF, _FAR_OFF = 1.25, 1.6
"""Factors from which a sample contradicts the curve, and from which it does clearly."""
_CHANGE = 5.0
"""Contradictions in a row, all on one side, that are a change; clear ones count half of
it, so that two of them are."""
_LEAST_SAMPLES = 2
_AT_ONCE = 32
"""Calls that are learned together, unless the curve is asked for before."""
_LEAST_STEP = 16
"""Tokens of the longest piece of a step that says something about prefill."""
_MOST_STEPS = 4
"""Steps under way; with more, their ends are not reported."""


class DecayedFit:
    """Least squares with coefficients of at least 0, in which old samples fade.

    Errors count in relation to what was expected. What the samples do not tell, as
    with calls of one size alone, stays in proportion as it was.

    Args:
        shape: For each feature, how likely it makes up what a sample takes, as long as
            samples do not tell.
        half_life_s: After how many seconds a sample counts half.
        jumps: Whether what is measured may change at once.
    """

    def __init__(
        self, shape: Sequence[float], half_life_s: float, *, jumps: bool = False
    ) -> None:
        features = len(shape)
        self._half_life_s = half_life_s
        self._shape = [one * _FLOOR for one in shape]
        self._products = [[0.0] * features for _ in range(features)]
        self._sums = [0.0] * features
        self._known = [0.0] * features
        self._solved = True
        self._jumps, self._off = jumps, 0.0
        self.samples = 0
        self.at_s = -math.inf

    def add(self, features: Sequence[float], seconds: float, now_s: float) -> None:
        """Take a sample."""
        seconds = max(seconds, 1e-6)
        fade = 0.5 ** ((now_s - self.at_s) / self._half_life_s)
        expected = sum(k * x for k, x in zip(self._known, features, strict=True))
        if self.samples < _LEAST_SAMPLES or expected <= 0:
            expected = seconds
        factor = seconds / expected
        side = (factor > _OFF) - (factor * _OFF < 1)
        clear = max(factor, 1 / factor) > _FAR_OFF
        step = side * (_CHANGE / 2 if clear else 1.0)
        self._off = self._off + step if side * self._off > 0 else step
        if self._jumps and abs(self._off) >= _CHANGE:
            fade = 0.0
        # One that took twenty times as long must not count four hundred times.
        weight = 1.0 / (expected * (seconds if clear else expected))
        for at, (row, x) in enumerate(zip(self._products, features, strict=True)):
            self._sums[at] = self._sums[at] * fade + weight * x * seconds
            for column, other in enumerate(features):
                row[column] = row[column] * fade + weight * x * other
        self.samples += 1
        self.at_s, self._solved = now_s, False
        if self.samples <= _LEAST_SAMPLES or abs(self._off) > 1:
            self.coefficients()

    def coefficients(self) -> list[float]:
        """Return what each feature costs, in seconds."""
        if self._solved:
            return self._known
        self._solved = True
        # Plain numbers: arrays take ten times as long for two or three features.
        places, products = range(len(self._sums)), self._products
        # In units in which what is known is 1, so that a change keeps proportions.
        unit = [
            max(known, shape / math.sqrt(max(products[at][at], 1e-300)))
            for at, (known, shape) in enumerate(
                zip(self._known, self._shape, strict=True)
            )
        ]
        prior = sum(products[at][at] * unit[at] ** 2 for at in places)
        prior *= _PRIOR if any(self._known) else 1e-6
        free, found = list(places), [0.0] * len(unit)
        while free:
            rows = [
                [
                    *(
                        unit[at] * products[at][to] * unit[to] + prior * (at == to)
                        for to in free
                    ),
                    self._sums[at] * unit[at] + prior * self._known[at] / unit[at],
                ]
                for at in free
            ]
            found = [0.0] * len(unit)
            for at, value in zip(free, _solve(rows), strict=True):
                found[at] = value
            if min(found) >= 0:
                break
            free.remove(found.index(min(found)))
        self._known = [
            max(value, 0.0) * one for value, one in zip(found, unit, strict=True)
        ]
        return self._known


def _solve(rows: list[list[float]]) -> list[float]:
    """Solve a positive definite system; each row ends with its right side."""
    for at, row in enumerate(rows):
        for below in rows[at + 1 :]:
            factor = below[at] / row[at]
            for to in range(at, len(row)):
                below[to] -= factor * row[to]
    found: list[float] = []
    for at in reversed(range(len(rows))):
        row = rows[at]
        known = sum(a * x for a, x in zip(row[at + 1 : -1], found, strict=True))
        found.insert(0, (row[-1] - known) / row[at])
    return found


class LoadCurve:
    """Cost of a load from one placement: seconds a call, and seconds a byte."""

    def __init__(self) -> None:
        self._fit = DecayedFit((1, 1), _LOADS_FADE_S, jumps=True)

    @property
    def known(self) -> bool:
        """Return whether enough calls were measured."""
        return self._fit.samples >= _LEAST_SAMPLES

    @property
    def at_s(self) -> float:
        """When a call was measured last."""
        return self._fit.at_s

    @property
    def latency_s(self) -> float:
        """Seconds of a call that do not depend on its size."""
        return self._fit.coefficients()[0]

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second, infinite where size makes no difference."""
        pace = self._fit.coefficients()[1]
        return 1 / pace if pace else math.inf

    def add(self, nbytes: int, seconds: float, now_s: float) -> None:
        """Take one call."""
        self._fit.add((1.0, float(nbytes)), seconds, now_s)

    def seconds(self, nbytes: Int64Array, calls: Int64Array) -> FloatArray:
        """Return what loads of so many bytes, in so many calls, would take."""
        each, pace = self._fit.coefficients()
        return calls * each + nbytes * pace


class LoadMeter:
    """Measures the loads from one backend; calls begin on its `time`.

    Calls at once share its time, so that what waits in front can be added up, whether a
    backend takes calls in turn or all at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.time = SharedTime(clock)
        self._lock = threading.Lock()
        self._curves: dict[str, LoadCurve] = {}
        self._ended: list[tuple[str, int, float, float]] = []

    def curve(self, pool: str) -> LoadCurve:
        """Return the curve of a pool, with all calls that have ended."""
        with self._lock:
            ended, self._ended = self._ended, []
            for name, nbytes, took_s, now_s in ended:
                curve = self._curves.setdefault(name, LoadCurve())
                curve.add(nbytes, took_s, now_s)
            return self._curves.setdefault(pool, LoadCurve())

    def abandon(self, began: float, pool: str, nbytes: int) -> None:
        """Note that a call was abandoned by its caller; `end` may still follow.

        Until then it counts with the time that it took, if that is far from expected.
        """
        shared_s, now_s = self.time.advance(-1)
        curve, took_s = self.curve(pool), shared_s - began
        with self._lock:
            expected_s = curve.latency_s + nbytes / curve.bytes_per_s
            if nbytes and (took_s > _FAR_OFF * expected_s or not curve.known):
                curve.add(nbytes, took_s, now_s)

    def end(self, began: float, pool: str, nbytes: int, *, late: bool = False) -> None:
        """Take a call that has ended, with the bytes that it loaded."""
        shared_s, now_s = self.time.advance(0 if late else -1)
        if not nbytes:
            return
        with self._lock:
            self._ended.append((pool, nbytes, shared_s - began, now_s))
        if len(self._ended) >= _AT_ONCE:
            self.curve(pool)


class ComputeCurve:
    """Cost of computing tokens of a prompt: linear in them, and in their prefix.

    Called on the engine's scheduler thread; `seconds` on any.

    Args:
        recompute: Tokens per second that hold until steps were seen; 0 for unknown.
    """

    def __init__(
        self, recompute: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._fit = DecayedFit((0.3, 1, 0.3), _STEPS_FADE_S)
        self._recompute = recompute
        self._step_tokens = 0
        self._steps: deque[tuple[float, Sequence[tuple[int, int]]]] = deque()
        self._ended_s = -math.inf

    @property
    def learned(self) -> bool:
        """Return whether it comes from steps of the engine."""
        return self._fit.samples >= _LEAST_SAMPLES

    @property
    def known(self) -> bool:
        """Return whether there is anything to go by."""
        return self.learned or self._recompute > 0

    def begin(self, work: Sequence[tuple[int, int]]) -> None:
        """Note that a step begins.

        `work` has (prefix, tokens) of each of its requests.
        """
        if len(self._steps) >= _MOST_STEPS:
            self._steps.clear()
        self._steps.append((self._clock(), work))

    def end(self) -> None:
        """Note that the oldest step has ended."""
        if self._steps:
            began_s, work = self._steps.popleft()
            self.add(work, began_s)

    def add(self, work: Sequence[tuple[int, int]], began_s: float) -> None:
        """Take a step that ends now.

        It had the engine since it began, or since the step before it ended: so gaps
        without work, and steps that are scheduled ahead, count for none.
        """
        now_s = self._clock()
        began_s, self._ended_s = max(began_s, self._ended_s), now_s
        if max((tokens for _, tokens in work), default=0) < _LEAST_STEP:
            return
        tokens = sum(count for _, count in work)
        squares = sum(count * (prefix + count / 2) for prefix, count in work)
        self._step_tokens = max(self._step_tokens, tokens)
        self._fit.add((1.0, float(tokens), squares), now_s - began_s, now_s)

    def seconds(self, start: Int64Array, end: int) -> FloatArray:
        """Return how long computing from each start to the end takes, float64 (n,)."""
        tokens = np.maximum(end - start, 0)
        if not self.learned:
            return tokens / self._recompute
        each, linear, square = self._fit.coefficients()
        steps = np.ceil(tokens / max(1, self._step_tokens))
        return steps * each + tokens * (linear + square * (start + end) / 2)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of a step of the usual size, without a prefix."""
        if not self.known:
            return 0.0
        tokens = max(self._step_tokens, 1)
        return tokens / max(float(self.seconds(np.zeros(1, np.int64), tokens)[0]), 1e-9)
