"""Work out from a journal why pages were missed.

What happened to a page before a lookup missed it says why: it was never stored, or
not taken and why, or it was stored and is gone. Which page mattered is the core's
own evaluation: the pool that cuts the prefix, and its first page that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from kvdock.batch import Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.hits import evaluate
from kvdock.journal.records import ATTACHED, HASH_CHARS, JournalRecord
from kvdock.namespace import Difference, diff_records
from kvdock.pools.enums import HitPolicy
from kvdock.strict_enum import StrictEnum

_OK, _ABSENT = Outcome.OK.name.lower(), Outcome.ABSENT.name.lower()
_DAMAGED = frozenset(
    one.name.lower() for one in (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
)


class Cause(StrictEnum):
    """Reason for which a page was missed."""

    OTHER_NAMESPACE = "other_namespace"
    """It is stored in another namespace: a setting, a model or a salt differs."""
    NEVER_STORED = "never_stored"
    """Nobody stored it, as far as the journal goes back."""
    POOL_NOT_STORED = "pool_not_stored"
    """Its pool has no backend."""
    QUEUE_FULL = "queue_full"
    """It was not stored: too many transfers waited, or it waited too long."""
    BREAKER_OPEN = "breaker_open"
    """Its backend was not asked, because it had failed before."""
    DECLINED = "declined"
    """The backend did not take it: full, over a limit, or busy."""
    TOO_LATE = "too_late"
    """The call did not end by its deadline."""
    UNREACHABLE = "unreachable"
    """The backend could not be reached."""
    FAILED = "failed"
    """The call failed."""
    OTHER_TIER = "other_tier"
    """It is stored in a tier that this request did not ask."""
    EVICTED = "evicted"
    """It was stored, and its backend has it no longer."""
    DAMAGED = "damaged"
    """Its bytes were wrong when they were read: it was deleted."""
    CLEARED = "cleared"
    """Its namespace was cleared."""


_SENTENCES: Mapping[Cause, tuple[str, str]] = MappingProxyType(
    {
        Cause.OTHER_NAMESPACE: (
            "it is stored in another namespace",
            "Make the settings equal that `differences` names, or warm this namespace.",
        ),
        Cause.NEVER_STORED: (
            "nobody stored it, as far back as the journal goes",
            "Look whether the request before it ended, and whether its writes are on.",
        ),
        Cause.POOL_NOT_STORED: (
            "its pool is not stored",
            "See `kvdock route` for the reason, and choose a backend that takes it.",
        ),
        Cause.QUEUE_FULL: (
            "it was not moved, because the queue of transfers was full",
            "Raise core.transfers; a store that is slower than the engine stays so.",
        ),
        Cause.BREAKER_OPEN: (
            "its backend was cut off after failures",
            "See the log for what failed, and `kvdock doctor`.",
        ),
        Cause.DECLINED: (
            "the backend did not take it: full, over a limit, or busy",
            "Look at `kvdock store ls` and the quota.",
        ),
        Cause.TOO_LATE: (
            "the call did not end by its deadline",
            "Look at `kvdock top`; raise core.deadlines if the store is that slow.",
        ),
        Cause.UNREACHABLE: (
            "the backend could not be reached",
            "See `kvdock doctor`.",
        ),
        Cause.FAILED: ("the call failed", "The engine's log has the error."),
        Cause.OTHER_TIER: (
            "it is stored in a tier that was not asked",
            "Give each process the same tiers: see `kvdock route`.",
        ),
        Cause.EVICTED: (
            "it was stored, and made way for other pages since",
            "Give the store more room, or retain less: see `kvdock store ls`.",
        ),
        Cause.DAMAGED: (
            "its bytes were wrong and it was deleted",
            "Run `kvdock store verify`, and look at the disk.",
        ),
        Cause.CLEARED: (
            "its namespace was cleared",
            "The next request stores it again.",
        ),
    }
)

_OF_OUTCOME: Mapping[str, Cause] = MappingProxyType(
    {
        "refused": Cause.DECLINED,
        "timeout": Cause.TOO_LATE,
        "unavailable": Cause.UNREACHABLE,
        "error": Cause.FAILED,
        **dict.fromkeys(_DAMAGED, Cause.DAMAGED),
    }
)
_OF_HELD_BACK: Mapping[str, Cause] = MappingProxyType(
    {"breaker": Cause.BREAKER_OPEN, "queue": Cause.QUEUE_FULL}
)


@attrs.frozen
class PoolAnswer:
    """One pool of a request.

    Args:
        pool: Its name.
        backends: Who was asked.
        asked: Pages that were asked for.
        found: Pages that are stored.
        loaded: Pages that were loaded.
        limits: Whether it cuts the prefix that could be restored.
        first: The position of the first missing page that matters; None if there
            is none.
        causes: How many missing pages have which cause.
        cause: Of that first page.
        sentence: The same in words.
        fix: What to do.
    """

    pool: str
    backends: tuple[str, ...]
    asked: int
    found: int
    loaded: int
    limits: bool
    first: int | None = None
    causes: Mapping[Cause, int] = attrs.field(factory=dict)
    cause: Cause | None = None
    sentence: str = ""
    fix: str = ""


@attrs.frozen
class RequestAnswer:
    """Answer to the question why storage had no more for a request.

    Args:
        request: The engine's id, or "" for hashes that were given.
        namespace: Whose pages were asked for.
        at_s: When they were first asked for, in seconds since 1970.
        pages: Pages of the prefix that was asked for.
        restorable: Pages of the longest prefix that could be restored.
        pools: Pool by pool, those that cut the prefix first.
        verdict: The answer in one sentence.
        fix: What to do.
        differences: In what the namespace differs from the one that has the pages.
        lost_records: Records that the journal lost meanwhile: it may lack a reason.
    """

    request: str
    namespace: str
    at_s: float
    pages: int
    restorable: int
    pools: tuple[PoolAnswer, ...]
    verdict: str
    fix: str = ""
    differences: tuple[Difference, ...] = ()
    lost_records: int = 0


Read = Callable[[], Iterable[JournalRecord]]
"""Reads the journal from its beginning."""


def requests(records: Iterable[JournalRecord]) -> dict[str, tuple[float, int, int]]:
    """List the requests of a journal.

    Returns:
        Request to when it was first seen, in seconds since 1970, the most pages that
        were asked for in one lookup, and those of them that were found.
    """
    found: dict[str, tuple[float, int, int]] = {}
    for record in records:
        if record.request and record.operation == Operation.EXISTS:
            at_s, asked, there = found.get(record.request, (record.at_s, 0, 0))
            if len(record.pages) > asked:
                asked = len(record.pages)
                there = sum(size for outcome, size in record.outcomes if outcome == _OK)
            found[record.request] = (at_s, asked, there)
    return found


def explain(
    read: Read,
    *,
    request: str = "",
    hashes: Sequence[str] = (),
    namespace: str = "",
) -> RequestAnswer:
    """Say what storage had for a request or for page hashes, and why not more.

    Args:
        read: Reads the journal; it is called twice.
        request: The engine's id of the request.
        hashes: Instead of a request: page hashes of a prefix, in order, and what
            became of them by the end of the journal.
        namespace: The beginning of a namespace's digest; needed only where a
            journal has several for the hashes.

    Raises:
        KvdockError: If the journal does not have them.
    """
    question = _question(read, request, hashes, namespace)
    return _answer(question, _pasts(read, question))


# --- What was asked -------------------------------------------------------------


@attrs.define(eq=False)
class _Asked:
    """The pages of one pool that a request asked for."""

    pages: dict[str, str] = attrs.field(factory=dict)
    """Hash to the outcome of the lookup, in the order of the prefix."""
    held_back: dict[str, str] = attrs.field(factory=dict)
    loads: dict[str, str] = attrs.field(factory=dict)
    backends: dict[str, None] = attrs.field(factory=dict)


@attrs.define(eq=False)
class _Question:
    """Question that is to be answered."""

    request: str
    namespace: str
    at_s: float
    pools: dict[str, _Asked]
    attached: dict[str, JournalRecord]
    lost_records: int

    @property
    def wanted(self) -> set[str]:
        """All hashes of all pools."""
        return {page for asked in self.pools.values() for page in asked.pages}


def _question(
    read: Read, request: str, hashes: Sequence[str], namespace: str
) -> _Question:
    attached: dict[str, JournalRecord] = {}
    pools: dict[str, _Asked] = {}
    asked_in, at_s, lost, latest = "", 0.0, 0, 0.0
    for record in read():
        latest = max(latest, record.at_s)
        lost += record.dropped
        if record.operation == ATTACHED:
            attached[record.namespace] = record
        elif request and record.request == request:
            asked_in, at_s = asked_in or record.namespace, at_s or record.at_s
            if record.namespace == asked_in:
                _collect(pools.setdefault(record.pool, _Asked()), record)
    if request:
        if not any(asked.pages for asked in pools.values()):
            raise KvdockError(
                f"the journal has no lookup of request {request!r}",
                fix="Either the engine asked storage for nothing (its own memory had "
                "the prompt, or the prompt is shorter than a page), or the journal "
                "does not go back so far. `kvdock why --journal DIR` lists requests.",
            )
        return _Question(request, asked_in, at_s, pools, attached, lost)
    asked_in = _one_namespace(attached, namespace)
    wanted = [one[-HASH_CHARS:] for one in hashes]
    for pool in attached[asked_in].pools:
        pools[str(pool["name"])] = _Asked(dict.fromkeys(wanted, ""))
    return _Question("", asked_in, latest, pools, attached, lost)


def _collect(asked: _Asked, record: JournalRecord) -> None:
    asked.backends.setdefault(record.backend)
    for page, outcome in record.each():
        if record.operation == Operation.EXISTS:
            # A tier that has it answers after others that do not, and one that
            # failed may have had it.
            if asked.pages.get(page) != _OK and (
                outcome != _ABSENT or asked.pages.get(page, _ABSENT) == _ABSENT
            ):
                asked.pages[page] = outcome
                asked.held_back[page] = record.held_back
        elif record.operation == Operation.GET and asked.loads.get(page) != _OK:
            asked.loads[page] = outcome
            asked.pages.setdefault(page, _OK)


def _one_namespace(attached: Mapping[str, JournalRecord], given: str) -> str:
    found = [one for one in attached if one.startswith(given)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise KvdockError(f"the journal has no namespace {given!r}")
    raise KvdockError(
        f"the journal has {len(found)} namespaces",
        fix="Say which: " + ", ".join(one[:12] for one in found),
    )


# --- What happened to these pages -------------------------------------------------


@attrs.define(eq=False)
class _Past:
    """History of one page of one pool in one namespace, until it was asked for.

    Args:
        stored_in: The backends that took it, and are not known to have lost it since.
        cause: Why it is not there, as far as that is known.
    """

    stored_in: set[str] = attrs.field(factory=set)
    cause: Cause = Cause.NEVER_STORED

    @property
    def stored(self) -> bool:
        """Return whether a backend has it, as far as is known."""
        return bool(self.stored_in)

    def note(self, record: JournalRecord, outcome: str) -> None:
        """Take the next thing that happened."""
        if record.operation == Operation.PUT:
            if outcome == _OK:
                self.stored_in.add(record.backend)
            elif not self.stored:
                self.cause = _cause_of(outcome, record.held_back)
        elif outcome in _DAMAGED:
            self._lost(record.backend, Cause.DAMAGED)
        elif record.operation == Operation.EXISTS and outcome == _OK:
            self.stored_in.add(record.backend)  # by a process without a journal
        elif outcome == _ABSENT and record.backend in self.stored_in:
            self._lost(record.backend, Cause.EVICTED)

    def clear(self, backend: str) -> None:
        """Note that its namespace was cleared in a backend."""
        if backend in self.stored_in:
            self._lost(backend, Cause.CLEARED)

    def _lost(self, backend: str, cause: Cause) -> None:
        self.stored_in.discard(backend)
        if not self.stored:
            self.cause = cause


_Pasts = dict[tuple[str, str, str], _Past]
"""By namespace, pool and hash."""


def _pasts(read: Read, question: _Question) -> _Pasts:
    wanted, pasts = question.wanted, _Pasts()
    for record in _in_order(read(), wanted):
        if record.at_s > question.at_s:
            continue
        if record.operation == Operation.CLEAR:
            for (namespace, _, _), past in pasts.items():
                if namespace == record.namespace:
                    past.clear(record.backend)
            continue
        for page, outcome in record.each():
            if page in wanted:
                key = (record.namespace, record.pool, page)
                past = pasts.setdefault(key, _Past())
                past.note(record, outcome)
    return pasts


def _in_order(
    records: Iterable[JournalRecord], wanted: set[str]
) -> Iterator[JournalRecord]:
    """Yield what concerns some pages, in the order of time over all processes."""
    mine = (
        one
        for one in records
        if one.operation == Operation.CLEAR or not wanted.isdisjoint(one.pages)
    )
    return iter(sorted(mine, key=lambda one: one.at_s))


def _cause_of(outcome: str, held_back: str) -> Cause:
    return _OF_HELD_BACK.get(held_back) or _OF_OUTCOME.get(outcome, Cause.FAILED)


# --- The answer -------------------------------------------------------------------


@attrs.frozen
class _Pool:
    """A pool as a journal has it, with what the evaluation of prefixes reads."""

    name: str
    physical: bool
    required: bool
    hit_policy: HitPolicy
    window_pages: int
    block_pages: int
    group_pages: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Pool:
        return cls(
            name=given["name"],
            physical=True,
            required=given["required"] or given["anchor"],
            hit_policy=HitPolicy(given["hit_policy"]),
            window_pages=given["window_pages"],
            block_pages=given["block_pages"],
            group_pages=given["group_pages"],
        )


def _answer(question: _Question, pasts: _Pasts) -> RequestAnswer:
    attachment = question.attached.get(question.namespace)
    known = {one["name"]: one for one in attachment.pools} if attachment else {}
    prefix = max(question.pools.values(), key=lambda asked: len(asked.pages)).pages
    pages = len(prefix)
    there = {
        name: _there(question, name, asked, pasts, prefix)
        for name, asked in question.pools.items()
    }
    specs = [_Pool.of(known[name]) for name in there if name in known]
    chosen = {one.name: there[one.name] for one in specs}
    hits = evaluate(specs, chosen, pages)  # type: ignore[arg-type]  # what it reads
    best = hits.best if specs else min(map(_leading, there.values()), default=0)
    required = {one.name for one in specs if one.required}
    answers = [
        _pool_answer(
            question, name, there[name], pasts, prefix,
            limits=hits.found.get(name, best) <= best < pages and name in required,
        )
        for name in there
    ]  # fmt: skip
    answers += [
        PoolAnswer(
            name, (), 0, 0, 0, False, None, {}, Cause.POOL_NOT_STORED,
            f"pool {name} is not stored: {why}",
            _SENTENCES[Cause.POOL_NOT_STORED][1],
        )
        for name, why in (attachment.refused if attachment else {}).items()
    ]  # fmt: skip
    answers.sort(key=lambda one: (not one.limits, one.cause is None))
    differences = _differences(question, answers, pasts)
    verdict, fix = _verdict(pages, best, answers)
    return RequestAnswer(
        request=question.request,
        namespace=question.namespace,
        at_s=question.at_s,
        pages=pages,
        restorable=best,
        pools=tuple(answers),
        verdict=verdict,
        fix=fix,
        differences=differences,
        lost_records=question.lost_records,
    )


def _there(
    question: _Question,
    pool: str,
    asked: _Asked,
    pasts: _Pasts,
    prefix: Mapping[str, str],
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which pages of the prefix the pool had, and gave where it was asked."""
    found = []
    for page in prefix:
        if question.request:
            there = asked.pages.get(page) == _OK
            found.append(there and asked.loads.get(page, _OK) == _OK)
        else:
            past = pasts.get((question.namespace, pool, page))
            found.append(past is not None and past.stored)
    return np.array(found, np.bool_)


