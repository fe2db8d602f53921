"""A thousand turns over rings that are late, lossy, short and out of order."""

from __future__ import annotations

import errno
import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attached import OK, Engine, attached
from rig import ring_threads
from waiting import until

from kvdock.config import CoreSettings, Deadlines
from kvdock.config.core import BreakerSettings, NegativeCacheSettings
from kvdock.testing.open_files import open_files

TURNS = 1000
PAGES = 8
PREFIXES = 6
PLACES = 64
# Neither the breaker nor remembered misses may spare the rings a turn.
CORE = CoreSettings(
    deadlines=Deadlines(exists=10.0, get=0.1, put=10.0, clear=10.0, grace=0.01),
    breaker=BreakerSettings(failures=10**6, abandoned_calls=10**6),
    negative_cache=NegativeCacheSettings(max_keys=0),
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Say nothing of thousands of failures that are asked for."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    caplog.clear()


class Weather:
    """What goes wrong in a turn; drawn from a seed."""

    def __init__(self, knobs: Any, seed: int) -> None:
        self.knobs = knobs
        self.random = random.Random(seed)  # noqa: S311 - not a secret

    def change(self) -> str:
        draw = self.random.random
        self.knobs.order = self.random.choice(["random", "fifo", "reverse"])
        kind = self.random.choice(
            ["calm", "calm", "calm", "late", "later", "io", "short", "holes", "hang"]
        )
        match kind:
            case "late":
                self.knobs.delay = lambda _: draw() * 0.02
            case "later":
                self.knobs.delay = lambda _: 0.06 + draw() * 0.12
            case "io":
                self.knobs.result = lambda _: -errno.EIO if draw() < 0.2 else None
            case "short":
                self.knobs.result = lambda one: (
                    int(draw() * one.nbytes) if draw() < 0.2 else None
                )
            case "holes":
                self.knobs.result = lambda _: -errno.ENODATA if draw() < 0.2 else None
            case "hang":
                self.knobs.lose = lambda _: draw() < 0.1
        return kind

    def clear(self) -> None:
        self.knobs.delay = self.knobs.result = None
        self.knobs.find()


def turn(engine: Engine, weather: Weather, number: int, seen: Counter[str]) -> None:
    """Load and store some pages in this weather; whatever is OK is right."""
    rng = weather.random
    first = rng.randrange(PREFIXES) * PAGES
    pages = rng.sample(range(first, first + PAGES), PAGES)
    start = number % (PLACES // PAGES) * PAGES
    places = list(range(start, start + PAGES))
    kind = weather.change()
    if rng.random() < 0.2:
        seen["put"] += engine.put(pages, places).count(OK)
    else:
        found = engine.get(pages, places)
        seen["hit"] += found.count(OK)
        seen["miss"] += PAGES - found.count(OK)
        seen[kind] += PAGES - found.count(OK)
    weather.clear()
    assert engine.attachment.wait_idle(20.0), "a lease did not end"
    if number % 4 == 0:
        # What was lost is stored again, as an engine does it.
        engine.put(pages, places)


@pytest.mark.slow
def test_a_thousand_turns_serve_no_wrong_byte_and_leave_nothing(
    fake: Any, root: Path
) -> None:
    weather = Weather(fake.KNOBS, 7)
    seen: Counter[str] = Counter()
    settings = {"root": str(root), "free_space": 0, "entries": 6}
    settings |= {"quota": "8 MiB", "segment_bytes": "1 MiB"}
    with attached(settings, PLACES, core=CORE) as engine:
        for first in range(0, PREFIXES * PAGES, PAGES):
            engine.put(range(first, first + PAGES))
        flat = None
        for number in range(TURNS):
            turn(engine, weather, number, seen)
            if number == TURNS // 10:
                flat = open_files()
        assert flat
        assert len(open_files()) <= len(flat) + 2
        assert ring_threads() <= 16
    until(lambda: not ring_threads())
    assert seen["hit"] > TURNS
    assert all(seen[kind] for kind in ("later", "io", "short", "holes", "hang")), seen


def test_a_hang_is_over_when_the_daemon_answers_again(fake: Any, root: Path) -> None:
    settings = {"root": str(root), "free_space": 0}
    with attached(settings, PLACES, core=CORE) as engine:
        engine.put(range(PAGES))
        fake.KNOBS.lose = lambda _: True

        def hangs() -> bool:
            assert OK not in engine.get(range(PAGES))
            # Where the deadline passed before it came to the ring, nothing is leased.
            return not engine.attachment.wait_idle(0.1)

        until(hangs)
        fake.KNOBS.find()
        assert engine.attachment.wait_idle(20.0)
        until(lambda: engine.get(range(PAGES)) == [OK] * PAGES)
