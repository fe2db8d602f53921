"""Backends that the tests of SGLang's own objects run on."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, Any]]:
    """The settings of a Mooncake cluster of this host, started when first used."""
    (point,) = metadata.entry_points(group="kvdock.servers", name="mooncake")
    with point.load()({}) as (settings, _):
        yield dict(settings)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The settings of a backend; tests that share it keep apart by a salt."""
    plugin, core = BACKENDS[request.param]
    if plugin == "file":
        found = {"root": str(tmp_path_factory.mktemp("store"))}
    else:
        found = request.getfixturevalue("cluster")
    return {"plugin": plugin, "core": core, **found}


@pytest.fixture
def store(backend: dict[str, Any]) -> dict[str, Any]:
    """The settings of a backend with nothing in it for this test."""
    return {**backend, "salt": uuid4().hex}
