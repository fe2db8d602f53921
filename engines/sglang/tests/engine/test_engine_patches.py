"""The other questions for names, each asked with and without the hook."""

from __future__ import annotations

import json
import pkgutil
import re
import time
from array import array
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import controllers
import odd
import pytest
import test_families as families
import zoo
from sglang.srt.arg_groups import hicache_hook
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector
from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from kvdock import Dock, Operation, Support
from kvdock.errors import KvdockError
from kvdock_sglang import engine_patches
from kvdock_sglang.launch_flags import LOADER_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def hooked() -> Iterator[None]:
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


def launch(plugin: object, **more: object) -> str:
    return json.dumps(
        {
            "backend_name": "kvdock",
            "module_path": "kvdock_sglang",
            "class_name": "KvdockStorage",
            "plugin": plugin,
            **more,
        }
    )


def attach_a_second(tmp_path: Path, asked: str | None) -> tuple[bool, str]:
    """Ask a running engine, which stores through `file`, for something else."""
    pool = zoo.mha_host()
    cfg = families.config(tmp_path, extra={"revision": "r1"})
    with families.attached(cfg, {"kv": pool}) as storage:
        controller = SimpleNamespace(
            storage_backend=HiCacheStorageFailureInjector(storage, 0.0, 0.0),
            storage_backend_type="dynamic",
            write_policy="write_through",
        )
        cache = SimpleNamespace(
            cache_controller=controller,
            enable_storage=True,
            token_to_kv_pool_allocator=None,
            is_write_back=False,
            host_memory_mode="cache",
            prefetch_stop_policy=None,
            write_through_threshold=1,
            page_size=zoo.PAGE,
            prefetch_threshold=16,
            prefetch_timeout_base=1.0,
            prefetch_timeout_per_page=zoo.PAGE / 1024 * 0.25,
            hicache_storage_pass_prefix_keys=False,
        )
        found: tuple[bool, str] = StorageAttachment(cache).attach("dynamic", asked)
        return found


OTHERS: dict[str, dict[str, object]] = {
    "plugin": {"plugin": "mooncake"},
    "root": {"root": "/elsewhere"},
    "revision": {"revision": "r2"},
    "core.deadlines": {"core": {"deadlines": {"get": 2}}},
    "tp_lcm_size": {"tp_lcm_size": 8},
    "backends.file.rot": {"rot": "/"},
    "another class": {"module_path": "other"},
    "prefetch_threshold": {"prefetch_threshold": 32},
    "prefetch_timeout_base": {"prefetch_timeout_base": 2},
    "prefetch_timeout_per_ki_token": {"prefetch_timeout_per_ki_token": 1},
    "hicache_storage_pass_prefix_keys": {"hicache_storage_pass_prefix_keys": True},
}
"""What the rejection names, and what was asked for otherwise."""


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("kind", ["text", ".json", ".yaml"])
def test_another_configuration_is_rejected_while_one_is_attached(
    tmp_path: Path, what: str, kind: str
) -> None:
    same = {
        "plugin": "file",
        "root": str(tmp_path),
        "revision": "r1",
        "prefetch_threshold": 16,
    }
    asked = launch(**{**same, **OTHERS[what]})
    if kind != "text":
        # JSON is YAML as well.
        path = tmp_path / f"other{kind}"
        path.write_text(asked)
        asked = f"@{path}"
    ok, why = attach_a_second(tmp_path, asked)
    assert not ok
    assert "through file already" in why
    assert what in why
    assert "Detach first" in why


@pytest.mark.usefixtures("hooked")
def test_a_file_that_cannot_be_read_is_rejected_while_one_is_attached(
    tmp_path: Path,
) -> None:
    ok, why = attach_a_second(tmp_path, f"@{tmp_path}/none.json")
    assert not ok
    assert "No such file" in why


@pytest.mark.usefixtures("hooked")
def test_no_secret_is_shown_when_it_is_another_one(tmp_path: Path) -> None:
    same = {"plugin": "file", "root": str(tmp_path), "revision": "r1"}
    ok, why = attach_a_second(tmp_path, launch(**same, salt="pepper"))
    assert not ok
    assert "salt" in why
    assert "pepper" not in why


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("given", [True, False])
def test_the_same_configuration_or_none_may_be_given_to_change_policies(
    tmp_path: Path, *, given: bool
) -> None:
    same = launch("file", root=str(tmp_path), revision="r1", prefetch_threshold=16)
    ok, why = attach_a_second(tmp_path, same if given else None)
    assert ok, why


