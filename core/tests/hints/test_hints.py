"""Hints that clients send: which are read, and what becomes of their pages."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shelf import Engine, Shelf, attention, hashes, patient, until
from tiered import NAMES, WHERE, Tiers

from kvdock.arrays import OutcomeArray
from kvdock.batch import Outcome
from kvdock.events import HintAnswered, Origin
from kvdock.hints import (
    Hints,
    PagesOfPool,
    RequestHints,
    by_times,
    payload_schemas,
    read_envelope,
)
from kvdock.hints.envelope import MOST_ACTIONS, MOST_BYTES
from kvdock.journal import read_journal
from kvdock.journal.observer import Journal, JournalSettings
from kvdock.observers.metrics import MetricDeltas
from kvdock.retention import Retention, RetentionAnswer
from kvdock.transfer.manager import TransferManager

ACCEPTED, UNSUPPORTED = RetentionAnswer.ACCEPTED, RetentionAnswer.UNSUPPORTED
NAME = attention().name
PAGE = attention().page_tokens


def action(kind: str, version: str = "1", **payload: Any) -> dict[str, Any]:
    return {
        "action_id": f"a-{kind}",
        "action_type": kind,
        "action_version": version,
        "payload": payload,
    }


def envelope(*actions: object) -> dict[str, Any]:
    return {"protocol_version": "1", "message_id": "m", "actions": list(actions)}


def read(given: object) -> tuple[RequestHints, list[tuple[str, str]]]:
    """Return the hints and what each action was answered."""
    told: list[tuple[str, str]] = []
    found = read_envelope("r", given, lambda *one: told.append((one[0], one[2])))
    return found, told


def test_known_actions_are_taken_and_others_are_ignored() -> None:
    before = time.time()
    found, told = read(
        envelope(
            action("kvdock.retain", keep_s=60, from_token=32, to_token=64),
            action("kv.fetch", anything=1),
            action("kvdock.expire", after_s=5),
            action("kvdock.forget", "2", from_token=7),
            action("kvdock.forget", from_token=7),
            action("kvdock.prefetch", hashes=["ab"]),
        )
    )
    assert told == [
        ("kvdock.retain", "taken"),
        ("other", "ignored"),
        ("kvdock.expire", "taken"),
        ("kvdock.forget", "ignored"),
        ("kvdock.forget", "taken"),
        ("kvdock.prefetch", "taken"),
    ]
    retain, expire, forget, prefetch = found.hints
    assert before + 60 <= retain.times.keep_until <= time.time() + 61
    assert (retain.first, retain.end, retain.number) == (32, 64, "a-kvdock.retain")
    assert before + 4 <= expire.times.expire_at <= time.time() + 5
    assert 0 < forget.times.expire_at <= time.time()
    assert (forget.first, prefetch.hashes) == (7, ("ab",))


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"keep_s": 0},
        {"keep_s": -1},
        {"keep_s": "60"},
        {"keep_s": True},
        {"keep_s": 1e12},
        {"keep_s": float("nan")},
        {"keep_s": 1, "from_token": -1},
        {"keep_s": 1, "from_token": 1.5},
        {"keep_s": 1, "page": 3},
    ],
)
def test_a_malformed_payload_is_rejected(payload: dict[str, Any]) -> None:
    assert read(envelope(action("kvdock.retain", **payload))) == (
        RequestHints("r"),
        [("kvdock.retain", "malformed")],
    )


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"hashes": []},
        {"hashes": ["ab"], "tokens": [1]},
        {"hashes": ["../x"]},
        {"hashes": ["ab/cd"]},
        {"hashes": ["a" * 129]},
        {"tokens": [-1]},
    ],
)
def test_a_prefetch_names_pages_in_one_way(payload: dict[str, Any]) -> None:
    found, told = read(envelope(action("kvdock.prefetch", **payload)))
    assert (found.hints, told) == ((), [("kvdock.prefetch", "malformed")])


def _nested(deep: int) -> object:
    found: list[Any] = []
    for _ in range(deep):
        found = [found]
    return found


@pytest.mark.parametrize(
    "given",
    [
        [],
        "hints",
        7,
        {},
        object(),
        {"protocol_version": "1", "message_id": 3, "actions": []},
        {"protocol_version": "1", "message_id": "m", "actions": {}},
        {**envelope(), "message_id": "m" * 257},
        envelope(action("kvdock.retain", keep_s="\ud800")),
        {("a", 1): 2},
        _nested(10_000),
    ],
    ids=range(11),
)
def test_a_malformed_envelope_is_rejected_as_one(given: object) -> None:
    assert read(given) == (RequestHints("r"), [("other", "malformed")])


def _many(actions: int) -> dict[str, Any]:
    return envelope(*[action("kvdock.forget", from_token=0)] * actions)


def test_an_envelope_of_as_much_as_is_read_is_followed() -> None:
    assert len(read(_many(MOST_ACTIONS))[0].hints) == MOST_ACTIONS
    room = MOST_BYTES - len(msgspec.json.encode(envelope(action("kvdock.prefetch"))))
    tokens = [7] * ((room - len('"tokens":[]')) // 2)
    found, told = read(envelope(action("kvdock.prefetch", tokens=tokens)))
    assert (len(found.hints[0].tokens), told[0][1]) == (len(tokens), "taken")


@pytest.mark.parametrize(
    "given",
    [
        _many(MOST_ACTIONS + 1),
        _many(200_000),
        envelope(*[{}] * 200_000),
        envelope(action("kvdock.prefetch", hashes=["x" * MOST_BYTES])),
        envelope(action("kvdock.prefetch", tokens=[1234567] * (MOST_BYTES // 8))),
        envelope(action("kvdock.prefetch", tokens=[7] * MOST_BYTES)),
        {**envelope(), **{str(number): number for number in range(MOST_BYTES)}},
        _nested(100_000),
    ],
    ids=range(8),
)
def test_an_envelope_that_is_too_large_is_one_event_and_nothing_is_applied(
    given: object,
) -> None:
    assert read(given) == (RequestHints("r"), [("other", "dropped")])


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner)
    ),
    max_leaves=12,
)


@given(
    st.lists(
        st.builds(
            lambda kind, payload: {**action(kind), "payload": payload},
            st.sampled_from([name for name, _ in payload_schemas()]),
            json,
        )
        | json,
        max_size=5,
    )
)
def test_whatever_clients_send_is_read_and_each_action_answered(
    actions: list[Any],
) -> None:
    found, told = read(envelope(*actions))
    assert len(told) == len(actions) or told == [("other", "malformed")]
    assert len(found.hints) == sum(outcome == "taken" for _, outcome in told)


def test_an_engines_own_struct_is_read() -> None:
    class Action(msgspec.Struct):
        action_id: str
        action_type: str
        action_version: str
        payload: dict[str, Any]

    class Envelope(msgspec.Struct):
        protocol_version: str
        message_id: str
        actions: list[Action]

    one = Action("i", "kvdock.forget", "1", {"from_token": 3})
    assert read(Envelope("1", "m", [one]))[0].hints[0].first == 3


def test_a_page_is_meant_if_any_of_its_tokens_is() -> None:
    found, _ = read(
        envelope(
            action("kvdock.retain", keep_s=60, from_token=17, to_token=33),
            action("kvdock.retain", keep_s=600, from_token=48),
            action("kvdock.expire", after_s=30, from_token=64),
        )
    )
    short, long, _ = (hint.times.keep_until for hint in found.hints)
    ends = np.arange(1, 6) * 16
    times = found.times(ends, 16)
    assert [one.keep_until for one in times[:4]] == [0, short, short, long]
    assert [bool(one.expire_at) for one in times] == [False] * 4 + [True]
    # A promise never lasts longer than its page.
    assert times[4].keep_until == times[4].expire_at < long


# --- Applying them -----------------------------------------------------------


@attrs.define(eq=False)
class Listener:
    """Observes hints, as metrics and the journal do."""

    events: list[HintAnswered] = attrs.field(factory=list)
    metrics: MetricDeltas = attrs.field(factory=MetricDeltas)

    def __call__(self, event: HintAnswered) -> None:
        self.events.append(event)
        self.metrics.kvdock_observe(event, Origin())

    def pages(self, kind: str) -> Counter[str]:
        found = Counter[str]()
        for one in self.events:
            if one.action == kind:
                found.update(one.pages)
        return found


@attrs.define(eq=False)
class StandIn:
    """A pool whose backend keeps times."""

    asked: list[tuple[Sequence[str], Retention]] = attrs.field(factory=list)
    gate: threading.Event = attrs.field(factory=threading.Event)
    pool: Any = attrs.field(factory=attention)

    def retain(
        self, names: Sequence[str], asked: Retention, deadline_s: float
    ) -> OutcomeArray:
        assert self.gate.wait(60)
        assert deadline_s > time.monotonic()
        self.asked.append((names, asked))
        return np.full(len(names), ACCEPTED, np.uint8)


@pytest.fixture
def told() -> Listener:
    return Listener()


def pages_of(pool: Any, names: Sequence[str]) -> PagesOfPool:
    return PagesOfPool(pool, names, PAGE * np.arange(1, len(names) + 1))


def nothing(tokens: Sequence[int]) -> list[str]:
    raise AssertionError(tokens)


def test_hints_apply_to_the_pages_of_their_tokens(told: Listener) -> None:
    pool, names = StandIn(), hashes(6)
    pool.gate.set()
    service = Hints(patient(), told)
    hints = service.read(
        "r",
        envelope(
            action("kvdock.retain", keep_s=60, to_token=2 * PAGE),
            action("kvdock.forget", from_token=4 * PAGE + 1),
        ),
    )
    service.apply(hints, [pages_of(pool, names)], [], nothing)
    until(lambda: len(pool.asked) == 2 and told.pages("kvdock.forget"))
    assert [one for one, _ in pool.asked] == [names[:2], names[4:]]
    assert told.pages("kvdock.retain") == {"accepted": 2}
    assert told.pages("kvdock.forget") == {"accepted": 2}
    assert {one.request for one in told.events} == {"r"}
    shown = {(one.name, one.labels): sum(one.values) for one in told.metrics.take()}
    assert shown["kvdock_hints_total", ("kvdock.retain", "taken", "0", "")] == 1
    assert shown["kvdock_hint_pages_total", ("kvdock.forget", "accepted", "0", "")] == 2
    service.close()


def test_requests_that_find_too_much_waiting_are_dropped(told: Listener) -> None:
    pool = StandIn()
    service = Hints(patient(), told)
    hints = service.read("r", envelope(action("kvdock.retain", keep_s=60)))
    for _ in range(70):
        service.apply(hints, [pages_of(pool, hashes(2))], [], nothing)
    dropped = [one for one in told.events if one.outcome == "dropped"]
    assert len(dropped) == 6
    pool.gate.set()
    until(lambda: len(pool.asked) == 64)
    service.close()
    service.apply(hints, [pages_of(pool, hashes(2))], [], nothing)
    assert told.events[-1].outcome == "dropped"


def test_a_defect_while_hints_are_applied_ends_no_thread(
    told: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    service, broken, pool = Hints(patient(), told), StandIn(), StandIn()
    pool.gate.set()
    broken.pool = None
    hints = service.read("r", envelope(action("kvdock.retain", keep_s=60)))
    for one in (broken, pool):
        service.apply(hints, [pages_of(one, hashes(2))], [], nothing)
    until(lambda: len(pool.asked) == 1)
    assert "kvdock-hints: a task failed" in caplog.text
    service.close()


# --- Over an attachment ------------------------------------------------------


def test_pages_stored_in_the_background_have_their_times(
    later: Callable[[float], None],
) -> None:
    engine, names = Engine(core=patient()), hashes(4)
    answers: list[OutcomeArray] = []
    engine.fill(names, WHERE[:4])
    manager = TransferManager(engine.attachment)

    def write(at: slice, times: Retention) -> list[int]:
        own = manager.write(
            NAME, names[at], WHERE[:4][at], times=(times, answers.append)
        )
        assert own.wait(60)
        return [int(one) for one in own.outcomes]

    refused = int(Outcome.REFUSED)
    assert write(slice(0, 2), Retention.lasting(expire_s=60)) == [0, 0]
    assert write(slice(2, 3), Retention.lasting(keep_s=60)) == [0]
    # What is to be forgotten is not stored at all.
    assert write(slice(3, 4), Retention.lasting(expire_s=0)) == [refused]
    assert [one.tolist() for one in answers] == [
        [ACCEPTED, ACCEPTED],
        [UNSUPPORTED],
        [ACCEPTED],
    ]
    assert engine.attachment[NAME].exists(names).tolist() == [True] * 3 + [False]
    later(61)
    found = engine.attachment[NAME].get(names[:3], WHERE[:3]).tolist()
    assert [one == 0 for one in found] == [False, False, True]
    manager.close()


def test_prefetched_pages_come_to_the_nearest_tier(told: Listener) -> None:
    near, far = Shelf("near"), Shelf("far")
    tiers = Tiers([near, far], tiers=[
        {"backend": "near", "promote": "second"}, "far",
    ])  # fmt: skip
    pool = tiers.cache[NAME]
    try:
        tiers.stored()
        near.objects.clear()
        tiers.stored(NAMES[:1], WHERE[:1])
        service = Hints(patient(), told)
        prompt = [*NAMES, *hashes(1, first=77)]
        hints = service.read("r", envelope(action("kvdock.prefetch", tokens=[1, 2])))
        service.apply(hints, [], [pool], lambda tokens: prompt[: 99 * len(tokens)])
        until(lambda: bool(told.pages("kvdock.prefetch")))
        assert told.pages("kvdock.prefetch") == {
            "queued": 5,
            "present": 1,
            "absent": 1,
        }
        tiers.settle()
        assert near.objects == far.objects
        # It is loaded from there, although it was found farther away before.
        far.objects.clear()
        assert tiers.get() == len(NAMES)
        service.close()
    finally:
        tiers.cache.close()


def test_every_action_has_a_record_in_the_journal(tmp_path: Path) -> None:
    journal = Journal(JournalSettings(dir=tmp_path))
    engine = Engine(core=patient(), observers=[journal])
    service = Hints(patient(), engine.attachment.notify)
    hints = service.read(
        "r7", envelope(action("kvdock.retain", keep_s=60), action("kv.fetch"))
    )
    pages = pages_of(engine.attachment[NAME], hashes(2))
    service.apply(hints, [pages], [], nothing)

    def records() -> list[Any]:
        assert journal.flush(10)
        return [one for one in read_journal(tmp_path) if one.operation == "hint"]

    until(lambda: len(records()) == 3)
    found = [(one.request, *one.action, one.pool, one.outcomes) for one in records()]
    kind = ("kvdock.retain", "a-kvdock.retain")
    assert found == [
        ("r7", *kind, "", (("taken", 1),)),
        ("r7", "other", "a-kv.fetch", "", (("ignored", 1),)),
        ("r7", *kind, NAME, (("unsupported", 2),)),
    ]
    engine.attachment.close()


def test_positions_are_grouped_by_their_times() -> None:
    one, other = Retention(1), Retention(2)
    assert by_times([one, other, one]) == {one: [0, 2], other: [1]}
