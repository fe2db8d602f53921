"""What a harness leaves in an existing store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from reference import FolderShelf

from kvdock.pools.enums import PoolKind
from kvdock.testing.harness import Harness
from kvdock.testing.loading import load_backend
from kvdock.testing.samples import Sample, page_hashes
from kvdock.testing.subprocess import run_tests

if TYPE_CHECKING:
    from pathlib import Path


FOLDER = "reference:folder"

POOL = Sample(kind=PoolKind.MHA).pool()


def harness(root: Path, **changes: Any) -> Harness:
    return Harness(FOLDER, {"root": str(root)}, load_backend(FOLDER), **changes)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_tidy_harness_leaves_no_page_of_its_own(
    tmp_path: Path, *, released: bool, forgotten: bool
) -> None:
    other = harness(tmp_path)
    other.rig(POOL).stored(page_hashes(3))
    tidy = harness(tmp_path, tidy=True)
    for model in ("one", "two"):
        setup = tidy.rig(POOL, model=model)
        setup.stored(page_hashes(4))
        if released or forgotten:
            setup.release()
        if forgotten:
            tidy.forget(setup)
    tidy.close()
    assert len(FolderShelf(tmp_path).names()) == 3
    other.close()


def test_a_harness_that_is_not_tidy_leaves_its_pages(tmp_path: Path) -> None:
    untidy = harness(tmp_path)
    untidy.rig(POOL).stored(page_hashes(4))
    untidy.close()
    assert len(FolderShelf(tmp_path).names()) == 4


def test_a_harness_over_another_store_is_as_tidy(tmp_path: Path) -> None:
    tidy = harness(tmp_path / "one", tidy=True)
    over = tidy.over({"root": str(tmp_path / "two")})
    over.rig(POOL).stored(page_hashes(4))
    over.close()
    assert (tmp_path / "two").exists()
    assert not FolderShelf(tmp_path / "two").names()


SUITE = """
import pytest
from kvdock.testing import BackendContract, FaultContract

class TestTidy(BackendContract):
    plugin = "{plugin}"
    tidy = True

    @pytest.fixture
    def config(self):
        return {{"root": "{root}/large"}}

    @pytest.fixture
    def small(self):
        return {{"root": "{root}/small", "quota_bytes": 1 << 20}}

class TestFaults(FaultContract):
    plugin = "{plugin}"
    tidy = True

    @pytest.fixture
    def config(self):
        return {{"root": "{root}/large"}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        "TestTidy::test_a_full_store_loses_nothing_that_it_called_ok",
        "TestTidy::test_pages_outlive_the_process_that_stored_them",
        "TestTidy::test_a_released_pool_can_be_attached_again",
        "TestFaults::test_what_was_stored_before_a_fault_is_there_after_it",
    ],
)
def test_a_tidy_suite_leaves_no_page_in_an_existing_store(
    tmp_path: Path, test: str
) -> None:
    suite = tmp_path / "suite.py"
    suite.write_text(SUITE.format(plugin=FOLDER, root=tmp_path))
    record = run_tests([f"{suite}::{test}"])
    assert {one.how for one in record.ended} == {"passed"}, record
    stores = [FolderShelf(tmp_path / name) for name in ("large", "small")]
    assert any(store.root.exists() for store in stores)
    assert not [key for store in stores for key in store.names()]
