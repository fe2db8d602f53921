"""What the report on another version of SGLang says."""

from __future__ import annotations

from typing import Any

import latest
import pytest

POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
TESTED: dict[str, Any] = {
    "version": "0.5.23",
    "missing": [],
    "skipped_patches": [],
    "code": {POOL: {"init_kv_buffer": "aa", "alloc": "cc"}},
    "probe": {"mha-page_first": "aa", "qsa": "bb"},
    "unknown_pools": ["HiSparse"],
}


def test_the_newest_version_is_the_first_that_the_index_names() -> None:
    listed = "sglang (0.5.24)\nAvailable versions: 0.5.24.post1, 0.5.24, 0.5.23\n"
    assert latest.newest(listed) == "0.5.24.post1"
    with pytest.raises(SystemExit, match="names no version"):
        latest.newest("")


def test_the_tested_version_differs_in_nothing() -> None:
    assert latest.explain(TESTED, TESTED)[1:] == ["It is the tested version."]
    same = {**TESTED, "version": "0.5.24"}
    (line,) = latest.explain(TESTED, same)[1:]
    assert line == "Nothing that kvdock-sglang uses differs."


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"missing": ["ServerArgs.dtype"]}, "rejected: ServerArgs.dtype is missing"),
        ({"skipped_patches": ["draft models"]}, "a patch is left out: draft models"),
        (
            {"code": {POOL: {"init_kv_buffer": "bb", "alloc": "cc"}}},
            f"code that builds or copies pages differs: {POOL}: init_kv_buffer",
        ),
        ({"code": {POOL: "gone: AttributeError: x"}}, f"is gone: {POOL} (Attrib"),
        ({"unknown_pools": ["HiSparse", "New"]}, "without a description: New"),
    ],
)
def test_each_difference_is_named(change: dict[str, Any], line: str) -> None:
    (found,) = latest.explain(TESTED, {**TESTED, "version": "0.6.0", **change})[1:]
    assert line in found


def test_pages_whose_values_lie_elsewhere_are_named() -> None:
    probe = {"mha-page_first": "cc", "qsa": "gone: ImportError: no qsa"}
    other = {**TESTED, "version": "0.6.0", "probe": probe}
    moved, missing, count = latest.explain(TESTED, other)[1:]
    assert moved == "values lie elsewhere in the pages of mha-page_first"
    assert missing == "not probed: qsa (ImportError: no qsa)"
    assert count == "0 of 2 pools keep every value in its place"
