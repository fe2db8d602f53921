"""What the tests share, and what is left out where LMCache is not installed."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "tests"
ENGINE = TESTS / "engine"

# A program, and plugins of pytest that LMCache's own tests run with.
collect_ignore = ["tests/lmcache_environment.py", "tests/outside"]

# Tests import `lmcache_environment`, which people run as a script.
sys.path.insert(0, str(TESTS))

if find_spec("lmcache") is None:
    collect_ignore += ["src/kvdock_lmcache/adapter.py", "tests/engine"]
else:
    sys.path.insert(0, str(ENGINE))
    import lmcache_environment

    os.environ.update(lmcache_environment.OFFLINE)
    with warnings.catch_warnings():
        # LMCache warns while it is imported; that is not ours to mend.
        warnings.simplefilter("ignore")
        import lmcache.v1.distributed.l2_adapters.plugin_l2_adapter
        import lmcache.v1.distributed.storage_manager  # noqa: F401 - as above


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs inside LMCache's own environment."""
    for item in items:
        if ENGINE in item.path.parents:
            item.add_marker(pytest.mark.lmcache)
            # LMCache's and torch's own warnings are not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))
