from __future__ import annotations

import pytest

from kvdock.config import StagingPolicy
from kvdock.errors import SettingsError
from kvdock_vllm.settings import EVENT_PAGES, check_host_memory, collect

GIVEN = {"plugin": "file", "root": "/kv", "host_memory": "10 GiB"}


def test_one_plugin_takes_the_settings_that_are_not_the_adapters() -> None:
    found = collect(GIVEN, environ={})
    assert found.own.plugin == ("file",)
    assert found.backends == {"file": {"root": "/kv"}}
    assert found.own.upstream["cpu_bytes_to_use"] == 10 << 30


def test_late_calls_find_no_row_unless_a_source_says_otherwise() -> None:
    assert collect(GIVEN, environ={}).core.calls.staging is StagingPolicy.SAFE
    given = {**GIVEN, "core": {"calls": {"staging": "routed"}}}
    assert collect(given, environ={}).core.calls.staging is StagingPolicy.ROUTED


def test_several_plugins_have_their_settings_by_name() -> None:
    given = {
        "plugin": ["first", "second"],
        "host_memory": "1 GiB",
        "backends": {"first": {"root": "/kv"}},
    }
    found = collect(given, environ={})
    assert found.own.plugin == ("first", "second")
    assert found.backends["first"] == {"root": "/kv"}
    with pytest.raises(SettingsError, match="not known whose settings"):
        collect({**given, "root": "/kv"}, environ={})


def test_kv_events_switch_on_what_they_need() -> None:
    assert collect(GIVEN, environ={}).core.page_events == 0
    found = collect({**GIVEN, "enable_kv_events": True}, environ={})
    assert found.core.page_events == EVENT_PAGES
    assert found.core.calls.staging is StagingPolicy.SAFE
    assert found.own.upstream["self_describing_kv_events"] is True
    own = {**GIVEN, "enable_kv_events": True, "core": {"page_events": 7}}
    assert collect(own, environ={}).core.page_events == 7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host_memory": "1 GiB"}, "which plugin"),
        ({"plugin": "file"}, "how much host memory"),
        ({"plugin": [], "host_memory": "1 GiB"}, "list of plugins is empty"),
        ({**GIVEN, "cpu_bytes_to_use": 1}, "cpu_bytes_to_use"),
        ({**GIVEN, "blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({**GIVEN, "eviction_policy": "mru"}, "eviction_policy"),
    ],
)
def test_wrong_settings_are_rejected_by_name(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        collect(given, environ={})


def test_host_memory_holds_at_least_one_row() -> None:
    check_host_memory(4096, 4096)
    with pytest.raises(SettingsError, match=r"one chunk takes 8\.0 KiB"):
        check_host_memory(4096, 8192)


def test_a_size_without_its_unit_is_rejected() -> None:
    with pytest.raises(SettingsError, match=r"host_memory '10' is 10 B.*'10 GiB'"):
        collect({"plugin": "file", "host_memory": "10"}, environ={})


def test_options_of_vllms_own_are_passed_on_or_rejected_with_its_reason() -> None:
    given = {"plugin": "file", "host_memory": "1 MiB"}
    waters = {"high_watermark": 0.02, "low_watermark": 0.005}
    found = collect({**given, "backpressure": waters}, environ={})
    assert found.own.upstream["backpressure"] == waters
    assert "backpressure" not in collect(given, environ={}).own.upstream
    with pytest.raises(SettingsError, match="not supported by vLLM"):
        collect({**given, "store_threshold": 2}, environ={})
    with pytest.raises(SettingsError, match="has no sync_load_budget_bytes"):
        collect({**given, "sync_load_budget_bytes": 4096}, environ={})