def _leading(there: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    return int(np.logical_and.accumulate(there).sum())


def _pool_answer(
    question: _Question,
    pool: str,
    there: np.ndarray[Any, np.dtype[np.bool_]],
    pasts: _Pasts,
    prefix: Mapping[str, str],
    *,
    limits: bool,
) -> PoolAnswer:
    asked = question.pools[pool]
    causes = [
        None if ok else _why(question, pool, asked, page, pasts)
        for page, ok in zip(prefix, there.tolist(), strict=True)
    ]
    missing = [at for at, cause in enumerate(causes) if cause is not None]
    answer = PoolAnswer(
        pool=pool,
        backends=tuple(one for one in asked.backends if one),
        asked=len(asked.pages),
        found=sum(outcome == _OK for outcome in asked.pages.values())
        if question.request
        else int(there.sum()),
        loaded=sum(outcome == _OK for outcome in asked.loads.values()),
        limits=limits,
    )
    if not missing:
        return answer
    first = missing[0]
    cause = causes[first]
    assert cause is not None  # noqa: S101 - of a missing page
    what, fix = _SENTENCES[cause]
    return attrs.evolve(
        answer,
        first=first,
        causes=dict(Counter(one for one in causes if one is not None)),
        cause=cause,
        sentence=f"pool {pool} lacks page {first} of {len(prefix)}: {what}",
        fix=fix,
    )


def _why(
    question: _Question, pool: str, asked: _Asked, page: str, pasts: _Pasts
) -> Cause:
    """Return why a page of the request was missed."""
    loaded = asked.loads.get(page, _OK)
    if loaded not in (_OK, _ABSENT):
        return _cause_of(loaded, "")
    looked = asked.pages.get(page, _ABSENT)
    if looked not in (_OK, _ABSENT, ""):
        return _cause_of(looked, asked.held_back.get(page, ""))
    past = pasts.get((question.namespace, pool, page))
    if past is not None and past.stored:
        if past.stored_in.isdisjoint(asked.backends):
            return Cause.OTHER_TIER
        return Cause.EVICTED  # between its last sign of life and this question
    cause = past.cause if past else Cause.NEVER_STORED
    if cause is Cause.NEVER_STORED and _elsewhere(question, pool, page, pasts):
        return Cause.OTHER_NAMESPACE
    return cause


def _elsewhere(question: _Question, pool: str, page: str, pasts: _Pasts) -> str:
    """Return another namespace that has a page, or ""."""
    for namespace in question.attached:
        past = pasts.get((namespace, pool, page))
        if namespace != question.namespace and past is not None and past.stored:
            return namespace
    return ""


def _differences(
    question: _Question, answers: Sequence[PoolAnswer], pasts: _Pasts
) -> tuple[Difference, ...]:
    mine = question.attached.get(question.namespace)
    if mine is None or all(one.cause is not Cause.OTHER_NAMESPACE for one in answers):
        return ()
    for pool, asked in question.pools.items():
        for page in asked.pages:
            other = _elsewhere(question, pool, page, pasts)
            if other:
                theirs = question.attached[other]
                return tuple(diff_records(mine.record, theirs.record))
    return ()


def _verdict(pages: int, best: int, answers: Sequence[PoolAnswer]) -> tuple[str, str]:
    if best >= pages:
        short = next((one for one in answers if one.cause), None)
        more = f" Beside it, {short.sentence}." if short else ""
        return f"All {pages} pages could be restored.{more}", short.fix if short else ""
    why = next((one for one in answers if one.limits and one.cause), None) or next(
        (one for one in answers if one.cause), None
    )
    head = f"{best} of {pages} pages could be restored"
    return (f"{head}: {why.sentence}.", why.fix) if why else (f"{head}.", "")
