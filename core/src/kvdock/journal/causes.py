"""Work out from a journal why pages were missed.

What happened to a page before a lookup missed it says why: it was never stored, or
not taken and why, or it was stored and is gone. Which page mattered is the core's
own evaluation: the pool that cuts the prefix, and its first page that is missing.
"""

from __future__ import annotations

import itertools
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from kvdock.journal.records import ATTACHED, HASH_CHARS, SKIPPED, JournalRecord
from kvdock.namespace import Difference, diff_records
from kvdock.pools.enums import HitPolicy
from kvdock.pools.objects import Coordinate
from kvdock.strict_enum import StrictEnum

_OK, _ABSENT = Outcome.OK.name.lower(), Outcome.ABSENT.name.lower()
_DAMAGED = frozenset(
    one.name.lower() for one in (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
)
_FEW = 3
"""Fields that a verdict names where records differ."""

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Cause(StrictEnum):
    """Reason for which a page was missed; `causes.toml` has its words."""

    OTHER_NAMESPACE = "other_namespace"
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
    DAMAGED = "damaged"
    CLEARED = "cleared"
    RATE_LIMIT = "rate_limit"
    TOO_SHORT = "too_short"
    PAYS = "pays"

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


def _cause_of(outcome: str, held_back: str) -> Cause:
    if held_back == "full" and outcome == "refused":
        return Cause.QUOTA
    return _OF_HELD_BACK.get(held_back) or _OF_OUTCOME.get(outcome, Cause.FAILED)


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
        namespace: Whose pages were asked for.
        rank: Of several processes that asked, the one that could restore least.
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
    verdict: str
    fix: str = ""
    rank: str = ""
    pages: int = 0
    restorable: int = 0
    pools: tuple[PoolAnswer, ...] = ()
    differences: tuple[Difference, ...] = ()
    lost_records: int = 0

    @property
    def ok(self) -> bool:
        """Return whether storage was asked, and had all of it."""
        return 0 < self.pages <= self.restorable


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
        return _skipped(question)
    pasts = _pasts(read, question)
    answers = [
        _Case(question, rank, pasts, unknown).answer() for rank in question.ranks
    ]
    found = min(answers, key=lambda one: one.restorable)
    if question.skipped == Cause.PAYS:
        verdict = f"{found.verdict} Not all of it was loaded: {Cause.PAYS.what}."
        found = attrs.evolve(found, verdict=verdict, fix=found.fix or Cause.PAYS.fix)
    return found


def explain_prompt(
    records: Iterable[JournalRecord],
    tokens: int,
    cached: int | None,
    answer: RequestAnswer | None,
    request: str,
) -> RequestAnswer:
    """Say why a prompt did not hit that an engine was just asked for.

    Args:
        records: The journal.
        tokens: Tokens of the prompt.
        cached: Tokens that the engine did not compute; None if it does not say.
        answer: What the journal has of the request; None for nothing.
        request: Its id.
    """
    mine = answer.namespace if answer else ""
    known = (one for one in records if one.namespace.startswith(mine))
    attached = [one for one in known if one.record.get("pools")]
    newest = max(attached, key=lambda one: one.at_s, default=None)
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
    if answer is not None and (answer.pages or not short):
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
    """The pages of one pool that one process asked for."""

    slice_name: str = ""
    pages: dict[str, str] = attrs.field(factory=dict)
    """Hash to the outcome of the lookup, in the order of the prefix."""
    held_back: dict[str, str] = attrs.field(factory=dict)
    loads: dict[str, str] = attrs.field(factory=dict)
    backends: dict[str, None] = attrs.field(factory=dict)

    def note(self, record: JournalRecord) -> None:
        """Take an answer to the request."""
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

    @property
    def wanted(self) -> set[str]:
        """All hashes of all pools."""
        asked = (one for pools in self.ranks.values() for one in pools.values())
        return {page for one in asked for page in one.pages}


def _question(
    read: Read, request: str, hashes: Sequence[str], namespace: str
) -> _Question:
    attached: dict[str, dict[str, JournalRecord]] = {}
    ranks: _Ranks = defaultdict(dict)
    asked_in, at_s, lost, latest, skipped = "", 0.0, 0, 0.0, ""
    for record in read():
        latest = max(latest, record.at_s)
        lost += record.dropped
        if record.operation == ATTACHED:
            attached.setdefault(record.namespace, {})[record.rank] = record
        elif request and record.request == request:
            asked_in, at_s = asked_in or record.namespace, at_s or record.at_s
            if record.operation == SKIPPED:
                skipped = record.held_back
            elif record.namespace == asked_in and record.operation != Operation.PUT:
                asked = ranks[record.rank].setdefault(record.pool, _Asked())
                asked.note(record)
    if not request:
        asked_in, at_s = _one_namespace(attached, namespace), latest
        wanted = [one[-HASH_CHARS:] for one in hashes]
        for rank, one in attached[asked_in].items():
            for pool in one.pools:
                name = str(pool["name"])
                ranks[rank][name] = _Asked(
                    str(pool.get("slice_name") or name), dict.fromkeys(wanted, "")
                )
    elif not ranks and not skipped:
        raise KvdockError(
            f"the journal has no lookup of request {request!r}",
            fix="Either the engine asked storage for nothing (its own memory had "
            "the prompt, or the prompt is shorter than a page), or the journal "
            "does not go back so far. `kvdock why --journal DIR` lists requests.",
        )
    return _Question(request, asked_in, at_s, ranks, attached, lost, skipped)


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


def _skipped(question: _Question) -> RequestAnswer:
    """Answer for a request of which the engine asked storage nothing."""
    cause = Cause(question.skipped)
    return RequestAnswer(
        request=question.request,
        namespace=question.namespace,
        at_s=question.at_s,
        verdict=f"Storage was not asked for this request: {cause.what}.",
        fix=cause.fix,
        lost_records=question.lost_records,
    )


# --- What happened to these pages -------------------------------------------------


@attrs.define(eq=False)
class _Past:
    """History of one part of one page in one namespace, until it was asked for.

    Args:
        stored_in: The backends that took it, and are not known to have lost it since.
        cause: Why it is not there, as far as that is known.
    """

    stored_in: set[str] = attrs.field(factory=set)
    cause: Cause = Cause.NEVER_STORED

    def note(self, record: JournalRecord, outcome: str) -> None:
        """Take the next thing that happened."""
        if record.operation == Operation.PUT:
            if outcome == _OK:
                self.stored_in.add(record.backend)
            elif not self.stored_in:
                self.cause = _cause_of(outcome, record.held_back)
        elif outcome in _DAMAGED:
            self.lose(record.backend, Cause.DAMAGED)
        elif record.operation == Operation.EXISTS and outcome == _OK:
            self.stored_in.add(record.backend)  # by a process without a journal
        elif outcome == _ABSENT and record.backend in self.stored_in:
            self.lose(record.backend, Cause.EVICTED)

    def lose(self, backend: str, cause: Cause) -> None:
        """Note that a backend has it no longer."""
        self.stored_in.discard(backend)
        if not self.stored_in:
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
                        record.backend in past.stored_in
                    ):
                        past.lose(record.backend, Cause.CLEARED)
            continue
        part = (record.namespace, record.slice_name or record.pool)
        for name, outcome in record.each():
            if name in wanted:
                past = pasts.setdefault(name, {}).setdefault(part, _Past())
                past.note(record, outcome)
    return pasts


