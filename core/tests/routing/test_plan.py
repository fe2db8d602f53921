from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
from route_cases import BASE, EVERYTHING, KV, backend, plan, route

from kvdock.config.core import Integrity, StagingPolicy
from kvdock.errors import NoRoute, PluginError, PoolError
from kvdock.plugin.manifest import (
    Capability,
    KindSupport,
    Manifest,
    Scope,
    Support,
    Verdict,
)
from kvdock.pools.enums import HitPolicy, Layout, ObjectUnit, PoolKind, Sharding
from kvdock.pools.factories import logical, mamba, mha, mla
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec
from kvdock.routing.plan import plan_routes
from kvdock.routing.verdicts import IntegrityCheck, RouteRequirements, TransferMode

if TYPE_CHECKING:
    from kvdock.routing.verdicts import RouteOption


HEADS = mha("kv", heads=4, head_dim=8, anchor=True, **BASE)

DRAFT = mla(
    "draft", latent=28, rope=4, layers=[3], page_tokens=8, draft=True, required=False
)

SPLIT = attrs.evolve(HEADS, head_group=2)

STATE = mamba("state", conv=[(8, 3)], **BASE)

Case = tuple[PoolSpec, str, dict[str, Any], RouteRequirements]


def case(pool: PoolSpec, reason: str, /, *, needs: Any = {}, **said: Any) -> Case:  # noqa: B006 - read only
    """Return a pool, why it is refused, what is declared, and what is needed."""
    return pool, reason, said, RouteRequirements(**needs)


REFUSALS = {
    "kinds": case(KV, "does not take mla pools", kinds={PoolKind.MHA: EVERYTHING}),
    "hit_policies": case(
        STATE,
        "does not take hit policy trailing_pages",
        kind={"hit_policies": [HitPolicy.ALL_PAGES]},
    ),
    "layouts": case(
        KV, "does not take layout page_object", kind={"layouts": [Layout.PAGE_FIRST]}
    ),
    "shardings": case(
        attrs.evolve(KV, sharding=Sharding.DCP),
        "does not take sharding dcp",
        kind={"shardings": [Sharding.HEADS]},
    ),
    "split_heads": case(SPLIT, "has no split heads", kind={"split_heads": Support.NO}),
    "draft": case(
        DRAFT, "says nothing about draft", kind={"draft": Support.UNDECLARED}
    ),
    "max_object_bytes": case(
        KV, "objects of 100 bytes at most, this pool needs 1536", max_object_bytes=100
    ),
    "max_batch_keys": case(
        SPLIT, "batches of 1 keys at most, this pool needs 2", max_batch_keys=1
    ),
    "max_key_bytes": case(
        KV, "keys of 130 bytes at most, this pool needs 137", max_key_bytes=130
    ),
    "sharing": case(
        KV,
        "shares with host, not cluster",
        needs={"sharing": Scope.CLUSTER},
        sharing=Scope.HOST,
    ),
    "durability": case(
        KV,
        "outlives process, not host",
        needs={"durability": Scope.HOST},
        durability=Scope.PROCESS,
    ),
    "clear_reach": case(
        KV,
        "clears as far as cluster",
        needs={"clear_reach": Scope.NAMESPACE},
        clear_reach=Scope.CLUSTER,
    ),
    "integrity": case(
        KV,
        "says nothing about integrity",
        needs={"native_integrity": True},
        integrity=Support.UNDECLARED,
    ),
    "eviction": case(
        KV, "has no eviction", needs={"eviction": True}, eviction=Support.NO
    ),
    "fork_safe": case(KV, "says nothing about fork safe", needs={"fork_safe": True}),
    "peers": case(KV, "has no peers", needs={"peers": True}, peers=Support.NO),
}


@pytest.mark.parametrize("field", REFUSALS)
def test_a_manifest_that_lacks_what_is_needed_is_refused_with_the_reason(
    field: str,
) -> None:
    pool, reason, said, needs = REFUSALS[field]
    found = route(pool, backend("poor", **said), needs=needs)
    assert found.backend is None
    assert reason in found.reason


