"""Work out from a journal why pages were missed.

What happened to a page before a lookup missed it says why: it was never stored, or
not taken and why, or it was stored and is gone. Which page mattered is the core's
own evaluation: the pool that cuts the prefix, and its first page that is missing.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib import resources
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from kvdock.batch import Operation, Outcome
from kvdock.errors import KvdockError, PoolError
from kvdock.hits import allowed_prefixes, evaluate
from kvdock.journal.records import (
    ATTACHED,
    HASH_CHARS,
    SKIPPED,
    JournalPool,
    JournalRecord,
)
from kvdock.namespace import Difference, diff_records
from kvdock.pools.enums import HitPolicy
from kvdock.pools.objects import Coordinate
from kvdock.strict_enum import StrictEnum

_OK, _ABSENT = Outcome.OK.name.lower(), Outcome.ABSENT.name.lower()
_DAMAGED = frozenset(
    one.name.lower() for one in (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
)
_ASKS = (Operation.EXISTS, Operation.GET)
_SOON_S = 1.0
"""How much later than the store a journal may date what was stored."""
_FEW = 3
"""Fields that a verdict names where records differ."""
_SHORT = 64
"""Characters of two values that a verdict shows; it only names longer ones."""

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Cause(StrictEnum):
    """Reason for which a page was missed; `causes.toml` has its words."""

    OTHER_NAMESPACE = "other_namespace"
    OTHER_GENERATION = "other_generation"
    OTHER_RANKS = "other_ranks"
    NEVER_STORED = "never_stored"
    NOT_THERE = "not_there"
    POOL_NOT_STORED = "pool_not_stored"
    QUEUE_FULL = "queue_full"
    BREAKER_OPEN = "breaker_open"
    QUOTA = "quota"
    DECLINED = "declined"
    TOO_LATE = "too_late"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    OTHER_TIER = "other_tier"
    EVICTED = "evicted"
    EXPIRED = "expired"
    DAMAGED = "damaged"
    CLEARED = "cleared"
    RATE_LIMIT = "rate_limit"
    TOO_SHORT = "too_short"
    PAYS = "pays"
    HOST_MEMORY = "host_memory"
    KEY = "key"
    DELETED = "deleted"
    REMOVED = "removed"
    WEIGHTS = "weights"
    OWN_MEMORY = "own_memory"
    LEARN = "learn"

    @property
    def what(self) -> str:
        """What happened, as the end of a sentence."""
        return _words()[self]["what"]

    @property
    def fix(self) -> str:
        """What to do about it."""
        return _words()[self]["fix"]


@cache
def _words() -> Mapping[str, Mapping[str, str]]:
    file = resources.files(__package__) / "causes.toml"
    return tomllib.loads(file.read_text("utf-8"))


_REASONS = frozenset(Cause)

_CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        "breaker": Cause.BREAKER_OPEN,
        "expired": Cause.EXPIRED,
        "key": Cause.KEY,
        "pays": Cause.PAYS,
        "queue": Cause.QUEUE_FULL,
        "refused": Cause.DECLINED,
        "timeout": Cause.TOO_LATE,
        "unavailable": Cause.UNREACHABLE,
        "error": Cause.FAILED,
        **dict.fromkeys(_DAMAGED, Cause.DAMAGED),
    }
)
"""By what held a call back, or by its outcome."""


def _cause_of(outcome: str, held_back: str) -> Cause:
    if held_back == "full" and outcome == "refused":
        return Cause.QUOTA
    if held_back == "key" and outcome != "refused":
        return _CAUSES.get(outcome, Cause.FAILED)
    if held_back == "queue" and outcome == "unavailable":
        return Cause.UNREACHABLE  # the transfers had been closed
    return _CAUSES.get(held_back) or _CAUSES.get(outcome, Cause.FAILED)


@attrs.frozen
class PoolAnswer:
    """One pool of a request.

    Args:
        limits: Whether it cuts the prefix that could be restored.
        first: The position of the first missing page that matters; None if there
            is none.
        causes: How many missing pages have which cause.
        cause: Of that first page.
    """

    pool: str
    backends: tuple[str, ...] = ()
    asked: int = 0
    found: int = 0
    loaded: int = 0
    limits: bool = False
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
        rank: Of several processes that asked, the one that could restore least.
        at_s: When they were first asked for, in seconds since 1970.
        restorable: Pages of the longest prefix that could be restored.
        pools: Pool by pool, those that cut the prefix first.
        differences: In what the namespace differs from the one that has the pages.
        lost_records: Records that the journal lost meanwhile: it may lack a reason.
        cut: Whether the engine had no room for all that could be restored.
        skipped: Why the engine did not ask, or not for all; "" if it did.
    """

    request: str
    namespace: str
    at_s: float
    verdict: str
    fix: str = ""
    rank: str = ""
    pages: int = 0
    restorable: int = 0
    pools: tuple[PoolAnswer, ...] = ()
    differences: tuple[Difference, ...] = ()
    lost_records: int = 0
    cut: bool = False
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Return whether nothing was missing: storage had all of it, and it had room.

        What the engine has in its own memory is not asked for.
        """
        whole = 0 < self.pages <= self.restorable and not self.cut
        return whole or (not self.pages and self.skipped == Cause.OWN_MEMORY)


Read = Callable[[], Iterable[JournalRecord]]
"""Reads the journal from its beginning."""


def requests(records: Iterable[JournalRecord]) -> dict[str, tuple[float, int, int]]:
    """List the requests of a journal.

    Returns:
        Request to when it was first seen, in seconds since 1970, the most pages that
        were asked for in one lookup, and how many of them some tier had; both of the
        pool that was asked first.
    """
    found: dict[str, tuple[float, int, int]] = {}
    pools: dict[str, tuple[str, str]] = {}
    for one in records:
        if not one.request or one.operation not in (Operation.EXISTS, SKIPPED):
            continue
        at_s, asked, there = found.get(one.request, (one.at_s, 0, 0))
        if pools.setdefault(one.request, (one.pool, one.rank)) == (one.pool, one.rank):
            asked = max(asked, sum(size for _, size in one.outcomes))
            # A far tier is asked for what the near one lacks.
            there += sum(size for outcome, size in one.outcomes if outcome == _OK)
        found[one.request] = (at_s, asked, min(asked, there))
    return found


def explain(
    read: Read,
    *,
    request: str = "",
    hashes: Sequence[str] = (),
    namespace: str = "",
    unknown: Cause = Cause.NEVER_STORED,
) -> RequestAnswer:
    """Say what storage had for a request or for page hashes, and why not more.

    Args:
        read: Reads the journal; it is called twice.
        request: The engine's id of the request.
        hashes: Instead of a request: page hashes of a prefix, in order, and what
            became of them by the end of the journal.
        namespace: The beginning of a namespace's digest; needed only where a
            journal has several for the hashes.
        unknown: What a page without any history is put down to.

    Returns:
        The answer of the process that could restore least.

    Raises:
        KvdockError: If the journal does not have them.
    """
    question = _question(read, request, hashes, namespace)
    if not question.ranks:
        if not question.skipped:
            raise KvdockError(f"the journal has no pools of {question.namespace!r}")
        cause = Cause(question.skipped)
        said = f"Storage was not asked for this request: {cause.what}."
        return question.answer(verdict=said, fix=cause.fix)
    pasts = _pasts(read, question)
    answers = [
        _Case(question, rank, pasts, unknown).answer() for rank in question.ranks
    ]
    found = min(answers, key=lambda one: one.restorable)
    if question.skipped in (Cause.PAYS, Cause.LEARN, Cause.HOST_MEMORY):
        cause = Cause(question.skipped)
        what = cause.what.format_map(defaultdict(lambda: "?", question.sizes))
        verdict = f"{found.verdict} Not all of it was loaded: {what}."
        found = attrs.evolve(
            found,
            verdict=verdict,
            fix=found.fix or cause.fix,
            cut=cause is Cause.HOST_MEMORY,
        )
    return found


def explain_prompt(
    records: Iterable[JournalRecord],
    tokens: int,
    cached: int | None,
    answer: RequestAnswer | None,
    request: str,
) -> RequestAnswer:
    """Say why a prompt did not hit that an engine was just asked for.

    `cached` are the tokens that the engine did not compute, None if it does not say;
    `answer` is what the journal has of the request.
    """
    mine = answer.namespace if answer else ""
    known = (one for one in records if one.namespace.startswith(mine))
    attached = [one for one in known if one.record.get("pools")]
    newest = max(attached, key=lambda one: one.at_s, default=None)
    page = 0
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # it is damaged
        pools: Any = newest.record["pools"] if newest else {}
        page = max((int(one["page_tokens"]) for one in pools.values()), default=0)
    rest = tokens % page if page else 0
    short = ""
    if rest:
        missing = "one token" if rest == page - 1 else f"{page - rest} tokens"
        short = (
            f"The prompt is {missing} short of a page of {page}, and only whole pages "
            f"are stored: its last {rest} tokens are computed."
        )
    if answer is not None and (
        answer.pages or not short or answer.skipped != Cause.TOO_SHORT
    ):
        if answer.ok and short:
            return attrs.evolve(answer, verdict=f"{short} {answer.verdict}")
        return answer
    verdict = short or "Storage was not asked for this prompt."
    if cached:
        verdict = (
            f"Storage was not asked: the engine had {cached} of {tokens} tokens in its "
            f"own memory. {short}"
        )
    return RequestAnswer(
        request=request,
        namespace=newest.namespace if newest else "",
        at_s=newest.at_s if newest else 0.0,
        verdict=verdict.strip(),
        fix="" if short or cached else "Look whether the engine's storage is attached.",
    )


# --- What was asked -------------------------------------------------------------


@attrs.define(eq=False)
class _Asked:
    """The pages of one pool that one process asked for.

    An engine may attach a draft's pool by itself, in a namespace of its own.
    """

    namespace: str
    slice_name: str = ""
    pages: dict[str, str] = attrs.field(factory=dict)
    """Hash to the outcome of the lookup, in the order of the prefix."""
    held_back: dict[str, str] = attrs.field(factory=dict)
    loads: dict[str, str] = attrs.field(factory=dict)
    backends: dict[str, None] = attrs.field(factory=dict)

    def note(self, record: JournalRecord) -> None:
        """Take an answer to the request."""
        if record.namespace != self.namespace:
            return  # of an engine that gave another request this id
        self.slice_name = record.slice_name or record.pool
        self.backends.setdefault(record.backend)
        for page, outcome in record.each():
            if record.operation == Operation.EXISTS:
                # A tier that has it answers after others that do not, and one that
                # failed may have had it.
                if self.pages.get(page) != _OK and (
                    outcome != _ABSENT or self.pages.get(page, _ABSENT) == _ABSENT
                ):
                    self.pages[page] = outcome
                    self.held_back[page] = record.held_back
            elif record.operation == Operation.GET and self.loads.get(page) != _OK:
                self.loads[page] = outcome
                self.held_back[page] = record.held_back
                self.pages.setdefault(page, _OK)


_Ranks = defaultdict[str, dict[str, _Asked]]


@attrs.define(eq=False)
class _Question:
    """Question that is to be answered: by rank and pool, what was asked for."""

    request: str
    namespace: str
    at_s: float
    ranks: _Ranks
    attached: dict[str, dict[str, JournalRecord]]
    """By namespace and rank."""
    lost_records: int
    skipped: str = ""
    sizes: Mapping[str, Any] = {}

    @property
    def wanted(self) -> set[str]:
        """All hashes of all pools."""
        asked = (one for pools in self.ranks.values() for one in pools.values())
        return {page for one in asked for page in one.pages}

    def answer(self, **more: Any) -> RequestAnswer:  # noqa: ANN401 - its fields
        """Return an answer to it."""
        return RequestAnswer(
            self.request,
            self.namespace,
            self.at_s,
            lost_records=self.lost_records,
            skipped=self.skipped,
            **more,
        )


def _question(
    read: Read, request: str, hashes: Sequence[str], namespace: str
) -> _Question:
    attached: dict[str, dict[str, JournalRecord]] = {}
    ranks: _Ranks = defaultdict(dict)
    asked_in, at_s, lost, latest, skipped = "", 0.0, 0, 0.0, ""
    sizes: Mapping[str, Any] = {}
    for record in read():
        latest = max(latest, record.at_s)
        lost += record.dropped
        if record.operation == ATTACHED:
            attached.setdefault(record.namespace, {})[record.rank] = record
        elif request and record.request == request:
            asked_in, at_s = asked_in or record.namespace, at_s or record.at_s
            if record.operation == SKIPPED and record.held_back in _REASONS:
                skipped, sizes = record.held_back, record.record
            elif record.operation in _ASKS:
                asked = _Asked(record.namespace)
                ranks[record.rank].setdefault(record.pool, asked).note(record)
    if not request:
        asked_in, at_s = _one_namespace(attached, namespace), latest
        wanted = [one[-HASH_CHARS:] for one in hashes]
        for rank, one in attached[asked_in].items():
            for pool in one.pools:
                part = pool.slice_name or pool.name
                asked = _Asked(asked_in, part, dict.fromkeys(wanted, ""))
                ranks[rank][pool.name] = asked
    elif not ranks and not skipped:
        raise KvdockError(
            f"the journal has no lookup of request {request!r}",
            fix="Either the engine asked storage for nothing (its own memory had "
            "the prompt, or the prompt is shorter than a page), or the journal "
            "does not go back so far. `kvdock why --journal DIR` lists requests.",
        )
    return _Question(request, asked_in, at_s, ranks, attached, lost, skipped, sizes)


def _one_namespace(attached: Iterable[str], given: str) -> str:
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
    """History of one part of one page in one namespace, until it was asked for.

    Args:
        ends_s: The backends that took it, and are not known to have lost it since, to
            from when on they do not serve it, in seconds since 1970.
        cause: Why it is not there, as far as that is known.
    """

    ends_s: dict[str, float] = attrs.field(factory=dict)
    cause: Cause = Cause.NEVER_STORED

    def note(self, record: JournalRecord, outcome: str, max_age_s: float) -> None:
        """Take the next thing that happened."""
        backend = record.backend
        if outcome in _DAMAGED:
            self.lose(backend, Cause.DAMAGED)
        elif record.operation == Operation.DELETE:
            self.remove(backend, outcome)
        elif outcome == _OK:
            ends_s = record.expire_at or record.at_s + (max_age_s or math.inf)
            if record.operation == Operation.EXISTS:
                # What a process without a journal has stored. A time that is in a
                # trailer is seen by loads alone.
                if self.cause is not Cause.EXPIRED:
                    self.ends_s.setdefault(backend, ends_s)
            elif record.expire_at or (
                # Not where a load just ended late.
                self.ends_s.get(backend, 0.0) + _SOON_S <= record.at_s
            ):
                self.ends_s[backend] = ends_s
        elif record.operation == Operation.PUT:
            if not self.ends_s:
                self.cause = _cause_of(outcome, record.held_back)
        elif outcome == _ABSENT and backend in self.ends_s:
            self.lose(backend, self.gone(record.at_s))

    def remove(self, backend: str, outcome: str) -> None:
        """Note that its deletion was asked for: one that is not there is OK."""
        if outcome == _OK and backend in self.ends_s:
            self.lose(backend, Cause.REMOVED)

    def gone(self, at_s: float) -> Cause:
        """Return why it is not there, of what no journal says that it went."""
        over = max(self.ends_s.values()) <= at_s + _SOON_S
        return Cause.EXPIRED if over else Cause.EVICTED

    def lives(self, at_s: float) -> bool:
        """Return whether a backend may serve it, as far as is known."""
        return any(end_s > at_s for end_s in self.ends_s.values())

    def lose(self, backend: str, cause: Cause) -> None:
        """Note that a backend has it no longer."""
        self.ends_s.pop(backend, None)
        if not self.ends_s:
            self.cause = cause


_Pasts = dict[str, dict[tuple[str, str], _Past]]
"""By hash; then by namespace and the part of the page."""


def _pasts(read: Read, question: _Question) -> _Pasts:
    wanted, pasts = question.wanted, _Pasts()
    for record in _in_order(read(), wanted):
        if record.at_s > question.at_s:
            break
        if record.operation == Operation.CLEAR:
            for page in pasts.values():
                for (namespace, _), past in page.items():
                    if namespace == record.namespace and (
                        record.backend in past.ends_s
                    ):
                        deleted = record.held_back == Cause.DELETED
                        cause = Cause.DELETED if deleted else Cause.CLEARED
                        past.lose(record.backend, cause)
            continue
        part = (record.namespace, record.slice_name or record.pool)
        attached = question.attached.get(record.namespace, {}).get(record.rank)
        max_age_s = attached.max_age_s if attached else 0.0
        for name, outcome in record.each():
            if name in wanted:
                past = pasts.setdefault(name, {}).setdefault(part, _Past())
                past.note(record, outcome, max_age_s)
    return pasts


def _in_order(
    records: Iterable[JournalRecord], wanted: set[str]
) -> Iterator[JournalRecord]:
    """Yield what concerns some pages, in the order of time over all processes."""
    mine = (
        one
        for one in records
        if one.operation == Operation.CLEAR or not wanted.isdisjoint(one.names())
    )
    return iter(sorted(mine, key=lambda one: one.at_s))


def _same_bytes(mine: str, theirs: str) -> bool:
    """Return whether two parts of a page of one pool have bytes in common."""
    with suppress(PoolError):
        one, other = Coordinate.parse(mine), Coordinate.parse(theirs)
        return one.pool == other.pool and one.overlaps(other)
    return mine == theirs


# --- The answer -------------------------------------------------------------------


@attrs.frozen(slots=False, eq=False)
class _Case:
    """What one process asked for, and what happened to it before."""

    question: _Question
    rank: str
    pasts: _Pasts
    unknown: Cause

    @property
    def asked(self) -> dict[str, _Asked]:
        return self.question.ranks[self.rank]

    def attachment(self, namespace: str) -> JournalRecord | None:
        """Return the latest attachment of this process that the journal has."""
        return self.question.attached.get(namespace, {}).get(self.rank)

    @cached_property
    def prefix(self) -> Sequence[str]:
        """The page hashes of the longest lookup, then what other pools add to it."""
        lookups = sorted((one.pages for one in self.asked.values()), key=len)
        return list(dict.fromkeys(itertools.chain(*reversed(lookups))))

    def answer(self) -> RequestAnswer:
        """Say what there was, pool by pool, and what cut the prefix."""
        known = {
            one.name: one
            for namespace in {asked.namespace for asked in self.asked.values()}
            if (attached := self.attachment(namespace))
            for one in attached.pools
        }
        specs = [known.get(name, JournalPool(name)) for name in self.asked]
        pages = len(self.prefix)
        there = {name: self.there(name) for name in self.asked}
        hits = evaluate(specs, there, pages)  # type: ignore[arg-type]  # what it reads
        best = hits.best
        answers = [self.pool_answer(one, there[one.name]) for one in specs]
        answers.sort(key=lambda one: hits.found[one.pool])
        answers += [
            PoolAnswer(
                name,
                cause=Cause.POOL_NOT_STORED,
                sentence=f"pool {name} is not stored: {why}",
                fix=Cause.POOL_NOT_STORED.fix,
            )
            for attached in [self.attachment(self.question.namespace)]
            if attached
            for name, why in attached.refused.items()
        ]
        answers.sort(key=lambda one: (not one.limits, one.cause is None))
        differences = self.differences(answers)
        verdict, fix = _verdict(pages, best, answers, differences)
        return self.question.answer(
            verdict=verdict, fix=fix, rank=self.rank, pages=pages, restorable=best,
            pools=tuple(answers), differences=differences,
        )  # fmt: skip

    def past(self, pool: str, page: str) -> _Past | None:
        asked = self.asked[pool]
        return self.pasts.get(page, {}).get((asked.namespace, asked.slice_name))

    def there(self, pool: str) -> Bools:
        """Return which pages the pool had, and gave where asked to.

        What it was not asked for is not missing: behind a page that the anchor
        lacks, or before a window, it is not needed.
        """
        asked, found = self.asked[pool], []
        for page in self.prefix:
            if self.question.request:
                there = asked.pages.get(page, _OK) == _OK
                found.append(there and asked.loads.get(page, _OK) == _OK)
            else:
                past = self.past(pool, page)
                found.append(past is not None and past.lives(self.question.at_s))
        return np.array(found, np.bool_)

    def pool_answer(self, spec: JournalPool, there: Bools) -> PoolAnswer:
        asked, pages = self.asked[spec.name], len(there)
        found = sum(outcome == _OK for outcome in asked.pages.values())
        answer = PoolAnswer(
            pool=spec.name,
            backends=tuple(one for one in asked.backends if one),
            asked=len(asked.pages),
            found=found if self.question.request else int(there.sum()),
            loaded=sum(outcome == _OK for outcome in asked.loads.values()),
            limits=spec.required and not allowed_prefixes(spec, there)[-1],  # type: ignore[arg-type]  # what it reads
        )
        begin = 0
        if spec.hit_policy is HitPolicy.TRAILING_PAGES:
            # The whole prefix needs no page before its window.
            begin = max(0, pages - spec.window_pages)
        causes = [
            (at, self.why(spec.name, self.prefix[at]))
            for at in np.flatnonzero(~there).tolist()
            if at >= begin
        ]
        if not causes:
            return answer
        first, cause = causes[0]
        return attrs.evolve(
            answer,
            first=first,
            causes=dict(Counter(one for _, one in causes)),
            cause=cause,
            sentence=f"pool {spec.name} lacks page {first + 1} of {pages}: "
            + cause.what,
            fix=cause.fix,
        )

    def why(self, pool: str, page: str) -> Cause:
        """Return why a page of the request was missed."""
        asked = self.asked[pool]
        for outcome in (asked.loads.get(page, _OK), asked.pages.get(page, _ABSENT)):
            if outcome not in (_OK, _ABSENT, ""):
                return _cause_of(outcome, asked.held_back.get(page, ""))
        past = self.past(pool, page)
        if past is not None and past.ends_s:
            cause = past.gone(self.question.at_s)  # since its last sign of life
            elsewhere = past.ends_s.keys().isdisjoint(asked.backends)
            alive = elsewhere and cause is Cause.EVICTED
            return Cause.OTHER_TIER if alive else cause
        if past is not None and past.cause is not Cause.NEVER_STORED:
            return past.cause
        others = self.elsewhere(pool, page)
        return self.where(asked.namespace, others) if others else self.unknown

    def where(self, namespace: str, others: Collection[str]) -> Cause:
        """Return why a page that is in some namespaces is not found in one."""
        if namespace in others:
            return Cause.OTHER_RANKS
        if any(map(_in_generation, self.compared(namespace, others))):
            return Cause.OTHER_GENERATION
        return Cause.OTHER_NAMESPACE

    def elsewhere(self, pool: str, page: str) -> dict[str, None]:
        """Return the namespaces that have a page in other objects."""
        part = self.asked[pool].slice_name
        return {
            namespace: None
            for (namespace, other), past in self.pasts.get(page, {}).items()
            if past.lives(self.question.at_s) and _same_bytes(part, other)
        }

    def differences(self, answers: Sequence[PoolAnswer]) -> tuple[Difference, ...]:
        """Compare the namespace with the most similar that has a missing page."""
        for one in answers:
            asked = self.asked.get(one.pool)
            if asked and one.cause in _ELSEWHERE and one.first is not None:
                others = self.elsewhere(one.pool, self.prefix[one.first])
                found = self.compared(asked.namespace, others)
                return min(found, key=len, default=())
        return ()

    def compared(
        self, namespace: str, others: Iterable[str]
    ) -> list[tuple[Difference, ...]]:
        """Return in what a namespace differs from each of some others."""
        mine = self.attachment(namespace)
        return [
            diff_records(mine.record, theirs.record)
            for other in others
            for theirs in self.question.attached.get(other, {}).values()
            if mine
        ]


_ELSEWHERE = (Cause.OTHER_NAMESPACE, Cause.OTHER_GENERATION)
"""Causes of a page that is there, in another namespace."""


def _in_generation(differences: Sequence[Difference]) -> bool:
    """Return whether nothing but the generation of the weights differs."""
    fields = {one.field.partition(".")[0] for one in differences}
    return fields == {"generation"}


def _generation(differences: Sequence[Difference], side: str) -> str:
    """Name a generation by what differs of it."""
    values = {one.field: str(getattr(one, side)) for one in differences}
    if "generation.version" not in values:
        return "other files of the same version"
    version = values["generation.version"].strip('"')
    return "the weights of the start" if version == "-" else f"generation {version}"


def _differ_in(differences: Sequence[Difference]) -> str:
    """Name the fields in which two records differ most plainly, with short values."""
    if _in_generation(differences):
        computed, asked = (_generation(differences, at) for at in ("right", "left"))
        return f"computed with {computed}, asked in {asked}"

    def plainly(one: Difference) -> tuple[bool, int]:
        return not {"-", "null"}.isdisjoint((one.left, one.right)), len(one.right)

    named = [
        f"{one.field} is {one.left} here and {one.right} there"
        if len(one.left + one.right) < _SHORT
        else f"{one.field} differs"
        for one in sorted(differences, key=plainly)[:_FEW]
    ]
    more = len(differences) - len(named)
    return ", ".join(named) + (f", and {more} more" if more else "")


def _verdict(
    pages: int,
    best: int,
    answers: Sequence[PoolAnswer],
    differences: Sequence[Difference],
) -> tuple[str, str]:
    why = next((one for one in answers if one.cause), None)
    if best >= pages:
        more = f" Beside it, {why.sentence}." if why else ""
        return f"All {pages} pages could be restored.{more}", why.fix if why else ""
    head = f"{best} of {pages} pages could be restored"
    if why is None:
        return f"{head}.", ""
    differ = f" ({_differ_in(differences)})" if differences else ""
    return f"{head}: {why.sentence}{differ}.", why.fix