def test_without_the_patch_the_engine_says_yes_and_keeps_the_first(
    tmp_path: Path,
) -> None:
    ok, why = attach_a_second(tmp_path, launch("mooncake"))
    assert ok
    assert "same backend" in why


def attach_after_a_rejection(tmp_path: Path) -> tuple[bool, str]:
    """Ask for pools to be stored wrongly, and then rightly."""
    group = controllers.become_rank(0, 1, tmp_path / "gloo")
    right = {"plugin": "file", "root": str(tmp_path / "store")}
    pools = {"kv": zoo.mha_host()}
    with controllers.controller(pools, dict(right), group=group) as controller:
        controller.detach_storage_backend()
        cache = SimpleNamespace(
            cache_controller=controller,
            enable_storage=False,
            token_to_kv_pool_allocator=None,
            is_write_back=False,
            host_memory_mode="cache",
            prefetch_stop_policy=None,
            write_through_threshold=1,
            page_size=zoo.PAGE,
            tree_core=SimpleNamespace(backfill_missing_hash_values=lambda: 0),
            extra_metric_labels=None,
            _enable_metrics_flag=False,
        )
        attachment = StorageAttachment(cache)
        # What a setting says is checked before; that others may write there is not.
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        wrong = launch("file", root=str(tmp_path / "open"))
        ok, why = attachment.attach("dynamic", wrong)
        assert not ok
        assert str(tmp_path / "open") in why
        found: tuple[bool, str] = attachment.attach("dynamic", launch(**right))
        return found


@pytest.mark.usefixtures("hooked")
def test_after_a_rejected_attachment_another_one_may_be_tried(tmp_path: Path) -> None:
    ok, why = attach_after_a_rejection(tmp_path)
    assert ok, why


def test_without_the_patch_a_rejected_attachment_stays_in_the_way(
    tmp_path: Path,
) -> None:
    ok, why = attach_after_a_rejection(tmp_path)
    assert not ok
    assert "already attached" in why


def layout_for(monkeypatch: pytest.MonkeyPatch, grade: Support, given: str = "") -> str:
    """Resolve the layout for a plugin that declares this about pieces."""
    real = Dock.load()
    backend = real.backends["file"]
    kinds = {
        kind: attrs.evolve(support, multi_buffer=grade)
        for kind, support in backend.manifest.kinds.items()
    }
    plugin = attrs.evolve(
        backend.plugin, manifest=attrs.evolve(backend.manifest, kinds=kinds)
    )
    dock = attrs.evolve(real, backends={"file": attrs.evolve(backend, plugin=plugin)})
    monkeypatch.setattr(Dock, "load", lambda **_: dock)
    arguments = ServerArgs(
        model_path="dummy",
        device="cpu",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=given or launch("file", root="/kv"),
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
    )
    hicache_hook.resolve_storage_layout_compatibility(arguments)
    return str(resolving_view(arguments).hicache_mem_layout)


@pytest.mark.usefixtures("hooked")
def test_a_plugin_of_whole_pages_gets_a_layout_with_whole_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert layout_for(monkeypatch, Support.NO) == "page_first_direct"


@pytest.mark.usefixtures("hooked")
def test_a_configuration_in_a_file_gets_the_same_layout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "kv.json"
    path.write_text(launch("file", root="/kv"))
    assert layout_for(monkeypatch, Support.NO, f"@{path}") == "page_first_direct"


@pytest.mark.usefixtures("hooked")
def test_a_plugin_that_takes_pieces_keeps_the_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert layout_for(monkeypatch, Support.NATIVE) == "layer_first"


def test_without_the_patch_the_layout_stays_whatever_the_plugin_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert layout_for(monkeypatch, Support.NO) == "layer_first"


@pytest.mark.parametrize(
    "closed", engine_patches.PATCHES, ids=lambda one: one.target[-40:]
)
def test_every_patch_finds_its_function_in_this_sglang(
    closed: engine_patches.Patch,
) -> None:
    assert callable(pkgutil.resolve_name(closed.target))


def test_this_sglang_has_a_place_for_every_patch() -> None:
    assert engine_patches.skipped_patches() == ()


@pytest.mark.usefixtures("hooked")
def test_patches_that_are_in_place_still_find_what_they_rely_on() -> None:
    """Each process installs them, also one that was forked from a hooked one."""
    assert engine_patches.skipped_patches() == ()


