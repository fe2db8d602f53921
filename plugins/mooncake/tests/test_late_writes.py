"""No late byte of a frozen owner reaches a page that has another use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]

TRIAL = Path(__file__).with_name("late_writes.py")
FROZEN_S = 75
LENT = 64 << 20
SHAPES = [(24, 1 << 20), (512, 64 << 10)]
ALL = "TESTS_OF_KVDOCK_LATE_WRITES"
every_form = pytest.mark.skipif(
    ALL not in os.environ, reason=f"95 s each: make trial-mooncake-late sets {ALL}"
)


def trial(pages: int, page_bytes: int, limits: str, lent: int = 0) -> Any:
    command = [sys.executable, str(TRIAL)]
    command += map(str, (pages, page_bytes, limits, lent, FROZEN_S))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    sys.stdout.write(f"\n{pages} x {page_bytes} B, {limits}, lends {lent} B: {found}\n")
    return found


@pytest.mark.long
def test_leases_alone_keep_late_bytes_out_of_pages_in_use(library: Any) -> None:
    """The library gives the read up after 60 s; the process lends memory."""
    del library
    found = trial(24, 1 << 20, "library", LENT)
    assert found["loaded"] == 0
    assert found["leased"] == 24, "nothing but the end of its store frees them"
    assert found["closed"], "it ends the store, so no byte may land"
    assert (found["given"], found["changed"]) == (24, 0)


@every_form
@pytest.mark.parametrize(("pages", "page_bytes"), SHAPES)
def test_leases_alone_do_so_where_the_store_is_replaced(
    pages: int, page_bytes: int, library: Any
) -> None:
    del library
    found = trial(pages, page_bytes, "library")
    assert (found["given"], found["changed"]) == (pages, 0)
    assert found["free_after_s"] > 59


@every_form
@pytest.mark.parametrize(("pages", "page_bytes"), SHAPES)
@pytest.mark.parametrize("lent", [0, LENT])
def test_with_the_plugins_limits_every_call_ends_before_the_library_gives_it_up(
    pages: int, page_bytes: int, lent: int, library: Any
) -> None:
    del library
    found = trial(pages, page_bytes, "plugin", lent)
    assert found["leased"] == 0
    assert found["closed"]
    assert found["free_after_s"] < 50
    assert (found["given"], found["changed"]) == (pages, 0)


@every_form
def test_the_trial_sees_late_bytes_where_nothing_protects_the_pages(
    library: Any,
) -> None:
    del library
    assert trial(24, 1 << 20, "none")["changed"] > 0
