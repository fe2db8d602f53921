"""(15) `kvdock why` on journals of the real SGLang: the first sentence names it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import controllers
import pytest
import tamper
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from test_radix_cache import buffers, fill
from test_radix_cache import kit as kit  # noqa: PLC0414 - a fixture

PAGES = 4


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Any]:
    """Give every test's engine a store on disk, and a journal beside it."""
    return {
        "plugin": "file",
        "root": str(tmp_path / "store"),
        "core": {"observers": ["journal"]},
        "observers": {"journal": {"dir": str(tmp_path / "journal")}},
    }


def why(folder: Path, request: str) -> tuple[int, str]:
    """Run the command; return its exit code and its first sentences."""
    command = [str(Path(sys.executable).with_name("kvdock")), "why", "--journal"]
    command += [str(folder / "journal"), "--request", request]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ended.stderr, ended.stderr
    return ended.returncode, " ".join(ended.stdout.partition("\n\n")[0].split())


def opened(kit: Any, folder: Path, **more: Any) -> tuple[Any, Any, Any]:
    cache, allocator, requests = build_fixture(kit.cfg)
    given = {"storage_backend": "file", "storage_dir": str(folder), **more}
    kit._init_hicache(cache, **{"prefetch_threshold": 1, **given})
    return cache, allocator, requests


def write(kit: Any, folder: Path, tokens: Any) -> None:
    """Store a prefix from one tree."""
    cache, allocator, requests = opened(kit, folder)
    kit._insert(cache, allocator, requests, tokens)
    fill(allocator, requests, 1)
    assert buffers(allocator, requests)
    leaf = match_prefix(cache, tokens).last_device_node
    kit._backup_node(cache, leaf)
    kit._write_path_to_l3(cache, leaf)
    kit._flush_l3_backups(cache)
    cache.cache_controller.detach_storage_backend()


def ask(kit: Any, folder: Path, tokens: Any, **more: Any) -> Any:
    """Look it up from another one, as the request r does."""
    cache, *_ = opened(kit, folder, **more)
    kit._consume_prefetch(cache, tokens, CacheRequestHandle("r", 0))
    cache.cache_controller.detach_storage_backend()


@pytest.mark.parametrize("kit", ["full", "full-swa"], indirect=True)
def test_all_of_a_prefix(kit: Any, tmp_path: Path) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    ask(kit, tmp_path, tokens)
    assert why(tmp_path, "r") == (0, "All 4 pages could be restored.")


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_what_was_never_stored(kit: Any, tmp_path: Path) -> None:
    write(kit, tmp_path, kit._make_seq(1, PAGES))
    ask(kit, tmp_path, kit._make_seq(1, PAGES + 2))
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "lacks page 5 of 6: no process has stored it" in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_what_was_evicted(kit: Any, tmp_path: Path) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    shutil.rmtree(tmp_path / "store")
    ask(kit, tmp_path, tokens)
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "lacks page 1 of 4: it was stored, and made way for other pages" in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_what_other_settings_stored(
    kit: Any, tmp_path: Path, store: dict[str, Any]
) -> None:
    tokens = kit._make_seq(1, PAGES)
    store["revision"] = "one"
    write(kit, tmp_path, tokens)
    store["revision"] = "two"
    ask(kit, tmp_path, tokens)
    code, said = why(tmp_path, "r")
    assert code == 1
    assert (
        "it is stored in another namespace (model is named:two here and named:o" in said
    )


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_what_was_damaged(kit: Any, tmp_path: Path) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    assert tamper.damage(tmp_path / "store")
    ask(kit, tmp_path, tokens)
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "its bytes were wrong and it was deleted." in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_prompt_that_is_too_short(kit: Any, tmp_path: Path) -> None:
    page = kit._make_seq(1, 1)
    cache, *_ = opened(kit, tmp_path, prefetch_threshold=32)
    for name, tokens in (("threshold", page), ("page", page[:-1])):
        handle = CacheRequestHandle(name, 0)
        given = (cache.root_node_handle(), array("q", tokens), None, None)
        cache.prefetch_from_storage(handle, *given)
    cache.cache_controller.detach_storage_backend()
    for name in ("threshold", "page"):
        code, said = why(tmp_path, name)
        assert code == 1
        assert said.startswith(
            "Storage was not asked for this request: the engine did not ask: what is "
            "left of the prompt is too short."
        )


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_limit_of_what_is_loaded_at_once(kit: Any, tmp_path: Path) -> None:
    cache, *_ = opened(kit, tmp_path)
    cache.cache_controller.prefetch_tokens_occupied = 1 << 30
    tokens = kit._make_seq(1, PAGES)
    given = (cache.root_node_handle(), array("q", tokens), None, None)
    cache.prefetch_from_storage(CacheRequestHandle("r", 0), *given)
    cache.cache_controller.detach_storage_backend()
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "the engine did not ask: it limits how much is loaded at once." in said