def test_another_version_with_the_same_functions_gets_every_patch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23.post1")
    try:
        engine_patches.install()
        assert set(HookRegistry._hooks) == {
            closed.target for closed in engine_patches.PATCHES
        }
    finally:
        HookRegistry.reset()
    assert not caplog.text


DCP = {"attach_storage_backend", "_generate_storage_config"}


@pytest.mark.parametrize(
    ("path", "lost", "missing"),
    [
        (
            f"{engine_patches._CONTROLLER}.attach_storage_backend",
            DCP,
            r"attach_storage_backend\(storage_backend_extra_config\)",
        ),
        (
            f"{engine_patches._CONTROLLER}._generate_storage_config",
            DCP,
            "attn_dcp_size in .*_generate_storage_config",
        ),
        (
            f"{engine_patches._HYBRID}.should_backup",
            {"should_backup"},
            "backup_skip in .*should_backup",
        ),
        (
            "sglang.srt.arg_groups.overrides.resolving_view",
            {"resolve_storage_layout_compatibility"},
            r"resolving_view\(server_args\)",
        ),
    ],
)
def test_a_patch_is_left_out_by_what_it_lacks_and_the_log_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    lost: set[str],
    missing: str,
) -> None:
    owner, _, name = path.rpartition(".")
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, lambda *_: None)
    try:
        engine_patches.install()
        found = {target.rpartition(".")[2] for target in HookRegistry._hooks}
    finally:
        HookRegistry.reset()
    every = {closed.target.rpartition(".")[2] for closed in engine_patches.PATCHES}
    assert every - found == lost
    assert re.search(rf"Lost: .*missing: .*{missing}", caplog.text)


@pytest.mark.usefixtures("hooked")
def test_a_detach_does_not_wait_for_queued_lookups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin = odd.Odd(lookup_s=0.5)
    monkeypatch.setattr(Dock, "load", lambda **_: odd.dock(plugin))
    group = controllers.become_rank(0, 1, tmp_path / "store")
    pool = zoo.mha_host()
    with controllers.controller({"kv": pool}, {"plugin": "odd"}, group=group) as made:
        queued = [
            made.prefetch(
                CacheRequestHandle(f"request-{n}", 0),
                array("q", controllers.tokens(2 * zoo.PAGE, start=n)),
            )
            for n in range(60)
        ]
        controllers.until("the first lookup", lambda: plugin.calls[Operation.EXISTS])
        began = time.monotonic()
        made.detach_storage_backend()
        assert time.monotonic() - began < 5
        answered = [made.prefetch_hit_queue.get_nowait() for _ in queued]
    assert answered == queued
    assert all(one.storage_hit_count == 0 for one in answered)
    assert plugin.calls[Operation.EXISTS] < 5


@pytest.mark.usefixtures("hooked")
def test_after_a_reset_storage_answers_again(tmp_path: Path) -> None:
    group = controllers.become_rank(0, 1, tmp_path / "store")
    pool = zoo.mha_host()
    zoo.fill(pool, 1)
    token_ids = controllers.tokens(2 * zoo.PAGE)
    extra = {"plugin": "file", "root": str(tmp_path / "kv")}
    with controllers.controller({"kv": pool}, extra, group=group) as made:
        controllers.back_up(made, zoo.slots(pool, [0, 1]), token_ids, [])
        made.reset()
        loaded = controllers.fetch(made, token_ids, zoo.slots(pool, [4, 5]), [])
        assert loaded.completed_tokens == 2 * zoo.PAGE


def test_sglang_finds_the_entry_point_by_itself() -> None:
    from importlib.metadata import entry_points

    (point,) = entry_points(group="sglang.srt.plugins", name="kvdock")
    loaded: Any = point.load()
    assert loaded is engine_patches.install


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"plugin": "fiel"}, "file"),
        ({"plugin": "file", "rooot": "/kv"}, "root"),
        ({"plugin": "file", "root": "/kv", "routes": {"mambo": "file"}}, "mamba"),
        ({"plugin": "file", "root": f"{__file__}/kv"}, "is not a directory"),
    ],
    ids=["a plugin", "a setting", "a pool", "a root"],
)
def test_what_is_wrong_in_a_command_stops_the_start_before_weights_load(
    given: dict[str, Any], named: str
) -> None:
    """The launch arguments are resolved before any process of the engine starts."""
    arguments = ServerArgs(
        model_path="dummy",
        device="cpu",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps({**LOADER_KEYS, **given}),
    )
    with pytest.raises(KvdockError) as raised:
        hicache_hook.resolve_storage_layout_compatibility(arguments)
    assert named in f"{raised.value.what} {raised.value.fix}"