SAFE = RouteRequirements(staging=StagingPolicy.SAFE)

PATHS: dict[str, tuple[dict[str, Any], RouteRequirements, str]] = {
    "gated_get": (
        {"gated_get": Support.NO, "gated_put": Support.NATIVE},
        SAFE,
        "staged (other may touch the pages of an abandoned get), one object a page",
    ),
    "gated_put": (
        {"gated_get": Support.NATIVE},
        SAFE,
        "staged (other may touch the pages of an abandoned put), one object a page",
    ),
    "zero_copy": (
        {"zero_copy": Support.NO},
        RouteRequirements(),
        "staged, one object a page",
    ),
    "multi_buffer": (
        {"kind": {"multi_buffer": Support.NO}},
        RouteRequirements(),
        "staged (6 pieces a page), one object a page",
    ),
    "memory_registration": (
        {"memory_registration": Support.NATIVE},
        RouteRequirements(registrable=False),
        "staged (other cannot register this memory), one object a page",
    ),
    "host_allocator": (
        {"host_allocator": Support.NATIVE},
        RouteRequirements(),
        "staged (not in memory of other's allocator), one object a page",
    ),
}

SCATTERED = attrs.evolve(
    HEADS, layout=Layout.LAYER_FIRST, layers=(0, 1, 2), head_group=0
)


@pytest.mark.parametrize("field", PATHS)
def test_what_a_backend_cannot_reach_is_staged_with_the_reason(field: str) -> None:
    said, needs, reason = PATHS[field]
    pool = SCATTERED
    if field == "multi_buffer":
        # Not even a layer of a part is one piece: two head groups of 8 tokens.
        pool = attrs.evolve(
            HEADS, layout=Layout.PAGE_FIRST_DIRECT, head_group=2, layers=(0,)
        )
        reason = reason.replace("6", "16")
    found = route(pool, backend("other", **said), needs=needs)
    assert (found.backend, found.mode) == ("other", TransferMode.STAGED)
    assert found.reason == reason


def test_a_deployment_that_copies_every_page_reads_so_in_the_table() -> None:
    asked = RouteRequirements(staging=StagingPolicy.ALWAYS)
    found = route(SCATTERED, backend("other"), needs=asked)
    assert found.mode is TransferMode.STAGED
    assert found.reason == "staged (asked for), one object a page"
    mark = logical("mark", page_tokens=8)
    assert route(mark, backend("other"), needs=asked).mode is TransferMode.NONE


def test_a_backend_that_copies_pages_itself_is_not_called_zero_copy_alone() -> None:
    copying = backend("other", zero_copy=Support.EMULATED)
    found = route(SCATTERED, copying)
    assert found.mode is TransferMode.ZERO_COPY
    assert found.reason == (
        "zero copy (other itself copies pages once), one object a page"
    )
    loads = route(SCATTERED, copying, needs=RouteRequirements(staging="loads"))
    assert "(other itself copies pages once, loads are staged)" in loads.reason
    always = route(SCATTERED, copying, needs=RouteRequirements(staging="always"))
    assert always.reason == "staged (asked for), one object a page"


PROMISED: dict[str, Any] = {"gated_get": Support.NATIVE, "gated_put": Support.NATIVE}


def test_a_backend_that_leaves_abandoned_calls_memory_alone_is_not_staged() -> None:
    found = route(SCATTERED, backend("other", **PROMISED), needs=SAFE)
    assert found.mode is TransferMode.GATED
    assert found.reason == (
        "gated (other leaves the pages of abandoned calls alone), one object a page"
    )
    usual = route(SCATTERED, backend("other", **PROMISED))
    assert usual.reason == "zero copy, one object a page"
    silent = route(SCATTERED, backend("other"), needs=SAFE)
    assert silent.reason == (
        "staged (other may touch the pages of an abandoned get, other may touch the "
        "pages of an abandoned put), one object a page"
    )
    one_piece = backend("other", **PROMISED, kind={"multi_buffer": Support.NO})
    cut = attrs.evolve(HEADS, layout=Layout.LAYER_FIRST)
    found = route(cut, one_piece, needs=SAFE)
    assert (found.mode, found.pool.object_unit) == (
        TransferMode.GATED,
        ObjectUnit.LAYER,
    )


