"""What a backend of native retention does with times: all of it, and in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, Operation, Outcome
from kvdock.plugin.manifest import Support
from kvdock.testing.cases import contract_test
from kvdock.testing.contract.damage import declining
from kvdock.testing.contract.retention import (
    LONG_S,
    SHORT_S,
    of_grade,
    put_until,
    retain,
    wait_gone,
)
from kvdock.testing.harness import PATIENCE_S, becomes
from kvdock.testing.samples import page_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.testing.harness import Harness, Setup
    from kvdock.testing.oracles import Oracle

READING_S = 5
"""For how long a load that began in time may still find the bytes."""


class ExpiryTests:
    """Times hold whatever follows, are told, and end with the bytes."""

    @contract_test(of_grade(Support.NATIVE), slow=True)
    def test_an_expiry_stays_where_a_call_says_no_time(self, harness: Harness) -> None:
        setup = harness.plain()
        again, retained = page_hashes(4, "again"), page_hashes(4, "retained")
        for pages in (again, retained):
            stored, _ = put_until(setup, pages, expire_s=SHORT_S)
            assert stored.all()
        setup.put(again)
        retain(setup, retained, keep_s=LONG_S)
        wait_gone(setup, [*again, *retained])
        outcomes = setup.get([*again, *retained])
        assert (outcomes == Outcome.ABSENT).all(), "a call without a time took one away"

    @contract_test(of_grade(Support.NATIVE))
    def test_a_load_tells_when_its_pages_expire(self, harness: Harness) -> None:
        setup = harness.plain()
        at_put, later = page_hashes(2, "at put"), page_hashes(2, "later")
        setup.stored(later)
        soonest = int(time.time()) + LONG_S
        put_until(setup, at_put, expire_s=LONG_S)
        assert (retain(setup, later, expire_s=LONG_S) == Outcome.OK).all()
        latest = int(time.time()) + LONG_S
        for page in (*at_put, *later):  # one by one: any backend takes as many
            batch, _ = setup.batch(Operation.GET, [page], setup.places(1))
            result = setup.call(batch)
            assert result.ok.all(), "pages are not found before their time"
            told = result.expire_at
            assert told is not None, "a load does not tell when its pages expire"
            right = (soonest <= told) & (told <= latest)
            assert np.all(right), "a load tells another time than was asked for"

    @contract_test(of_grade(Support.NATIVE))
    def test_times_are_told_to_who_asks_for_nothing(self, harness: Harness) -> None:
        setup = harness.plain()
        kept, ends = page_hashes(1, "kept"), page_hashes(1, "ends")
        plain, never = page_hashes(1, "plain"), page_hashes(1, "never")
        _, promised = put_until(setup, kept, keep_s=LONG_S)
        stored, _ = put_until(setup, ends, expire_s=LONG_S)
        assert stored.all()
        setup.stored(plain)
        asked = [*kept, *ends, *plain, *never]
        batch = Batch(Operation.RETAIN, setup.keys(asked), deadline_s=setup.until())
        shape = len(asked), -1
        for _turn in range(2):  # to ask changes nothing
            result = setup.call(batch)
            there = result.ok.reshape(shape)
            assert there[:3].all(), "a stored page is not there for who asks"
            assert not there[3].any(), "times of a page that is absent"
            assert result.expire_at is not None, "no time is told"
            told = result.expire_at.reshape(shape)
            assert np.all(told[1] > time.time()), "the time of a page is not told"
            assert not told[[0, 2]].any(), "a time is told that no one asked for"
            holds = (
                np.zeros(len(batch), np.bool_) if result.kept is None else result.kept
            )
            found = holds.reshape(shape)
            assert np.all(found[0] == promised[0]), "a promise is not told"
            assert not found[1:].any(), "a promise is told that no one gave"

    @contract_test(of_grade(Support.NATIVE), slow=True)
    def test_pages_of_the_maximal_age_are_not_served(self, harness: Harness) -> None:
        setup = harness.plain()
        before, pages = page_hashes(4, "before"), page_hashes(4, "since")
        longer = page_hashes(4, "with a time")
        setup.stored(before)
        aged = _attached_again(harness, setup, max_age_s=float(SHORT_S))
        aged.put(pages)
        stored, _ = put_until(aged, longer, expire_s=LONG_S)
        assert stored.all()
        _expect_gone(aged, [*before, *pages])
        aged.loaded(longer)

    @contract_test(of_grade(Support.NATIVE), slow=True)
    def test_bytes_are_gone_soon_after_their_time(
        self, harness: Harness, oracle: Oracle | None
    ) -> None:
        within_s = 1.0
        with declining(oracle) as sees:
            plain = harness.plain()
            setup = _attached_again(harness, plain, erase_within_s=within_s)
            pages = page_hashes(3, "erased")
            stored, _ = put_until(setup, pages, expire_s=SHORT_S)
            assert stored.all()
            keys = setup.keys(pages)
            bytes_of = {key: sees.peek(key) for key in keys}
            wait_gone(setup, pages)

            def erased() -> bool:
                setup.exists(pages[:1])  # what has no thread may do it with a call
                return all(
                    not data or sees.peek(key) != data for key, data in bytes_of.items()
                )

            patience_s = within_s + READING_S + harness.scale.seconds(PATIENCE_S)
            assert becomes(erased, patience_s), "bytes are there long after their time"


def _attached_again(
    harness: Harness,
    setup: Setup,
    *,
    max_age_s: float = 0.0,
    erase_within_s: float = 60.0,
) -> Setup:
    """Attach the same pool as an engine with other times would."""
    config = attrs.evolve(
        setup.config, max_age_s=max_age_s, erase_within_s=erase_within_s
    )
    return harness.rig(setup.pool, like=attrs.evolve(setup, config=config))


def _expect_gone(setup: Setup, pages: Sequence[str]) -> None:
    wait_gone(setup, pages)
    outcomes = setup.get(pages)
    assert (outcomes == Outcome.ABSENT).all(), "a page is served beyond the maximal age"
