"""SGLang's whole engine with tenants: a salt says whose pages a request stores."""

from __future__ import annotations

from pathlib import Path

import lives
import pytest
import tiny_models

from kvdock.config.tenants import read_tenants
from kvdock_segments.room import tenants_in

TENANTS = {"acme": {"salt": "of acme", "quota": "1 GiB"}}


@pytest.mark.long
def test_a_requests_salt_says_whose_pages_it_stores(tmp_path: Path) -> None:
    root = tmp_path / "store"
    world = lives.World(
        tiny=tiny_models.MODELS["window"],
        model=tiny_models.make("window", tmp_path),
        folder=tmp_path,
        storage={
            "plugin": "file",
            "tenants": TENANTS,
            "backends": {"file": {"root": str(root)}},
        },
    )
    listed = read_tenants(TENANTS)
    used = []
    for salt in ("of acme", "of another"):
        salted = {"cache_salt": salt}
        world.live(salt, [{"prompts": lives.PROMPTS, "generate": salted}])
        found = tenants_in(root, listed)
        used.append({name: one.used_bytes for name, one in found.items()})
    assert used[0]["acme"] > 0
    assert used[0]["default"] == 0
    assert used[1] == {"acme": used[0]["acme"], "default": used[0]["acme"]}
