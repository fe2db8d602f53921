"""The oracle that the backend brings for `kvdock check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdock.plugin import discovery
from kvdock.plugin.discovery import ORACLES
from kvdock.testing import Oracle
from kvdock_file.settings import FileSettings


def test_a_check_of_the_installed_backend_can_damage_what_it_stored(
    tmp_path: Path,
) -> None:
    (found,) = [
        one for one in discovery.list_entry_points(ORACLES) if one.name == "file"
    ]
    make: Any = discovery.import_entry_point(found)
    oracle = make(FileSettings(root=tmp_path))
    assert isinstance(oracle, Oracle)
    assert oracle.peek(f"{'0' * 64}/{'1' * 64}.kv") is None
