"""How many bytes are copied and hashed for each byte of a page, on each way."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from benchmark_scripts import load_script


@pytest.fixture
def script() -> ModuleType:
    return load_script("byte_costs")


def test_a_byte_is_copied_and_hashed_no_more_often_than_its_way_needs(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--quick"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for way in ("plain", "direct", "background"):
        for operation in ("put", "get"):
            assert figures[f"{way}_{operation}_copied"] == 0
            assert 1 <= figures[f"{way}_{operation}_hashed"] < 1.01
    assert 1 <= figures["safe_put_copied"] < 1.01
    assert 2 <= figures["trailers_get_hashed"] < 2.01
    assert 1 <= figures["sealed_put_ciphered"] < 1.01
    # The copy behind is read from the near tier, verified, and written.
    assert 3 <= figures["tiers_put_kernel"] < 3.05


@pytest.mark.parametrize(("copied", "status"), [(0.0, 0), (0.5, 1)])
def test_one_copy_too_many_is_a_failure(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, copied: float, status: int
) -> None:
    monkeypatch.setattr(script, "LIMITS", {"plain": script.LIMITS["plain"]})
    found = {"put": (1.0, copied, 1.0, 0.0)}
    monkeypatch.setattr(script, "count", lambda *_: found)
    assert script.main(["--quick"]) == status
