"""A small sample of what `make test-identity` holds against an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import catalogue
import pytest
from variations import Seen, try_all

if TYPE_CHECKING:
    from vllm_lives import Lives

SAMPLE = [one for one in catalogue.ALL if one.quick]


@pytest.fixture(scope="module")
def seen(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return try_all(lives, tmp_path_factory.mktemp("variations"), SAMPLE)


@pytest.mark.parametrize("name", [one.name for one in SAMPLE])
def test_pages_are_shared_where_they_are_the_same_and_nowhere_else(
    name: str, seen: dict[str, Seen]
) -> None:
    (one,) = [one for one in SAMPLE if one.name == name]
    found = seen[name]
    assert not found.error
    assert found.same, "the answer is not the engine's own cold one"
    assert found.verdict() == one.expect
