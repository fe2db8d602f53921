"""Page hashes are chained, and only full pages have one."""

from __future__ import annotations

import pytest

from kvdock_transformers.prefix import page_hashes


def test_every_full_page_has_a_hash_and_the_rest_has_none() -> None:
    assert len(page_hashes(range(35), 16)) == 2
    assert page_hashes(range(15), 16) == []


def test_a_hash_is_a_sha256_in_hex() -> None:
    (digest,) = page_hashes(range(16), 16)
    assert len(bytes.fromhex(digest)) == 32


def test_prompts_share_hashes_exactly_as_far_as_they_agree() -> None:
    one = [*range(64)]
    other = [*range(40), 999, *range(41, 64)]
    pairs = zip(page_hashes(one, 16), page_hashes(other, 16), strict=True)
    assert [a == b for a, b in pairs] == [True, True, False, False]


def test_the_same_page_after_another_parent_is_another_page() -> None:
    page = [*range(16)]
    assert page_hashes([1] * 16 + page, 16)[1] != page_hashes([2] * 16 + page, 16)[1]


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="page_tokens"):
        page_hashes([1, 2], 0)
