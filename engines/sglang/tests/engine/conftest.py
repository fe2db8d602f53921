"""What all tests inside SGLang's own environment share."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import environment  # noqa: E402 - found by the path above

os.environ.update(environment.CPU)

with warnings.catch_warnings():
    # SGLang warns while it is imported; that is not ours to mend.
    warnings.simplefilter("ignore")
    import sgl_kernel  # noqa: F401 - the stand-in comes before any part of SGLang
    import sglang.srt.mem_cache.storage
    import sglang.srt.mem_cache.unified_radix_cache
    import sglang.test.kits.unified_radix_cache.storage  # noqa: F401 - same


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            # SGLang's and transformers' own warnings are not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))
