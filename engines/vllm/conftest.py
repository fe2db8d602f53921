"""What the tests share, and what is left out where vLLM is not installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_lives import Lives

TESTS = Path(__file__).parent / "tests"
ENGINE = TESTS / "engine"

# Programs of processes of their own, and a distribution of its own.
collect_ignore = [
    "tests/cpu_copies",
    "tests/engine/router_load.py",
    "tests/engine/vllm_run.py",
    "tests/identity_gate.py",
    "tests/outside",
    "tests/vllm_environment.py",
]

# Tests import `vllm_environment`, which people run as a script.
sys.path.insert(0, str(TESTS))

if find_spec("vllm") is None:
    collect_ignore += [
        "src/kvdock_vllm/connector.py",
        "src/kvdock_vllm/host_memory.py",
        "src/kvdock_vllm/lookups.py",
        "src/kvdock_vllm/pays.py",
        "src/kvdock_vllm/tier.py",
        "tests/engine",
    ]
else:
    sys.path.insert(0, str(ENGINE))
    import vllm_environment

    os.environ.update(vllm_environment.CPU)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs inside vLLM's own environment."""
    for item in items:
        if ENGINE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # vLLM's and torch's own warnings are not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Return checkpoints that all tests share, and a folder for processes."""
    from vllm_lives import Lives  # noqa: PLC0415 - only where vLLM is

    return Lives(
        models=tmp_path_factory.mktemp("models"),
        folder=tmp_path_factory.mktemp("lives"),
    )


@pytest.fixture(autouse=True)
def _no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail where a test with an engine leaves vLLM's shared memory behind."""
    shared = Path("/dev/shm")  # noqa: S108 - where vLLM puts it
    before = set(shared.glob("vllm_offload_*"))
    yield
    if ENGINE in request.path.parents:
        from kvdock_vllm.doctor import mapped_files  # noqa: PLC0415 - as above

        # Another engine of this host may have begun meanwhile.
        in_use = mapped_files()
        left = set(shared.glob("vllm_offload_*")) - before
        assert not {one for one in left if str(one) not in in_use}  # noqa: S101 - a test's
