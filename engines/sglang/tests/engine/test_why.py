"""(15) `kvdock why` on journals of the real SGLang: the first sentence names it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import controllers
import pytest
import tamper
from generation_steps import forget
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from test_radix_cache import buffers, fill
from test_radix_cache import kit as kit  # noqa: PLC0414 - a fixture

from kvdock.config.tenants import read_tenants
from kvdock.wrappers.key_ring import add_key
from kvdock_sglang import weight_updates
from kvdock_sglang.storage import KvdockStorage

PAGES = 4
QUOTA = "2 MiB"


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


def write(
    kit: Any, folder: Path, tokens: Any, then: Callable[[Any], None] | None = None
) -> None:
    """Store a prefix from one tree; `then` is called before its storage ends."""
    cache, allocator, requests = opened(kit, folder)
    kit._insert(cache, allocator, requests, tokens)
    fill(allocator, requests, 1)
    assert buffers(allocator, requests)
    leaf = match_prefix(cache, tokens).last_device_node
    kit._backup_node(cache, leaf)
    kit._write_path_to_l3(cache, leaf)
    kit._flush_l3_backups(cache)
    if then is not None:
        then(cache)
    cache.cache_controller.detach_storage_backend()


def ask(kit: Any, folder: Path, tokens: Any, name: str = "r", **more: Any) -> Any:
    """Look it up from another one, as the request r does."""
    cache, *_ = opened(kit, folder, **more)
    kit._consume_prefetch(cache, tokens, CacheRequestHandle(name, 0))
    cache.cache_controller.detach_storage_backend()


def drop(cache: Any, pool: str) -> None:
    """Delete by name what is stored of a pool."""
    attached = cache.cache_controller.storage_backend._attachments.attached_pool(pool)
    placement = attached.attachment[pool].placements[0]
    nodes = cache.tree_core._node_arena.values()
    hashes = [one for node in nodes for one in node.hash_value or ()]
    assert not placement.delete(hashes, time.monotonic() + 60).any()


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


@pytest.mark.parametrize("free", [2, 0])
@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_prefix_that_host_memory_has_no_room_for(
    kit: Any, tmp_path: Path, free: int
) -> None:
    """SGLang loads the beginning that fits what it can free, or nothing."""
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    cache, *_ = opened(kit, tmp_path)
    host = cache.cache_controller.mem_pool_host
    rows = host.size // kit.cfg.page_size
    assert host.alloc((rows - free) * kit.cfg.page_size) is not None
    kit._consume_prefetch(cache, tokens, CacheRequestHandle("r", 0))
    assert match_prefix(cache, tokens).host_hit_length == free * kit.cfg.page_size
    cache.cache_controller.detach_storage_backend()
    code, said = why(tmp_path, "r")
    assert code == 1
    assert f"host memory has {rows} rows, and the prefix needs {PAGES}, or o" in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_what_another_salt_stored(
    kit: Any, tmp_path: Path, store: dict[str, Any]
) -> None:
    tokens = kit._make_seq(1, PAGES)
    store["salt"] = "one secret"
    write(kit, tmp_path, tokens)
    store["salt"] = "two secrets"
    ask(kit, tmp_path, tokens)
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "it is stored in another namespace (salt_sha256 differs)." in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_what_is_older_than_pages_may_be(
    kit: Any, tmp_path: Path, store: dict[str, Any]
) -> None:
    tokens = kit._make_seq(1, PAGES)
    store["core"]["retention"] = {"max_age": "1 s"}
    write(kit, tmp_path, tokens)
    said, end_s = "All 4", time.monotonic() + 300
    while "All 4" in said:
        assert time.monotonic() < end_s
        ask(kit, tmp_path, tokens, name := f"r{time.monotonic_ns()}")
        said = why(tmp_path, name)[1]
    assert "lacks page 1 of 4: its time was over: " in said


@pytest.mark.parametrize("kit", ["full-swa"], indirect=True)
def test_a_window_that_is_missing_at_the_end(kit: Any, tmp_path: Path) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens, lambda cache: drop(cache, "swa"))
    ask(kit, tmp_path, tokens)
    code, said = why(tmp_path, "r")
    assert code == 1
    assert said.startswith("0 of 4 pages could be restored: pool swa lacks page ")
    assert "it was deleted by name, by the engine or who calls it." in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_namespace_that_was_cleared(kit: Any, tmp_path: Path) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(
        kit, tmp_path, tokens, lambda one: one.cache_controller.storage_backend.clear()
    )
    ask(kit, tmp_path, tokens)
    assert "lacks page 1 of 4: its namespace was cleared." in why(tmp_path, "r")[1]


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_store_without_room(kit: Any, tmp_path: Path, store: dict[str, Any]) -> None:
    store["free_space"] = "1000 TiB"
    store["core"]["calls"] = {"capacity_interval": "100 ms"}
    said, end_s, first = "", time.monotonic() + 300, 1
    while "its store was full when it was to be stored." not in said:
        # How full it is is asked for in the background.
        assert time.monotonic() < end_s, said
        tokens = kit._make_seq(first, PAGES)
        first += 1000
        write(kit, tmp_path, tokens)
        ask(kit, tmp_path, tokens, name := f"r{first}")
        said = why(tmp_path, name)[1]
        assert "lacks page 1 of 4: " in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ("put", "lacks page 1 of 4: the call failed."),
        ("get", "lacks page 1 of 4: the call failed."),
    ],
)
def test_a_call_that_failed(
    kit: Any, tmp_path: Path, store: dict[str, Any], operation: str, said: str
) -> None:
    tokens = kit._make_seq(1, PAGES)
    store["wrap"] = [{"name": "faults", "kinds": ["drop"], "operations": [operation]}]
    write(kit, tmp_path, tokens)
    ask(kit, tmp_path, tokens)
    assert said in why(tmp_path, "r")[1]


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_load_that_was_too_late(
    kit: Any, tmp_path: Path, store: dict[str, Any]
) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    store["core"]["deadlines"] = {"get": "300 ms", "close": "1 s"}
    store["wrap"] = [
        {"name": "faults", "kinds": ["hang"], "operations": ["get"], "hang": "3 s"}
    ]
    ask(kit, tmp_path, tokens)
    said = why(tmp_path, "r")[1]
    assert "lacks page 1 of 4: the call did not end by its deadline." in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_breaker_that_is_open(
    kit: Any, tmp_path: Path, store: dict[str, Any]
) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    store["core"]["breaker"] = {"failures": 1, "backoff": "60 s"}
    store["wrap"] = [{"name": "faults", "kinds": ["drop"], "operations": ["exists"]}]
    cache, *_ = opened(kit, tmp_path)
    for name in ("failed", "held back"):
        kit._consume_prefetch(cache, tokens, CacheRequestHandle(name, 0))
    cache.cache_controller.detach_storage_backend()
    assert "lacks page 1 of 4: the call failed." in why(tmp_path, "failed")[1]
    said = why(tmp_path, "held back")[1]
    assert "lacks page 1 of 4: its backend was cut off after failures." in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_what_another_tier_has(kit: Any, tmp_path: Path, store: dict[str, Any]) -> None:
    tokens = kit._make_seq(1, PAGES)
    del store["plugin"], store["root"]
    for name, act in (("near", write), ("far", ask)):
        place = {"plugin": "file", "root": str(tmp_path / name)}
        store |= {"backends": {name: place}, "tiers": [name]}
        act(kit, tmp_path, tokens)
    said = why(tmp_path, "r")[1]
    assert "lacks page 1 of 4: it is stored in a tier that was not asked." in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_weights_that_were_replaced(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch)
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    cache, *_ = opened(kit, tmp_path)
    scheduler = weight_updates.Watched(lambda request: request)
    scheduler(type("UpdateWeightFromDiskReqInput", (), {})())
    kit._consume_prefetch(cache, tokens, CacheRequestHandle("r", 0))
    cache.cache_controller.detach_storage_backend()
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "the weights were replaced at run time, and storage ended with th" in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_load_that_takes_longer_than_computing(
    kit: Any, tmp_path: Path, store: dict[str, Any]
) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    store["core"]["pays"] = {"mode": "on", "recompute": 1000}
    store["wrap"] = [
        {"name": "faults", "kinds": ["delay"], "operations": ["get"], "delay": "2 s"}
    ]
    ask(kit, tmp_path, tokens)
    said = why(tmp_path, "r")[1]
    assert "lacks page 1 of 4: computing was expected to be faster" in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_root_that_is_deleted_under_the_engine(kit: Any, tmp_path: Path) -> None:
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    cache, *_ = opened(kit, tmp_path)
    for name in ("before", "r"):
        kit._consume_prefetch(cache, tokens, CacheRequestHandle(name, 0))
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
    cache.cache_controller.detach_storage_backend()
    assert why(tmp_path, "before")[0] == 0
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "lacks page 1 of 4: it was stored, and the store was deleted while" in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_prompt_that_is_longer_than_the_quota(
    kit: Any, tmp_path: Path, store: dict[str, Any]
) -> None:
    store["quota"] = QUOTA
    tokens = kit._make_seq(1, 4 * PAGES)
    write(kit, tmp_path, tokens)
    ask(kit, tmp_path, tokens)
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "its store was full when it was to be stored." in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_tenant_whose_key_is_missing(
    kit: Any, tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    master = bytes(range(32))
    monkeypatch.setenv("KV_MASTER_KEY", master.hex())
    add_key(tmp_path / "keys.json", master, "default")
    store["wrap"] = [{"name": "seal", "keys": str(tmp_path / "keys.json")}]
    store["tenants"] = {"bell": {"salt": "of bell"}}
    bell = read_tenants(store["tenants"]).number_of_salt("of bell")
    monkeypatch.setattr(KvdockStorage, "_tenant", lambda _: bell)
    tokens = kit._make_seq(1, PAGES)
    write(kit, tmp_path, tokens)
    ask(kit, tmp_path, tokens)
    code, said = why(tmp_path, "r")
    assert code == 1
    assert "lacks page 1 of 4: it is sealed, and its key is missing" in said


@pytest.mark.parametrize("kit", ["full"], indirect=True)
@pytest.mark.parametrize("rest", [0, 1])
def test_a_prompt_that_the_engine_has_itself(
    kit: Any, tmp_path: Path, rest: int
) -> None:
    tokens = kit._make_seq(1, PAGES)
    cache, *_ = opened(kit, tmp_path)
    new = array("q", tokens[:rest])
    given = (cache.root_node_handle(), new, None, None)
    cache.prefetch_from_storage(
        CacheRequestHandle("r", 0), *given, matched_prefix_tokens=list(tokens)
    )
    cache.cache_controller.detach_storage_backend()
    code, said = why(tmp_path, "r")
    assert code == 0
    assert "the engine had it in its own memory, all but a rest that is too" in said
