"""What `@pytest.mark.repeats` names: of the kit's tests, those that prove it again."""

from __future__ import annotations

OF_RANKS = ("RankTests", "test_keys_are_the_same_in_every_process")
"""Keys and slices are the core's: the kit's own backend in memory proves them."""

_OF_AN_INDEX = (
    "ReportTests",
    "test_a_clear_forgets_thousands_of_pages",
    "test_a_missing_key_does_not_shift_the_others",
    "test_exists_answers_each_key_for_itself",
    "test_pages_stay_where_nothing_is_evicted",
    "test_sparse_pages_allow_what_the_hit_policy_says",
)

OF_SEGMENTS = (
    *OF_RANKS,
    *_OF_AN_INDEX,
    "KeyTests",
    "RetentionTests",
    "WriteFaultTests",
    "test_a_clear_beside_other_calls_breaks_none_of_them",
    "test_an_expiry_stays_where_a_call_says_no_time",
    "test_an_object_of_the_largest_size_is_kept",
    "test_pages_of_the_maximal_age_are_not_served",
    "test_pages_outlive_the_process_that_stored_them",
    "test_processes_that_store_the_same_pages_do_not_tear_them",
    "test_two_processes_find_each_others_pages",
)
"""The store is the file backend's, with another way of moving bytes."""

OF_SETTINGS = (
    *OF_RANKS,
    *_OF_AN_INDEX,
    "DeclaredTests",
    "ExpiryTests",
    "KeyTests",
    "NeighbourTests",
    "RetentionTests",
    "test_more_pages_are_deleted_than_one_batch_takes",
)
"""Another class of the same backend proves them: these settings move bytes otherwise.

What stays is about bytes: pages, races, damage, limits, late calls, sequences of calls.
"""

OF_REFERENCES = (
    *OF_RANKS,
    *_OF_AN_INDEX,
    "DamageTests",
    "ExpiryTests",
    "KeyTests",
    "NeighbourTests",
    "RaceTests",
    "RetentionTests",
    "WriteFaultTests",
    "test_a_declared_pool_finds_a_route",
    "test_draft_pools_are_kept_as_declared",
    "test_more_pages_are_deleted_than_one_batch_takes",
    "test_objects_of_many_pieces_move_as_declared",
    "test_what_a_deployment_needs_is_met_or_refused_with_a_reason",
)
"""The kit passes on memory and on a folder, and on what is right in the same way."""

OF_FOLDERS = ("WriteFaultTests", "test_a_clear_beside_other_calls_breaks_none_of_them")
"""Many calls: a folder without an index walks over all of its files for each."""
