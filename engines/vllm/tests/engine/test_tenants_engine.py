"""vLLM's whole engine with tenants: a salt says whose pages a request stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvdock.config.tenants import read_tenants
from kvdock_segments.room import tenants_in

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_lives import Lives

pytestmark = pytest.mark.slow

TENANTS = {"acme": {"salt": "of acme", "quota": "1 GiB"}}


def test_a_requests_salt_says_whose_pages_it_stores(
    lives: Lives, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    root = tmp_path / "store"
    patient = dict.fromkeys(("exists", "get", "put", "close"), "60 s")
    storage = {
        "plugin": "file",
        "tenants": TENANTS,
        "backends": {"file": {"root": str(root), "free_space": "1 MiB"}},
        "core": {"deadlines": patient},
    }
    listed = read_tenants(TENANTS)
    used = {}
    for salt in ("of acme", "of another"):
        lives.run(
            f"tenants-{salt}",
            [lives.phase("llama", "one", storage, salt=salt, new_tokens=16)],
        )
        used[salt] = {
            name: one.used_bytes for name, one in tenants_in(root, listed).items()
        }
    assert used["of acme"]["acme"] > 0
    assert used["of acme"]["default"] == 0
    # As many pages of the other one, in the room of all that are not listed.
    both = used["of another"]
    assert both == {"acme": used["of acme"]["acme"], "default": both["acme"]}
    for path in root.rglob("*"):
        assert "acme" not in path.name
        assert path.is_dir() or b"of acme" not in path.read_bytes()
