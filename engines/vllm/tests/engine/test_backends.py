"""The engine's pages on every backend, and on two of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_families import check, check_altered, tell

from kvdock_mooncake.server import local_server as mooncake_server
from kvdock_s3.server import local_server as object_server

if TYPE_CHECKING:
    from vllm_lives import Lives

pytestmark = pytest.mark.slow

FAMILIES = {
    "mooncake": ("llama", "swa_full", "mamba2"),
    "nixl": ("swa_full",),
    "s3": ("llama",),
}


@contextmanager
def storage(backend: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the settings of a backend, with its servers on this host."""
    if backend == "nixl":
        folder.chmod(0o700)
        yield {"plugin": "nixl", "root": str(folder), "free_space": "1 MiB"}
        return
    serve = {"mooncake": mooncake_server, "s3": object_server}[backend]
    with serve({}) as (settings, _):
        # A server that a test starts shares two cores with the engine.
        deadlines = {"exists": "30 s", "get": "60 s", "put": "60 s"}
        yield {"plugin": backend, **settings, "core": {"deadlines": deadlines}}


@pytest.mark.parametrize(
    ("backend", "families"),
    [pytest.param(*one, id="-".join((one[0], *one[1]))) for one in FAMILIES.items()],
)
def test_pages_are_restored_from_every_backend_and_change_the_answer_if_altered(
    backend: str, families: tuple[str, ...], lives: Lives, tmp_path: Path
) -> None:
    with storage(backend, tmp_path) as given:
        story = tell(lives, backend, families, given)
    for family in families:
        check(family, story)
        check_altered(family, story)


def test_pools_of_one_engine_are_routed_to_the_backends_that_declare_them(
    lives: Lives, tmp_path: Path
) -> None:
    """The first plugin of the list takes windows alone, so the rest goes on."""
    tmp_path.chmod(0o700)
    with storage("s3", tmp_path) as given:
        own = {name: given[name] for name in given if name not in ("plugin", "core")}
        both = {
            "plugin": ["windows_only", "s3"],
            "core": given["core"],
            "backends": {"s3": own, "windows_only": {"root": str(tmp_path / "w")}},
        }
        story = tell(lives, "list", ("swa_full",), both, alter=False)
    check("swa_full", story)
    assert story.restored["swa_full"]["routes"] == {"swa": "windows_only", "kv": "s3"}
    assert any((tmp_path / "w").rglob("*"))
