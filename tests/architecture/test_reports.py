"""Backends that verify pages themselves carry a report that fits their files."""

from __future__ import annotations

import pytest

from kvdock.dock import Dock
from kvdock.plugin.manifest import Support

BACKENDS = {
    name: one
    for name, one in Dock.load().backends.items()
    if one.manifest.integrity is Support.NATIVE
}


def test_there_are_backends_that_verify_pages_themselves() -> None:
    assert {"file", "nixl", "hf3fs"} <= {*BACKENDS}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_carries_a_report_of_its_very_files(name: str) -> None:
    assert not BACKENDS[name].unproven, f"{BACKENDS[name].unproven}: run `make reports`"
