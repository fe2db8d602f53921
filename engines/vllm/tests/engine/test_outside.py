"""vLLM's own tests of a tier behind host memory, from the archive of its release."""

from __future__ import annotations

from pathlib import Path

from outside_suites import Archive, run

ARCHIVE = Archive(
    project="vllm",
    version="0.32.0",
    sha256="d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    members=("tests/v1/kv_offload/tiering/test_fs_tier",),
)
PASSED = 34
THEIR_PARTS = "it looks at a part of vLLM's own tier, or replaces one"
BETTER = "pages behind a damaged one are loaded all the same"
LACKING = {
    "test_invalid_locality_raises_at_construction": "kvdock has words of its own",
    "test_shutdown_discards_pending_tasks": THEIR_PARTS,
    "test_batched_load_first_block_fails_marks_whole_batch": BETTER,
    "test_transient_load_failure_leaves_file": "a page has no file of its own",
    "test_store_event_uses_configured_locality[None-None]": (
        "kvdock tells the locality of its placements"
    ),
    "test_mixed_job_results_emit_event_only_for_successful_job": THEIR_PARTS,
    "test_partially_failed_store_emits_no_event": THEIR_PARTS,
}
PLUGIN = Path(__file__).parents[1] / "outside" / "vllm_tier_shim.py"


def test_vllms_own_tests_of_its_file_tier_pass(tmp_path: Path) -> None:
    tests = ARCHIVE.unpacked(tmp_path) / "tests" / "v1" / "kv_offload" / "tiering"
    passed, said = run(tests / "test_fs_tier.py", PLUGIN, LACKING, {})
    assert passed == PASSED, said
