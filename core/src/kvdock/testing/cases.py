"""Which tests a manifest switches on: pure functions of the manifest.

A contract test carries a chooser. The chooser turns a manifest into cases:
values to run the test with, or reasons to skip it. Nothing but the manifest
decides: the kit has no list of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import attrs

from kvdock.plugin.manifest import Capability, KindSupport, Manifest, Scope, Support
from kvdock.pools.enums import HitPolicy, Layout, PoolKind
from kvdock.pools.layout import stored_objects
from kvdock.pools.shard import Shard
from kvdock.testing.samples import Sample, possible_shardings

UNDECLARED = "UNDECLARED"
"""The word by which a test is skipped about which a manifest is silent."""


@attrs.frozen
class Case:
    """One run of a contract test, or the reason why there is none."""

    id: str
    value: Any = None
    skip: str = ""


Chooser = Callable[[Manifest], Iterable[Case]]
Test = TypeVar("Test", bound=Callable[..., object])

_MARK = "__kvdock_chooser__"
_PROVES = "__kvdock_proves__"
_SLOW = "__kvdock_slow__"


def contract_test(
    choose: Chooser | None = None, *, proves: str = "", slow: bool = False
) -> Callable[[Test], Test]:
    """Mark a method as a test of the contract.

    Args:
        choose: From a manifest to cases, which the test takes as `case`; None
            for a test that every backend runs once.
        proves: The field of the manifest that the test tries with a backend,
            where it has one. A declared capability of which every such test
            is skipped is not proven.
        slow: Whether it takes long with any store: it starts processes, moves many
            pages, or waits. A quick check leaves it out.
    """

    def mark(test: Test) -> Test:
        setattr(test, _MARK, choose)
        setattr(test, _PROVES, proves)
        setattr(test, _SLOW, slow)
        return test

    return mark


def proved_by(test: object) -> str:
    """Return the field of the manifest that a contract test tries, or ""."""
    found: str = getattr(test, _PROVES, "")
    return found


def is_slow(test: object) -> bool:
    """Return whether a quick check leaves a contract test out."""
    return bool(getattr(test, _SLOW, False))


def chooser_of(test: object) -> Chooser | None:
    """Return the chooser of a contract test."""
    found: Chooser | None = getattr(test, _MARK, None)
    return found


def is_contract_test(test: object) -> bool:
    """Return whether a function is a test of the contract."""
    return hasattr(test, _MARK)


def selection(suite: type, manifest: Manifest) -> Mapping[str, tuple[Case, ...]]:
    """Return every contract test of a class with its cases."""
    chosen: dict[str, tuple[Case, ...]] = {}
    for name in sorted(dir(suite)):
        test = getattr(suite, name)
        if is_contract_test(test):
            choose = chooser_of(test)
            chosen[name] = tuple(choose(manifest)) if choose else (Case("always"),)
    return chosen


def graded(field: str) -> Chooser:
    """Run with the declared grade; skip where nothing is declared."""

    def choose(manifest: Manifest) -> Iterable[Case]:
        yield _grade_case(getattr(manifest, field), field, None)

    return choose


def claimed(field: str) -> Chooser:
    """Run where the grade can be relied on; a NO skips and says so."""

    def choose(manifest: Manifest) -> Iterable[Case]:
        grade: Support = getattr(manifest, field)
        case = _grade_case(grade, field, None)
        if grade is Support.NO:
            case = attrs.evolve(case, skip=f"NO: it declares no {field}")
        yield case

    return choose


def graded_by_kind(field: str) -> Chooser:
    """Run for each declared kind, with (kind, grade) as value."""

    def choose(manifest: Manifest) -> Iterable[Case]:
        for kind, support in manifest.kinds.items():
            if kind is not PoolKind.LOGICAL:
                grade: Support = getattr(support, field)
                case = _grade_case(grade, f"{field} of {kind} pools", (kind, grade))
                yield attrs.evolve(case, id=f"{kind}-{case.id}")
        yield from _or_skip(manifest, "it takes no pool with bytes")

    return choose


def _grade_case(grade: Support, what: str, value: object) -> Case:
    if grade is Support.UNDECLARED:
        return Case("undeclared", value, f"{UNDECLARED}: {what}")
    return Case(grade.value, grade if value is None else value)


def reaching(field: str, near: Scope) -> Chooser:
    """Run where a declared scope reaches at least as far as `near`."""

    def choose(manifest: Manifest) -> Iterable[Case]:
        scope: Scope = getattr(manifest, field)
        far = list(Scope)
        short = far.index(scope) < far.index(near)
        yield Case(
            scope.value,
            scope,
            f"{field} reaches {scope}, not {near}" if short else "",
        )

    return choose


def limited(field: str) -> Chooser:
    """Run where a limit is declared, with the limit as value."""

    def choose(manifest: Manifest) -> Iterable[Case]:
        limit: int = getattr(manifest, field)
        skip = "" if limit else f"it declares no {field}"
        yield Case(str(limit) if limit else "none", limit, skip)

    return choose


def samples(
    *, layouts: bool = False, policies: bool = False, shardings: bool = False
) -> Chooser:
    """Run for a sample pool of each declared kind.

    Also once for each further layout, hit policy or sharding that is declared, where
    that is asked for.
    """

    def choose(manifest: Manifest) -> Iterable[Case]:
        for kind, mine in manifest.kinds.items():
            if kind is PoolKind.LOGICAL:
                continue
            known = list(_declared(kind, mine).values())
            if not all(known):
                yield Case(f"{kind}", None, f"nothing is declared of {kind} pools")
                continue
            plain = tuple(words[0] for words in known)
            yield _sample_case(manifest, kind, plain)
            for axis, every in enumerate((layouts, policies, shardings)):
                for word in known[axis][1:] if every else ():
                    chosen = (*plain[:axis], word, *plain[axis + 1 :])
                    yield _sample_case(manifest, kind, chosen)
        yield from _or_skip(manifest, "it takes no pool with bytes")

    return choose


def one_sample(manifest: Manifest) -> Iterable[Case]:
    """Run once, for the first declared kind that has bytes."""
    cases = list(samples()(manifest))
    yield next((case for case in cases if not case.skip), cases[0])


def _sample_case(manifest: Manifest, kind: PoolKind, words: tuple[str, ...]) -> Case:
    layout, policy, sharding = words
    sample = Sample(kind=kind, layout=layout, hit_policy=policy, sharding=sharding)
    return Case("-".join((kind, *words)), _fitted(manifest, sample))


def plain_sample(manifest: Manifest, kind: PoolKind, **words: Any) -> Sample:  # noqa: ANN401 - as `Sample` takes them
    """Return a sample pool of a kind in words that are declared for it.

    `words` are what the test is about; the manifest's first words serve for the rest.
    """
    usual = Sample(kind=kind)
    plain = {
        word: found[0]
        for word, found in _declared(kind, manifest.kinds.get(kind)).items()
        if found and getattr(usual, word) not in found
    }
    return _fitted(manifest, Sample(kind=kind, **plain | words))


def _declared(kind: PoolKind, mine: KindSupport | None) -> dict[str, list[Any]]:
    """Return the words of a sample that are declared, the likeliest first."""
    mine = mine or KindSupport()
    return {
        "layout": [one for one in Layout if one in mine.layouts],
        "hit_policy": [one for one in HitPolicy if one in mine.hit_policies],
        "sharding": [one for one in possible_shardings(kind) if one in mine.shardings],
    }


def _fitted(manifest: Manifest, sample: Sample) -> Sample:
    """Make a page small enough for a backend of small objects."""
    limit = manifest.max_object_bytes
    largest = max(stored.nbytes for stored in stored_objects(sample.pool(), Shard()))
    if not limit or largest <= limit or sample.page_bytes or sample.head_group:
        return sample
    return attrs.evolve(sample, page_bytes=limit)


def _or_skip(manifest: Manifest, reason: str) -> Iterable[Case]:
    if not set(manifest.kinds) - {PoolKind.LOGICAL}:
        yield Case("none", None, reason)


def refusals(manifest: Manifest) -> Iterable[Case]:
    """Run for every word of every kind that a manifest leaves out."""
    lost = False
    for kind in PoolKind:
        mine = manifest.kinds.get(kind)
        if mine is None:
            lost = True
            yield Case(f"{kind}", (Capability.STORE, Sample(kind=kind)))
            continue
        if kind is PoolKind.LOGICAL:
            continue
        for sample, capability in _left_out(kind, mine):
            lost = True
            word = getattr(sample, capability.value)
            yield Case(f"{kind}-{capability}-{word}", (capability, sample))
    if not lost:
        yield Case("none", None, "it leaves nothing out")


def _left_out(kind: PoolKind, mine: KindSupport) -> Iterable[tuple[Sample, Capability]]:
    every = (
        (Capability.LAYOUT, Layout, mine.layouts),
        (Capability.HIT_POLICY, HitPolicy, mine.hit_policies),
        (Capability.SHARDING, possible_shardings(kind), mine.shardings),
    )
    for capability, words, taken in every:
        for word in words:
            if word not in taken:
                said: dict[str, Any] = {capability.value: word}
                yield Sample(kind=kind, **said), capability
