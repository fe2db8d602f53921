"""What is declared and what a run could try of it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvdock.errors import SettingsError
from kvdock.plugin.manifest import API_VERSION, KindSupport, Manifest, Scope, Support
from kvdock.pools.enums import PoolKind
from kvdock.testing.claims import FAULTS, Claim, Proof, claims_of, judged
from kvdock.testing.contract import BackendContract
from kvdock.testing.contract.suite import proofs
from kvdock.testing.scale import Scale
from kvdock.testing.subprocess import FinishedRun

ALL = KindSupport(
    split_heads=Support.NATIVE, draft=Support.EMULATED, multi_buffer=Support.NATIVE
)


def manifest(**declared: Any) -> Manifest:
    given = {"kinds": {PoolKind.MHA: KindSupport()}} | declared
    return Manifest(name="probe", api=API_VERSION, summary="-", **given)


def ended(name: str, how: str, case: str = "", why: str = "") -> FinishedRun:
    return FinishedRun("TestContract", name, case, how, why, "", 0.1)


@pytest.mark.parametrize("capability", ["zero_copy", "integrity", "eviction"])
@pytest.mark.parametrize("grade", [Support.EMULATED, Support.NATIVE])
def test_a_declared_grade_is_a_claim(capability: str, grade: Support) -> None:
    assert claims_of(manifest(**{capability: grade})) == (
        Claim(capability, str(grade)),
    )


def test_a_scope_is_a_claim_as_far_as_it_reaches() -> None:
    found = claims_of(manifest(durability=Scope.HOST, clear_reach=Scope.NAMESPACE))
    assert found == (
        Claim("durability", "host"),
        Claim("clear_reach", "namespace"),
        Claim("durability of hosts", "host", beyond=True),
    )


def test_what_kinds_declare_is_a_claim_for_each_of_them() -> None:
    kinds = {PoolKind.MHA: ALL, PoolKind.MLA: ALL, PoolKind.LOGICAL: ALL}
    assert [str(claim) for claim in claims_of(manifest(kinds=kinds))] == [
        "split_heads of mha pools",
        "draft of mha pools",
        "draft of mla pools",
        "multi_buffer of mha pools",
        "multi_buffer of mla pools",
    ]


def test_a_claim_whose_tests_were_all_skipped_is_not_proven() -> None:
    claims = (Claim("integrity", "native"), Claim("eviction", "native"))
    runs = [
        ended("test_damage", "skipped", "zeroed", "no oracle"),
        ended("test_damage", "skipped", "flipped", "no oracle"),
        ended("test_full", "passed"),
    ]
    proves = {"test_damage": "integrity", "test_full": "eviction"}
    lacking, tried = judged(claims, proves, runs)
    assert (lacking.claim, lacking.reasons) == (claims[0], ("no oracle",))
    assert (lacking.proof, tried.proof) == (Proof.NOT_PROVEN, Proof.PROVEN)
    assert lacking.lacking


@pytest.mark.parametrize(
    ("how", "proof"), [("passed", Proof.IN_PART), ("failed", Proof.FAILED)]
)
def test_one_test_that_ran_is_a_trial_whatever_came_of_it(
    how: str, proof: Proof
) -> None:
    runs = [ended("test_damage", "skipped"), ended("test_damage", how, "zeroed")]
    claims, proves = [Claim("integrity", "native")], {"test_damage": "integrity"}
    (word,) = judged(claims, proves, runs)
    assert word.proof is proof
    assert not word.lacking


def test_a_word_is_proven_in_part_where_a_test_of_it_could_not_run() -> None:
    runs = [
        ended("test_reads", "passed", "small"),
        ended("test_reads", "skipped", "large", "too large for it"),
        ended("test_late", "skipped", "small", "its I/O cannot be held back"),
    ]
    proves = dict.fromkeys(("test_reads", "test_late"), "gated_get")
    declined = {("test_reads", "large")}
    (word,) = judged([Claim("gated_get", "native")], proves, runs, declined)
    assert (word.proof, word.reasons) == (
        Proof.IN_PART,
        ("its I/O cannot be held back",),
    )
    assert not word.lacking
    # What the manifest itself leaves out is not missing.
    (word,) = judged([Claim("gated_get", "native")], proves, runs[:2], declined)
    assert (word.proof, word.reasons) == (Proof.PROVEN, ())


def test_what_is_about_more_than_a_host_is_not_provable_here() -> None:
    claims = [Claim("durability of hosts", "cluster", beyond=True), Claim("frozen", "")]
    runs = [ended("test_away", "skipped", why="the oracle cannot freeze the store")]
    beyond, fault = judged(claims, {"test_away": "frozen"}, runs)
    assert beyond.proof is Proof.NOT_HERE
    assert fault.proof is Proof.NOT_PROVEN
    assert fault.reasons == ("the oracle cannot freeze the store",)
    assert not any(word.lacking for word in (beyond, fault))


def test_a_trial_of_one_kind_proves_nothing_of_another() -> None:
    claims = [Claim("draft", "native", kind) for kind in (PoolKind.MHA, PoolKind.MLA)]
    runs = [ended("test_draft", "passed", "mha-native")]
    _, lacking = judged(claims, {"test_draft": "draft"}, runs)
    assert str(lacking.claim) == "draft of mla pools"
    assert lacking.reasons == ("no test tries it",)


def test_every_capability_that_can_be_claimed_has_a_test_that_tries_it() -> None:
    # All that are declared and not a list: peers was forgotten in one.
    fields = attrs.fields(Manifest)
    grades = [one.name for one in fields if isinstance(one.default, Support)]
    assert "peers" in grades
    declared = manifest(
        kinds={PoolKind.MHA: ALL},
        durability=Scope.HOST,
        sharing=Scope.HOST,
        clear_reach=Scope.NAMESPACE,
        max_object_bytes=1,
        max_batch_keys=1,
        max_key_bytes=1,
        **dict.fromkeys(grades, Support.NATIVE),
    )
    tried = set(proofs(BackendContract).values())
    assert {claim.capability for claim in claims_of(declared)} | {*FAULTS} == tried


def test_a_slow_store_gets_more_time_and_fewer_repetitions() -> None:
    scale = Scale(10)
    assert scale.seconds(3.0) == 30.0
    assert scale.count(40) == 4
    assert scale.count(40, least=12) == 12
    assert scale.count(3, least=12) == 3


@pytest.mark.parametrize("factor", [0.0, -1.0, 0.5, 1e9, float("nan")])
def test_a_scale_that_makes_no_sense_is_refused(factor: float) -> None:
    with pytest.raises(SettingsError, match="times as slow"):
        Scale(factor)
