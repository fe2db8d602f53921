"""What the tests share, and what is left out where SGLang is not installed."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

TESTS = Path(__file__).parent / "tests"
ENGINE = TESTS / "engine"

PATIENT = {"deadlines": {"exists": "5 s"}}
"""A lookup that waits for a processor is not late; SGLang gives up after 10 s."""

ROUTED = {"calls": {"staging": "routed"}, **PATIENT}
"""Pages are moved where they lie, as the route says, and not through a copy."""

BACKENDS = {
    "file": ("file", PATIENT),
    "mooncake": ("mooncake", PATIENT),
    "mooncake, zero copy": ("mooncake", ROUTED),
}
"""Name to the plugin and the core's settings."""

FEW = {name: (name, PATIENT) for name in ("hf3fs", "nixl", "s3")}
"""The same for backends that only the tests which name them run on."""

# The stand-in is a package of its own, not a part of the tests.
collect_ignore = [
    "tests/standin",
    "tests/engine/router_load.py",
    "tests/environment.py",
    "tests/latest.py",
]

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


@contextmanager
def _served(name: str) -> Iterator[dict[str, Any]]:
    """Run the server that a backend brings for demos; yield settings for it."""
    (point,) = metadata.entry_points(group="kvdock.servers", name=name)
    with point.load()({}) as (settings, _):
        yield dict(settings)


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, Any]]:
    """The settings of a Mooncake cluster of this host, started when first used."""
    with _served("mooncake") as settings:
        yield settings


@pytest.fixture(scope="session")
def bucket() -> Iterator[dict[str, Any]]:
    """The settings of a bucket of this host, on moto's server."""
    with _served("s3") as settings:
        yield settings


@pytest.fixture(
    scope="module",
    params=[
        "file",
        pytest.param("mooncake", marks=pytest.mark.long),
        "mooncake, zero copy",
    ],
)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The settings of a backend; tests that share it keep apart by a salt."""
    plugin, core = {**BACKENDS, **FEW}[request.param]
    found: dict[str, Any]
    if plugin == "hf3fs":
        # A fake, by the path of that plugin's own tests.
        import threefs  # noqa: PLC0415 - few tests need it

        threefs.use()
        mount = threefs.mounted(tmp_path_factory.mktemp("mnt"))
        found = {"root": str(threefs.root_in(mount))}
    elif plugin in ("file", "nixl"):
        found = {"root": str(tmp_path_factory.mktemp("store"))}
    elif plugin == "s3":
        found = request.getfixturevalue("bucket")
    else:
        found = request.getfixturevalue("cluster")
    if "root" in found:
        # A disk may have less free than a store of files leaves.
        found["free_space"] = 0
    return {"plugin": plugin, "core": core, **found}


@pytest.fixture
def store(backend: dict[str, Any]) -> dict[str, Any]:
    """The settings of a backend with nothing in it for this test."""
    return {**backend, "salt": uuid4().hex}