def test_a_backend_that_is_not_staged_comes_first_for_such_an_engine() -> None:
    found = plan(KV, by=[backend("a"), backend("b", **PROMISED)], needs=SAFE)
    assert found.anchor.backend == "b"


def test_a_route_says_who_keeps_the_times_of_pages() -> None:
    def graded(retention: Support, check: Integrity) -> RouteOption:
        one = backend("one", retention=retention, integrity=Support.NO)
        found = route(KV, one, needs=RouteRequirements(integrity=check)).nearest
        assert found is not None
        return found

    native = graded(Support.NATIVE, Integrity.OFF)
    assert native.retention is Support.NATIVE
    assert "expire" not in native.reason
    for grade in (Support.EMULATED, Support.NO, Support.UNDECLARED):
        assert graded(grade, Integrity.ALWAYS).retention is Support.EMULATED
        without = graded(grade, Integrity.OFF)
        assert without.retention is Support.NO
        assert "pages that are to expire are not stored" in without.reason


@pytest.mark.parametrize("grade", Support)
def test_a_route_says_where_quotas_of_tenants_are_not_kept(grade: Support) -> None:
    def reason(*, quotas: bool) -> str:
        one = backend("one", tenant_quotas=grade)
        return route(KV, one, needs=RouteRequirements(tenant_quotas=quotas)).reason

    silent = reason(quotas=False)
    said = "" if grade else "; keeps no quotas of tenants"
    assert reason(quotas=True) == silent + said


@pytest.mark.parametrize("asked", Integrity)
def test_sealed_pages_have_no_trailer_whoever_verifies_others(asked: Integrity) -> None:
    one = backend("one", sealed=True, integrity=Support.NO)
    found = route(KV, one, needs=RouteRequirements(integrity=asked))
    assert found.reason == (
        "zero copy, one object a page; sealed; pages that are to expire are not stored"
    )


def test_every_field_of_a_manifest_takes_part_in_routing() -> None:
    fields = {field.name for field in attrs.fields(Manifest)}
    fields |= {field.name for field in attrs.fields(KindSupport)}
    not_routed = {"name", "api", "summary", "settings"}
    # What a store can do besides moving pages.
    not_routed |= {"touch", "removed", "capacity", "retention", "tenant_quotas"}
    # How rows are sent once a pool is routed.
    not_routed |= {"max_send_rows", "landing_run_bytes", "send_drain_s"}
    assert fields - not_routed == set(REFUSALS) | set(PATHS) | {"sealed"}


def test_memory_still_to_be_allocated_comes_from_the_backend() -> None:
    bringer = backend("bringer", host_allocator=Support.NATIVE)
    later = route(KV, bringer, needs=RouteRequirements(allocator=None))
    assert (later.mode, later.allocate) == (TransferMode.ZERO_COPY, True)
    given = route(KV, bringer, needs=RouteRequirements(allocator="bringer"))
    assert (given.mode, given.allocate) == (TransferMode.ZERO_COPY, False)
    plain = route(KV, backend("plain"), needs=RouteRequirements(allocator=None))
    assert not plain.allocate


@pytest.mark.parametrize("own", [Support.NATIVE, Support.NO])
@pytest.mark.parametrize("allocator", ["", "bringer", None])
def test_whether_any_memory_will_do_may_be_the_backends_own_word(
    own: Support, allocator: str | None
) -> None:
    """It hangs on settings, which a manifest does not know."""
    bringer = backend("bringer", host_allocator=Support.NATIVE)

    def judge(
        name: str, capability: Capability, pool: PoolSpec, shard: Shard
    ) -> Verdict | None:
        del name, pool, shard
        if capability is Capability.HOST_ALLOCATOR:
            return Verdict(own, "its own word")
        return None

    found = plan_routes(
        [KV],
        Shard(),
        {"bringer": bringer},
        needs=RouteRequirements(allocator=allocator),
        judge=judge,
    ).anchor
    copied = not own and allocator == ""
    assert (found.mode is TransferMode.STAGED) == copied
    assert ("its own word" in found.reason) == copied
    assert found.allocate == (not own and allocator is None)


