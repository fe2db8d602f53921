"""What the tests share, and what is left out where SGLang is not installed."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "tests"
ENGINE = TESTS / "engine"

# The stand-in is a package of its own, not a part of the tests.
collect_ignore = ["tests/standin", "tests/environment.py", "tests/latest.py"]

# Tests import `environment` and `latest`, which people run as scripts.
sys.path.insert(0, str(TESTS))

if find_spec("sglang") is None:
    collect_ignore += ["src/kvdock_sglang/storage.py", "tests/engine"]
else:
    sys.path.insert(0, str(ENGINE))
    import environment

    os.environ.update(environment.CPU)
    with warnings.catch_warnings():
        # SGLang warns while it is imported; that is not ours to mend.
        warnings.simplefilter("ignore")
        import sgl_kernel  # noqa: F401 - the stand-in comes before any of SGLang
        import sglang.srt.mem_cache.storage
        import sglang.srt.mem_cache.unified_radix_cache
        import sglang.test.kits.unified_radix_cache.storage  # noqa: F401 - same


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs inside SGLang's own environment."""
    for item in items:
        if ENGINE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            # SGLang's and transformers' own warnings are not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _launch_arguments(request: pytest.FixtureRequest) -> None:
    """Publish launch arguments: storage is rejected where it cannot read them."""
    if ENGINE not in request.path.parents or find_spec("sglang") is None:
        return
    from sglang.srt.server_args import (  # noqa: PLC0415 - the engine
        ServerArgs,
        set_global_server_args_for_scheduler,
    )

    arguments = ServerArgs(model_path="dummy", device="cpu", page_size=16)
    set_global_server_args_for_scheduler(arguments)
