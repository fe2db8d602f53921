from __future__ import annotations

import attrs
import pytest
from route_cases import KV, backend, plan

from kvdock.errors import NoRoute
from kvdock.plugin.manifest import (
    Support,
    Verdict,
)
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec
from kvdock.routing.verdicts import IntegrityCheck, RouteRequirements, TransferMode


def test_a_backend_that_does_not_verify_gets_trailers_and_the_table_says_so() -> None:
    one = plan(KV, by=[backend(integrity=Support.UNDECLARED)]).anchor
    assert one.check is IntegrityCheck.TRAILER
    assert one.reason == "zero copy, one object a page; verified by a trailer"
    assert plan(KV).anchor.check is IntegrityCheck.BACKEND


@pytest.mark.parametrize("checks", ["auto", "always"])
def test_integrity_without_a_report_counts_as_none_and_the_table_says_so(
    checks: str,
) -> None:
    one = plan(KV, unproven={}, needs=RouteRequirements(integrity=checks)).anchor
    assert one.check is IntegrityCheck.TRAILER
    assert one.reason == (
        "zero copy, one object a page; verified by a trailer, as it declares "
        "integrity, and its package carries no report of the kit"
    )
    assert plan(KV, unproven={"best": ""}).anchor.check is IntegrityCheck.BACKEND


def test_an_operator_may_trust_what_is_not_proven_and_the_table_says_so() -> None:
    needs = RouteRequirements(integrity="trust", native_integrity=True)
    one = plan(KV, unproven={}, needs=needs).anchor
    assert one.check is IntegrityCheck.BACKEND
    assert one.reason == (
        "zero copy, one object a page; verified by the backend, on trust: its package "
        "carries no report of the kit"
    )
    proven = plan(KV, needs=needs).anchor
    assert proven.reason == "zero copy, one object a page"
    poor = plan(
        KV,
        by=[backend(integrity=Support.NO)],
        needs=attrs.evolve(needs, native_integrity=False),
    )
    assert poor.anchor.check is IntegrityCheck.TRAILER


def test_integrity_without_a_report_does_not_meet_the_need_for_it() -> None:
    """Neither by the manifest nor by a verdict of the backend's own."""
    needs = RouteRequirements(native_integrity=True)

    def judge(name: str, *_: object) -> Verdict:
        return Verdict(Support.NATIVE, f"{name} says so")

    for own in (None, judge):
        assert plan(KV, needs=needs, judge=own).anchor.backend
        with pytest.raises(NoRoute, match=r"best declares integrity.*no report"):
            plan(KV, unproven={}, needs=needs, judge=own)


def test_a_trailer_is_a_second_piece() -> None:
    poor = backend(kind={"multi_buffer": Support.NO}, integrity=Support.NO)
    one = plan(KV, by=[poor]).anchor
    assert one.mode is TransferMode.STAGED
    assert "a trailer is a second piece" in one.reason
    unchecked = plan(KV, by=[poor], needs=RouteRequirements(integrity="off")).anchor
    assert unchecked.mode is TransferMode.ZERO_COPY
    assert "UNVERIFIED by choice" in unchecked.reason


def test_a_trailer_counts_towards_the_largest_object() -> None:
    largest = KV.page_bytes(Shard())
    limited = backend(integrity=Support.NO, max_object_bytes=largest)
    with pytest.raises(NoRoute, match="trailer included"):
        plan(KV, by=[limited])
    needs = RouteRequirements(integrity="off")
    assert plan(KV, by=[limited], needs=needs).anchor.backend


def test_verifying_can_be_doubled_but_counting_needs_none() -> None:
    always = RouteRequirements(integrity="always")
    assert plan(KV, needs=always).anchor.check is IntegrityCheck.TRAILER
    mark = PoolSpec(
        name="mark", kind="logical", parts=(), layers=(), page_tokens=8, anchor=True
    )
    counted = plan(mark, by=[backend(integrity=Support.NO)]).anchor
    assert counted.check is IntegrityCheck.BACKEND
