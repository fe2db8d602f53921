"""What `@pytest.mark.repeats` names: of the kit's tests, those that prove it again."""

from __future__ import annotations

OF_RANKS = ("RankTests", "test_keys_are_the_same_in_every_process")
"""Keys and slices are the core's: the kit's own backend in memory proves them."""

OF_SEGMENTS = (
    *OF_RANKS,
    "RetentionTests",
    "WriteFaultTests",
    "test_a_clear_beside_other_calls_breaks_none_of_them",
    "test_an_object_of_the_largest_size_is_kept",
    "test_pages_outlive_the_process_that_stored_them",
    "test_processes_that_store_the_same_pages_do_not_tear_them",
    "test_two_processes_find_each_others_pages",
)
"""The store is the file backend's, with another way of moving bytes."""