def _in_order(
    records: Iterable[JournalRecord], wanted: set[str]
) -> Iterator[JournalRecord]:
    """Yield what concerns some pages, in the order of time over all processes."""
    mine = (
        one
        for one in records
        if one.operation == Operation.CLEAR or not wanted.isdisjoint(one.pages.split())
    )
    return iter(sorted(mine, key=lambda one: one.at_s))


def _same_bytes(mine: str, theirs: str) -> bool:
    """Return whether two parts of a page of one pool have bytes in common."""
    with suppress(PoolError):
        one, other = Coordinate.parse(mine), Coordinate.parse(theirs)
        return one.pool == other.pool and one.overlaps(other)
    return mine == theirs


# --- The answer -------------------------------------------------------------------


@attrs.frozen
class _Pool:
    """A pool as a journal has it, with what the evaluation of prefixes reads."""

    name: str
    required: bool = True
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 0
    block_pages: int = 0
    group_pages: int = 0
    physical: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Pool:
        return cls(
            name=given["name"],
            required=given["required"] or given["anchor"],
            hit_policy=HitPolicy(given["hit_policy"]),
            window_pages=given["window_pages"],
            block_pages=given["block_pages"],
            group_pages=given["group_pages"],
        )

    def allows(self, there: Bools) -> bool:
        """Return whether the whole prefix could be restored."""
        allowed = allowed_prefixes(self, there)  # type: ignore[arg-type]  # what it reads
        return bool(allowed[-1])


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

    @cached_property
    def attachment(self) -> JournalRecord | None:
        """The latest attachment of this process that the journal has."""
        return self.question.attached.get(self.question.namespace, {}).get(self.rank)

    @cached_property
    def prefix(self) -> Sequence[str]:
        """The page hashes of the longest lookup, then what other pools add to it."""
        lookups = sorted((one.pages for one in self.asked.values()), key=len)
        return list(dict.fromkeys(itertools.chain(*reversed(lookups))))

    def answer(self) -> RequestAnswer:
        """Say what there was, pool by pool, and what cut the prefix."""
        pools = self.attachment.pools if self.attachment else ()
        known = {one["name"]: _Pool.of(one) for one in pools}
        specs = [known.get(name, _Pool(name)) for name in self.asked]
        pages = len(self.prefix)
        there = {name: self.there(name) for name in self.asked}
        chosen = {one.name: there[one.name] for one in specs}
        hits = evaluate(specs, chosen, pages)  # type: ignore[arg-type]  # what it reads
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
            for name, why in (
                self.attachment.refused if self.attachment else {}
            ).items()
        ]
        answers.sort(key=lambda one: (not one.limits, one.cause is None))
        differences = self.differences(answers)
        verdict, fix = _verdict(pages, best, answers, differences)
        return RequestAnswer(
            request=self.question.request,
            namespace=self.question.namespace,
            rank=self.rank,
            at_s=self.question.at_s,
            pages=pages,
            restorable=best,
            pools=tuple(answers),
            verdict=verdict,
            fix=fix,
            differences=differences,
            lost_records=self.question.lost_records,
        )

    def past(self, pool: str, page: str) -> _Past | None:
        part = (self.question.namespace, self.asked[pool].slice_name)
        return self.pasts.get(page, {}).get(part)

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
                found.append(past is not None and bool(past.stored_in))
        return np.array(found, np.bool_)

    def pool_answer(self, spec: _Pool, there: Bools) -> PoolAnswer:
        asked, pages = self.asked[spec.name], len(there)
        found = sum(outcome == _OK for outcome in asked.pages.values())
        answer = PoolAnswer(
            pool=spec.name,
            backends=tuple(one for one in asked.backends if one),
            asked=len(asked.pages),
            found=found if self.question.request else int(there.sum()),
            loaded=sum(outcome == _OK for outcome in asked.loads.values()),
            limits=spec.required and not spec.allows(there),
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
        if past is not None and past.stored_in:
            if past.stored_in.isdisjoint(asked.backends):
                return Cause.OTHER_TIER
            return Cause.EVICTED  # between its last sign of life and this question
        if past is not None and past.cause is not Cause.NEVER_STORED:
            return past.cause
        others = self.elsewhere(pool, page)
        if not others:
            return self.unknown
        mine = self.question.namespace in others
        return Cause.OTHER_RANKS if mine else Cause.OTHER_NAMESPACE

    def elsewhere(self, pool: str, page: str) -> dict[str, None]:
        """Return the namespaces that have a page in other objects."""
        part = self.asked[pool].slice_name
        return {
            namespace: None
            for (namespace, other), past in self.pasts.get(page, {}).items()
            if past.stored_in and _same_bytes(part, other)
        }

    def differences(self, answers: Sequence[PoolAnswer]) -> tuple[Difference, ...]:
        """Compare the namespace with the one that has a page that is missing."""
        mine = self.attachment
        for one in answers:
            if mine and one.cause is Cause.OTHER_NAMESPACE and one.first is not None:
                for other in self.elsewhere(one.pool, self.prefix[one.first]):
                    for theirs in self.question.attached.get(other, {}).values():
                        return diff_records(mine.record, theirs.record)
        return ()


def _differ_in(differences: Sequence[Difference]) -> str:
    """Name the first fields in which two records differ, with short values."""
    named = [
        f"{one.field} is {one.left} here and {one.right} there"
        if len(one.left + one.right) < 2 * HASH_CHARS
        else f"{one.field} differs"
        for one in differences[:_FEW]
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