ONE_PIECE = {"multi_buffer": Support.NO}


@pytest.mark.parametrize(
    ("layout", "head_group", "path", "unit"),
    [
        (Layout.PAGE_OBJECT, 0, TransferMode.ZERO_COPY, ObjectUnit.PAGE),
        (Layout.PAGE_FIRST, 0, TransferMode.ZERO_COPY, ObjectUnit.PART),
        (Layout.PAGE_FIRST_DIRECT, 0, TransferMode.ZERO_COPY, ObjectUnit.PART),
        (Layout.LAYER_FIRST, 0, TransferMode.ZERO_COPY, ObjectUnit.LAYER),
        (Layout.PAGE_HEAD, 2, TransferMode.ZERO_COPY, ObjectUnit.PART),
        (Layout.PAGE_FIRST, 2, TransferMode.STAGED, ObjectUnit.PAGE),
        (Layout.PAGE_OBJECT, 2, TransferMode.STAGED, ObjectUnit.PAGE),
    ],
)
def test_a_backend_of_one_piece_gets_the_largest_unit_that_is_one(
    layout: Layout, head_group: int, path: TransferMode, unit: ObjectUnit
) -> None:
    pool = attrs.evolve(HEADS, layout=layout, head_group=head_group)
    found = route(pool, backend("poor", kind=ONE_PIECE))
    assert (found.mode, found.pool.object_unit) == (path, unit)


def test_smaller_units_must_still_fit_a_batch() -> None:
    pool = attrs.evolve(HEADS, layout=Layout.LAYER_FIRST)
    roomy = route(pool, backend("poor", kind=ONE_PIECE, max_batch_keys=6))
    tight = route(pool, backend("poor", kind=ONE_PIECE, max_batch_keys=5))
    assert (roomy.mode, tight.mode) == (TransferMode.ZERO_COPY, TransferMode.STAGED)


def test_emulated_counts_and_is_said() -> None:
    found = route(DRAFT, backend("slow", kind={"draft": Support.EMULATED}))
    assert found.reason == "zero copy, one object a page; draft is emulated"


def test_pools_of_one_prefix_may_live_in_different_backends() -> None:
    no_draft = backend("fast", kind={"draft": Support.NO})
    found = plan(KV, DRAFT, by=[no_draft, backend("slow")], preference=["fast", "slow"])
    assert {r.pool.name: r.backend for r in found.routes} == {
        "kv": "fast",
        "draft": "slow",
    }
    assert "fast     not chosen: " in found.explain()


def test_preference_decides_and_only_who_is_named_is_asked() -> None:
    by = [backend("a"), backend("b"), backend("c")]
    found = plan(KV, by=by, preference=["c", "b"])
    assert found.anchor.backend == "c"
    assert [option.backend for option in found.anchor.options] == ["c", "b"]


def test_without_a_preference_zero_copy_wins_and_then_the_name() -> None:
    staged = backend("a", zero_copy=Support.NO)
    assert plan(KV, by=[staged, backend("c"), backend("b")]).anchor.backend == "b"
    assert plan(
        KV, by=[staged, backend("c")], preference=["a", "c"]
    ).anchor.backend == ("a")


def test_a_misspelled_backend_or_pool_is_refused_with_the_nearest() -> None:
    with pytest.raises(PluginError, match="Did you mean 'best'"):
        plan(KV, preference=["bets"])
    with pytest.raises(PluginError, match="Did you mean 'draft'"):
        plan(KV, DRAFT, overrides={"darft": "best"})


