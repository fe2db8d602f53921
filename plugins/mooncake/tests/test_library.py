"""Which wheel is there, and what a release can do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.errors import PluginError
from kvdock_mooncake import library
from kvdock_mooncake.library import Wheel, inspect_library, parameters, the_wheel
from kvdock_mooncake.preconditions import REQUIRED, check_library
from kvdock_mooncake.settings import MooncakeSettings

CPU = Wheel("mooncake-transfer-engine-non-cuda", "0.3.13.post1")
CUDA = Wheel("mooncake-transfer-engine-cuda13", "0.3.14")


def test_no_wheel_two_wheels_and_a_broken_wheel_are_told_apart() -> None:
    assert the_wheel([CPU]) == CPU
    with pytest.raises(PluginError, match="not installed") as told:
        the_wheel([])
    assert "kvdock-mooncake[cpu]" in told.value.fix
    with pytest.raises(PluginError, match="2 wheels share"):
        the_wheel([CPU, CUDA])
    with pytest.raises(PluginError, match="by mistake"):
        the_wheel([Wheel(CPU.distribution, "0.3.12")])


SIGNATURES = """setup(*args, **kwargs)
Overloaded function.

1. setup(self: Store, local_hostname: str, {} port: int = 1) -> int

2. setup(self: Store, config: dict) -> int
  tenant_id: Tenant identifier of the dictionary only.
"""


def a_release(extra: str, *methods: str) -> Any:
    def setup() -> None: ...

    setup.__doc__ = SIGNATURES.format(extra)
    store = type("Store", (), {"setup": setup} | dict.fromkeys(methods))
    config = type("Config", (), {"replica_num": 1})
    return SimpleNamespace(MooncakeDistributedStore=store, ReplicateConfig=config)


def test_a_release_is_known_by_its_signatures_and_attributes() -> None:
    old = inspect_library(CPU, a_release(""))
    assert not any(feature.present for feature in old.features())
    new = inspect_library(
        CPU,
        a_release(
            "enable_ssd_offload: bool = False, ssd_offload_path: str = '',",
            "batch_probe_key",
            "batch_remove",
        ),
    )
    present = {feature.name for feature in new.features() if feature.present}
    assert present == {"SSD offload", "removal in batches", "lookups without a lease"}


def test_a_word_of_the_description_is_no_parameter() -> None:
    assert "tenant_id" not in parameters(SIGNATURES)


def test_a_setting_that_the_release_does_not_know_names_the_one_that_does() -> None:
    old = inspect_library(CPU, a_release(""))
    settings = MooncakeSettings(master="h:1", ssd_offload=True, ssd_path="/d")
    with pytest.raises(PluginError, match="no SSD offload") as told:
        check_library(old, settings)
    assert "0.3.10.post2" in told.value.fix
    with pytest.raises(PluginError, match="no tenants"):
        check_library(old, MooncakeSettings(master="h:1", tenant="me"))
    whole = inspect_library(CPU, a_release("", *REQUIRED))
    check_library(whole, MooncakeSettings(master="h:1"))


def test_a_release_without_a_method_that_is_called_is_rejected_by_its_name() -> None:
    cut = inspect_library(CPU, a_release("", *REQUIRED - {"remove_by_regex"}))
    with pytest.raises(PluginError, match="has no remove_by_regex") as told:
        check_library(cut, MooncakeSettings(master="h:1"))
    assert "Upgrade" in told.value.fix


def test_an_import_that_fails_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(library, "installed", lambda: (CPU,))
    monkeypatch.setattr(library, "preload", lambda: None)
    monkeypatch.setattr(library, "loads", lambda name: name != "libibverbs.so.1")
    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(PluginError, match="cannot be imported") as told:
        library.load()
    assert "kvdock_mooncake.system_libraries" in told.value.fix
    assert "CUDA" not in told.value.fix


@pytest.mark.mooncake
def test_the_installed_release_has_what_the_backend_builds_on(library: Any) -> None:
    assert library.methods >= REQUIRED
    assert {"master_server_addr", "global_segment_size"} <= library.setup_parameters
    assert {"replica_num", "with_hard_pin", "preferred_segment"} <= library.put_options
    assert {"batch_get_replica_desc", "remove_by_regex"} <= library.methods
