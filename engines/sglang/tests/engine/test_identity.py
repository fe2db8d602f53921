"""(13) A page is right or it is a miss, whatever differs between two engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import identity_cases as cases
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    import lives

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> lives.World:
    """Return a world in which an engine has stored its prompts."""
    return cases.world_with(tmp_path_factory.mktemp("identity"))


@pytest.mark.parametrize("case", cases.SAMPLE, ids=lambda one: one.name)
def test_a_page_is_right_or_it_is_a_miss(
    case: cases.Case, stored: lives.World, tmp_path: Path
) -> None:
    world = stored.again(tmp_path)
    found = cases.ask(world, case)
    assert found["same"]
    assert found["found"] == case.found
