"""A healthy cluster, as the core's own trials see it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdock_mooncake.server import start_master, start_owner

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.mooncake


@pytest.fixture
def plain(library: Any) -> Iterator[str]:
    """A master as it comes: leases of 10 s."""
    del library
    master = start_master()
    owner = start_owner(master.address, 64 << 20)
    yield master.address
    owner.stop()
    master.stop()


@pytest.mark.slow
def test_a_healthy_cluster_with_all_defaults_passes_its_examination(
    plain: str,
) -> None:
    command = Path(sys.executable).with_name("kvdock")
    if not command.exists():
        pytest.skip("kvdock-cli is not installed")
    began = time.monotonic()
    done = subprocess.run(
        [str(command), "doctor", "mooncake", "--set", f"master={plain}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    # Its transfer engine listens on all interfaces, which is worth a warning.
    assert "no problem, 1 warning found" in done.stdout
    assert "self test: a page of each kind" in done.stdout
    # The library's own lines aside.
    assert "mooncake:" not in done.stderr
    assert time.monotonic() - began < 10
