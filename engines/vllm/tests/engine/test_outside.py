"""vLLM's own tests of offloading, from the archive of its release."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from outside_suites import Archive, run

UNIT = "tests/v1/kv_connector/unit"
ARCHIVE = Archive(
    project="vllm",
    version="0.32.0",
    sha256="d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    members=(
        "tests/__init__.py",
        "tests/v1/__init__.py",
        "tests/v1/kv_connector/__init__.py",
        f"{UNIT}/__init__.py",
        f"{UNIT}/utils.py",
        f"{UNIT}/offloading_connector",
        "tests/v1/kv_offload/tiering/test_",
    ),
)
THEIR_PARTS = "it looks at a part of vLLM's own tier, or replaces one"
BETTER = "pages behind a damaged one are loaded all the same"
MEMORY = "it expects a tier in memory, and kvdock's is storage"
SCRIPTED = "it gives the manager's answers itself, and nothing is stored as they say"
NEW_PAGES = "kvdock's tier asks for new pages alone, not for all of a request"


@attrs.frozen(kw_only=True)
class Suite:
    """A file of tests.

    Args:
        shim: The plugin that puts kvdock's class in the place of theirs.
        passed: How many tests pass.
        lacking: Tests that do not apply, with the reason for each.
        marks: Of the suite itself.
    """

    file: str
    shim: str
    passed: int
    lacking: Mapping[str, str]
    marks: tuple[pytest.MarkDecorator, ...] = ()


SUITES = (
    Suite(
        file="tests/v1/kv_offload/tiering/test_fs_tier.py",
        shim="vllm_tier_shim",
        passed=34,
        lacking={
            "test_invalid_locality_raises_at_construction": "kvdock has words of its "
            "own",
            "test_shutdown_discards_pending_tasks": THEIR_PARTS,
            "test_batched_load_first_block_fails_marks_whole_batch": BETTER,
            "test_transient_load_failure_leaves_file": "a page has no file of its own",
            "test_store_event_uses_configured_locality[None-None]": (
                "kvdock tells the locality of its placements"
            ),
            "test_mixed_job_results_emit_event_only_for_successful_job": THEIR_PARTS,
            "test_partially_failed_store_emits_no_event": THEIR_PARTS,
        },
    ),
    Suite(
        file="tests/v1/kv_offload/tiering/test_tiering_offloading.py",
        shim="vllm_tiering_shim",
        passed=60,
        lacking={
            f"TestTieringOffloadingManager::test_tier_filter_{which}": MEMORY
            for which in (
                "skips_filtered_secondary[non_matching_medium]",
                "allows_matching_secondary[explicit_cpu]",
            )
        },
    ),
    Suite(
        file="tests/v1/kv_offload/tiering/test_factory.py",
        shim="vllm_tiering_shim",
        passed=9,
        marks=(pytest.mark.long,),  # vLLM starts for few tests
        lacking={
            "test_pre_registered_tiers_can_be_imported": MEMORY,
            "test_register_new_tier_type": MEMORY,
        },
    ),
    Suite(
        file=f"{UNIT}/offloading_connector/test_scheduler.py",
        shim="vllm_runner_shim",
        passed=73,
        lacking={
            "test_external_cache_hit_sources_reconcile_different": SCRIPTED,
            "test_scheduler_reports_lookup_async_delay_on_resolve": SCRIPTED,
            "test_max_offload_tokens_zero_does_not_record_pending": SCRIPTED,
            "test_abort_before_hit_uses_placeholder_then_later": SCRIPTED,
            "test_promotion_hit_precedes_stored_event_translation": SCRIPTED,
            "test_fence_at_update_state_after_alloc": SCRIPTED,
            "test_request_finished_with_pending_stores_populates": SCRIPTED,
            "test_multiple_in_flight_stores_all_flushed_by_fence": SCRIPTED,
            "test_request_finished_mixed_full_attn_and_sliding": SCRIPTED,
            "TestEagle::test_full_attn_lookup_pops_one_block": SCRIPTED,
            "TestEagle::test_sw_lookup_inflates_query_max": SCRIPTED,
            "TestEagle::test_sw_lookup_requires_extra_window_block": SCRIPTED,
            "TestEagle::test_sw_lookup_w_plus_one_hits_returns": SCRIPTED,
            "TestEagle::test_eagle_verified_prevents_double_pop": SCRIPTED,
            "TestEagle::test_non_eagle_tighten_clears_eagle_verified": SCRIPTED,
            "test_swa_load_does_not_wait_for_unusable_pending": "it replaces the "
            "manager",
            "test_offloading_connector": "host memory takes no page twice",
            "test_request_level_policy_stores_all_blocks": NEW_PAGES,
            **{
                f"test_request_level_supply_covers_consumer_demand[{which}]": NEW_PAGES
                for which in (
                    "False-gpu_warm",
                    "False-primary_warm",
                    "True-primary_warm",
                )
            },
            "TestSharedGroupMTPOffload": "its draft model is a mock, and kvdock reads "
            "the files of one",
        },
    ),
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the archive."""
    return ARCHIVE.unpacked(tmp_path_factory.mktemp("archive"))


@pytest.mark.parametrize(
    "suite",
    [pytest.param(one, id=Path(one.file).stem, marks=one.marks) for one in SUITES],
)
def test_vllms_own_tests_of_offloading_pass(suite: Suite, archive: Path) -> None:
    shim = Path(__file__).parents[1] / "outside" / f"{suite.shim}.py"
    passed, said = run(archive / suite.file, shim, suite.lacking, {})
    assert passed == suite.passed, said
