"""LMCache's own tests of a second level, from the archive of its release."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside_suites import Archive, run

ARCHIVE = Archive(
    project="lmcache",
    version="0.5.6",
    sha256="d6951e60ce8818a76aa42d0866a4ba85f1c95cd919355fff30ff24dcc3243f1e",
    members=("tests/v1/distributed/test_",),
)
SUITES = {
    "test_fs_l2_adapter_delete.py": 9,
    "test_mock_l2_adapter.py": 43,
    "test_fault_inject_l2_adapter.py": 6,
    "test_cache_salt_l2_eviction.py": 6,
}
"""Files, and how many of their tests pass."""
LACKING = {
    "TestBandwidthSimulation::test_store_completion_is_delayed_by_bandwidth": (
        "the mock sleeps as long as a slow device takes"
    )
}
PLUGIN = Path(__file__).parents[1] / "outside" / "lmcache_shim.py"


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    return ARCHIVE.unpacked(folder) / "tests" / "v1" / "distributed"


@pytest.mark.parametrize("file", SUITES)
def test_lmcaches_own_tests_pass(tests: Path, file: str) -> None:
    lacking = LACKING if file == "test_mock_l2_adapter.py" else {}
    passed, said = run(tests / file, PLUGIN, lacking, {})
    assert passed == SUITES[file], said
