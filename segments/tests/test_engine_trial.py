"""An engine is tried with a page in a file of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvdock_segments import IORequest, IOResult, PosixIOEngine, try_engine


class Forgetful(PosixIOEngine):
    """Reads nothing, and says that it did."""

    def move(self, request: IORequest) -> IOResult:
        done = super().move(request)
        if not request.write:
            pages[1] = 0
        return done


pages = np.zeros((2, 4096), np.uint8)


@pytest.mark.parametrize(("kind", "same"), [(PosixIOEngine, True), (Forgetful, False)])
def test_a_page_comes_back_or_not_and_leaves_nothing(
    kind: type[PosixIOEngine], *, same: bool, tmp_path: Path
) -> None:
    engine = kind(1)
    try:
        assert try_engine(engine, tmp_path / "not" / "there", pages, 30.0) is same
    finally:
        engine.close()
    assert not list(tmp_path.iterdir())


def test_a_step_that_fails_is_the_systems_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = PosixIOEngine(1)
    try:
        with pytest.raises(NotADirectoryError):
            try_engine(engine, tmp_path / "file", pages, 30.0)
    finally:
        engine.close()