def test_an_optional_pool_is_refused_with_a_reason_unless_strict() -> None:
    by = [backend("a", kind={"draft": Support.NO})]
    lenient = plan(KV, DRAFT, by=by)
    (refused,) = lenient.refused
    assert (refused.pool.name, refused.mode) == ("draft", TransferMode.NONE)
    assert refused.reason == "a: a has no draft for mla pools"
    with pytest.raises(NoRoute, match=r"no backend takes draft\n(.|\n)*has no draft"):
        plan(KV, DRAFT, by=by, strict=True)


def test_a_required_pool_without_a_route_is_an_error_with_the_whole_table() -> None:
    by = [backend("a", kinds={PoolKind.MHA: EVERYTHING})]
    with pytest.raises(NoRoute, match=r"POOL +KIND(.|\n)*a does not take mla pools"):
        plan(KV, by=by)
    with pytest.raises(NoRoute, match="no backend is loaded"):
        plan_routes([KV], Shard(), {})


def test_pools_that_do_not_belong_together_have_no_plan() -> None:
    with pytest.raises(PoolError, match="one anchor"):
        plan(DRAFT)


def test_a_stage_without_a_pools_layers_keeps_it_in_the_plan_as_absent() -> None:
    shard = Shard(pp_rank=0, pp_size=2, layers=(0, 3))
    found = plan(KV, attrs.evolve(DRAFT, required=True), shard=shard, strict=True)
    (absent,) = found.absent
    assert absent.pool.name == "draft"
    assert found.refused == ()
    assert "none of its layers" in found.explain()


def test_a_backends_own_word_comes_before_its_manifest() -> None:
    asked: list[Capability] = []

    def judge(
        name: str, capability: Capability, pool: PoolSpec, shard: Shard
    ) -> Verdict | None:
        assert (name, pool.name, shard) == ("best", "kv", Shard())
        asked.append(capability)
        if capability is Capability.LAYOUT:
            return Verdict(Support.NO, "not today")
        return None

    with pytest.raises(NoRoute, match="not today"):
        plan(KV, judge=judge)
    assert {Capability.STORE, Capability.KEY_SIZE, Capability.ZERO_COPY} <= set(asked)


@pytest.mark.parametrize(
    ("limit", "capability"),
    [
        ({"max_object_bytes": 8}, Capability.OBJECT_SIZE),
        ({"max_batch_keys": 1}, Capability.BATCH_SIZE),
        ({"max_key_bytes": 8}, Capability.KEY_SIZE),
    ],
)
def test_a_backend_may_tighten_its_limits_and_never_loosen_them(
    limit: dict[str, Any], capability: Capability
) -> None:
    pool = attrs.evolve(HEADS, head_group=1)
    answer = Verdict(Support.NATIVE, "any size will do")

    def judge(*asked: object) -> Verdict | None:
        return answer if asked[1] is capability else None

    tight, wide = backend("tight", **limit), backend("wide")
    with pytest.raises(NoRoute, match="at most, this pool needs"):
        plan(pool, by=[tight], judge=judge)
    assert plan(pool, by=[wide], judge=judge).anchor.backend == "wide"
    answer = Verdict(Support.NO, "less than declared today")
    with pytest.raises(NoRoute, match="less than declared today"):
        plan(pool, by=[wide], judge=judge)


def test_a_plan_is_the_same_for_the_same_question() -> None:
    by = [backend("b"), backend("a")]
    assert plan(DRAFT, KV, by=by) == plan(DRAFT, KV, by=by[::-1])
    assert [r.pool.name for r in plan(DRAFT, KV, by=by).routes] == ["kv", "draft"]


def test_the_table_shows_winner_and_reasons() -> None:
    by = [backend("a"), backend("b", zero_copy=Support.NO)]
    assert plan(KV, DRAFT, by=by).explain() == (
        "POOL   KIND       NEED      PAGE     BACKEND  WHY\n"
        "kv     mla        anchor    1.5 KiB  a        zero copy, one object a page\n"
        "                                     b        not chosen: works as well: "
        "staged, one object a page\n"
        "draft  mla draft  optional  512 B    a        zero copy, one object a page\n"
        "                                     b        not chosen: works as well: "
        "staged, one object a page"
    )


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
