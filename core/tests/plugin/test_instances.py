"""One plugin under several names, each with settings of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from reference import ReferenceSettings
from shelf import attention

from kvdock import Attachment, Dock, Namespace, Region, Shard
from kvdock.config.engine import EngineSettings, load_engine_configuration
from kvdock.errors import (
    AttachError,
    KvdockError,
    ManifestError,
    PluginError,
    SettingsError,
)
from kvdock.plugin.discovery import Candidate
from kvdock.plugin.manifest import KindSupport, Manifest
from kvdock.pools.enums import PoolKind

FOLDER = Candidate(
    name="reference_folder",
    value="reference:folder",
    distribution="tests",
    version="0",
)


def two(tmp_path: Path) -> dict[str, dict[str, object]]:
    return {
        "near": {"plugin": "reference_folder", "root": str(tmp_path / "near")},
        "far": {"plugin": "reference_folder", "root": str(tmp_path / "far")},
    }


def dock(settings: dict[str, Any]) -> Dock:
    return Dock.of([FOLDER]).with_instances(settings)


def opened(docked: Dock, settings: dict[str, Any]) -> Attachment:
    """Attach two pools, each to an instance of its own."""
    pools = [attention(), attention(name="draft", anchor=False, draft=True)]
    plan = docked.plan(
        pools, Shard(), ["near"], overrides={"draft": "far"}, settings=settings
    )
    assert [route.backend for route in plan.routes] == ["near", "far"]
    regions = {
        pool.name: Region.of(
            pool, Shard(), [np.ones((4, pool.page_bytes(Shard())), np.uint8)], 4
        )
        for pool in pools
    }
    return Attachment.open(docked, plan, Namespace(model="m"), regions, settings)


def test_two_instances_of_a_plugin_store_in_two_places(tmp_path: Path) -> None:
    settings = two(tmp_path)
    docked = dock(settings)
    with opened(docked, settings) as cache:
        pages = {"kv": [0], "draft": [0]}
        assert cache.put(["a" * 64], pages).pages == 1
        assert set(cache.breakers()) == {"near", "far"}
        assert cache["kv"].backend == "near"
        assert cache["kv"].channel is not cache["draft"].channel
    near, far = (list((tmp_path / name).rglob("*.key")) for name in ("near", "far"))
    assert near
    assert far


def test_an_instance_has_observers_and_a_manifest_of_its_own(tmp_path: Path) -> None:
    docked = dock(two(tmp_path))
    docked.observe(["tracing"])
    assert docked.backends["near"].manifest.name == "near"
    assert docked.backends["near"].observers == ("tracing",)
    managers = {one.plugin.manager for one in docked.backends.values()}
    assert len(managers) == 3
    assert docked.backends["far"].plugin.instance_of == "reference_folder"
    sources = {one.name: one.distribution for one in docked.provenance()}
    assert sources["near"] == "tests"


def test_two_instances_on_one_root_are_refused(tmp_path: Path) -> None:
    settings = two(tmp_path)
    (tmp_path / "near").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "near")
    settings["far"]["root"] = str(tmp_path / "link")
    with pytest.raises(AttachError, match="'near' and 'far' have the same root"):
        opened(dock(settings), settings)


def test_an_instance_may_not_take_the_name_of_a_backend() -> None:
    with pytest.raises(SettingsError, match="name of another backend"):
        Dock.load(settings={"s3": {"plugin": "file"}}, environ={"KVDOCK_PLUGINS": ""})
    docked = Dock.of([FOLDER])
    same = docked.with_instances({"reference_folder": {"plugin": "reference_folder"}})
    assert list(same.backends) == ["reference_folder"]


@pytest.mark.parametrize("name", ["Memory", "a__b", "1st", ""])
def test_an_instance_has_a_name_that_a_backend_could_have(name: str) -> None:
    with pytest.raises(SettingsError, match="not a valid name"):
        dock({name: {"plugin": "reference_folder"}})


def test_an_instance_of_what_is_not_there_fails_when_it_is_asked_for() -> None:
    docked = dock({"near": {"plugin": "nixxl"}})
    with pytest.raises(PluginError, match=r"'near'.*plugin 'nixxl' is not installed"):
        docked.plan([attention()], Shard(), ["near"])
    loaded = Dock.load(
        settings={"near": {"plugin": "file"}}, environ={"KVDOCK_PLUGINS": "s3"}
    )
    with pytest.raises(PluginError, match=r"installed and not loaded.*KVDOCK_PLUGINS"):
        loaded.plan([attention()], Shard(), ["near"])


def test_an_instance_is_required_by_its_name(tmp_path: Path) -> None:
    settings = {"near": {"plugin": "file", "root": str(tmp_path)}}
    allowed = {"KVDOCK_PLUGINS": "file"}
    docked = Dock.load(require=["near"], settings=settings, environ=allowed)
    assert set(docked.backends) == {"file", "near"}
    with pytest.raises(PluginError, match=r"no backend 'nearr'.*Did you mean 'near'"):
        Dock.load(require=["nearr"], settings=settings, environ=allowed)


@pytest.mark.parametrize("word", ["plugin", "wrap"])
def test_a_plugin_has_no_setting_with_a_word_of_the_core(word: str) -> None:
    made = attrs.make_class("Made", {word: attrs.field(default="")}, frozen=True)
    with pytest.raises(ManifestError, match=f"setting is called '{word}'"):
        Manifest(
            name="mine", api=2, summary="s", kinds={PoolKind.MHA: KindSupport()},
            settings=made,
        )  # fmt: skip


def test_an_engine_an_environment_and_a_file_name_instances(tmp_path: Path) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[backends.near]\nplugin = "reference_folder"\nroot = "/one"\n')
    environ = {
        "KVDOCK_BACKENDS__FAR__PLUGIN": "reference_folder",
        "KVDOCK_BACKENDS__FAR__ROOT": "/two",
    }
    own = EngineSettings(routes={"draft": "far"}, backends={"near": {"store": "mine"}})
    found = load_engine_configuration(own, ["near"], {}, file=file, environ=environ)
    docked = dock(dict(found.backends))
    near = docked.backends["near"].settings(found.backends["near"])
    assert near == ReferenceSettings(root=Path("/one"), store="mine")
    far = docked.backends["far"].settings(found.backends["far"])
    assert far.root == Path("/two")


def test_an_unknown_setting_of_an_instance_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    settings = two(tmp_path)
    settings["near"]["rot"] = "x"
    with pytest.raises(KvdockError, match=r"backend 'near'.*'rot'"):
        opened(dock(settings), settings)
