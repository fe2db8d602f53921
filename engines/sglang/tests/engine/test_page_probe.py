"""Every pool keeps each value where the tested releases keep it."""

from __future__ import annotations

import json
from pathlib import Path

import page_probe
import pytest
import zoo

PROBED = Path(__file__).with_name("page_probe.json")
FOUND = json.loads(PROBED.read_text())


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_known_values_lie_where_the_tested_releases_keep_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_probe.stand_in_for_kernels(monkeypatch)
    assert page_probe.digest_of(family) == FOUND[family]
