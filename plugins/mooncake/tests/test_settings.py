"""Settings from a mapping and from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from kvdock import Shard
from kvdock.config import structure
from kvdock.errors import SettingsError
from kvdock_mooncake.settings import MooncakeSettings, Pin, Protocol, split_address

NONE: Mapping[str, str] = MappingProxyType({})


def given(environ: Mapping[str, str] = NONE, **values: object) -> MooncakeSettings:
    return structure(MooncakeSettings, values, where="test", environ=environ)


def test_sizes_have_units_and_words_are_read() -> None:
    settings = given(
        segment_bytes="512 MiB", ssd_offload="yes", ssd_path="/d", pin="hard"
    )
    assert settings.segment_bytes == 512 << 20
    assert settings.ssd_offload is True
    assert settings.pin is Pin.HARD


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"segment_bytes": "1 MiB"}, "too small"),
        ({"segment_bytes": "lots"}, "not a size"),
        ({"protocol": "pigeon"}, "not known"),
        ({"replicas": 0}, "at least 1"),
        ({"replicas": 10**30}, "at most 1024"),
        ({"ssd_offload": True}, "absolute ssd_path"),
        ({"ssd_offload": True, "ssd_path": "here"}, "absolute ssd_path"),
        ({"ssd_offload": True, "ssd_path": "/d", "segment_bytes": 0}, "segment_bytes"),
        ({"setup_timeout_s": 0}, "setup_timeout_s must be at least 1 ms"),
        ({"setup_timeout_s": 1e300}, "setup_timeout_s must be at most"),
        ({"rpc_timeout_s": 0.0001}, "rpc_timeout_s must be at least 1 ms"),
        ({"rpc_timeout_s": float("inf")}, "rpc_timeout_s: inf is not a duration"),
        ({"lease_s": True}, "lease_s: True is not a duration"),
        ({"lease_s": float("nan")}, "lease_s: nan is not a duration"),
        ({"full_wait_s": -1}, "full_wait_s: -1 is not a duration"),
        ({"pin": "sof"}, "pin: 'sof' is not known.*Did you mean 'soft'"),
        ({"protocol": "rmda"}, "protocol: 'rmda' is not known.*Did you mean 'rdma'"),
        ({"max_pieces": -1}, "max_pieces must be at least 0"),
        ({"masters": "a:1"}, "Did you mean 'master'"),
        ({"master": "nohost"}, "master 'nohost' is not host:port"),
        ({"master": "http://h:1"}, "master 'http://h:1' is not host:port"),
        ({"master": "h:1,h:2"}, "master 'h:1,h:2' is not host:port"),
        ({"standalone": "h"}, "standalone 'h' is not host:port"),
        ({"devices": '{"0": "a",'}, "does not map ranks to devices"),
        ({"devices": '{"0": 1}'}, "does not map ranks to devices"),
        ({"devices": '{"first": "a"}'}, "does not map ranks to devices"),
        ({"devices": 5}, "devices: 5 is not text"),
    ],
)
def test_what_the_library_would_refuse_late_is_refused_now(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        given(NONE, **values)


@pytest.mark.parametrize("master", ["h:1", "[::1]:50051", "etcd://h:1", "10.0.0.1:2"])
def test_addresses_of_masters_are_taken(master: str) -> None:
    assert given(master=master).master == master


def test_durations_have_units() -> None:
    settings = given(setup_timeout_s="20 s", rpc_timeout_s="250 ms", lease_s="0")
    assert settings.setup_timeout_s == 20.0
    assert settings.rpc_timeout_s == 0.25
    assert settings.lease_s == 0.0


ENGINES = MappingProxyType(
    {
        "MOONCAKE_MASTER": "10.0.0.1:50051",
        "MOONCAKE_LOCAL_HOSTNAME": "here",
        "MOONCAKE_TE_META_DATA_SERVER": "http://10.0.0.1:8080/metadata",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1gb",
        "MOONCAKE_PROTOCOL": "rdma",
        "MOONCAKE_DEVICE": "mlx5_0",
        "MOONCAKE_ENABLE_SSD_OFFLOAD": "true",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/data",
        "MOONCAKE_TENANT_ID": "team",
        "MOONCAKE_CLIENT": "127.0.0.1:50052",
    }
)


def test_the_variables_of_engines_fill_what_was_not_given() -> None:
    full = given(ENGINES)
    assert full.master == "10.0.0.1:50051"
    assert full.host == "here"
    assert full.metadata_server == "http://10.0.0.1:8080/metadata"
    assert full.segment_bytes == 1 << 30
    assert full.protocol is Protocol.RDMA
    assert full.devices == "mlx5_0"
    assert full.ssd_offload
    assert full.ssd_path == "/data"
    assert full.tenant == "team"
    assert full.standalone == "127.0.0.1:50052"


def test_what_is_given_counts_also_where_it_is_the_default() -> None:
    default = MooncakeSettings()
    values: dict[str, object] = {
        "host": "",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "devices": "",
        "segment_bytes": "4 GiB",
        "ssd_offload": False,
        "ssd_path": "",
        "tenant": "",
        "standalone": "",
        "master": "",
    }
    assert given(ENGINES, **values) == default


def test_a_path_of_the_environment_does_for_offload_that_is_given() -> None:
    path = {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/data"}
    assert given(path, ssd_offload=True).ssd_path == "/data"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MOONCAKE_PROTOCOL", "rmda", "protocol.*Did you mean 'rdma'"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4 gigs", "segment_bytes.*not a size"),
        ("MOONCAKE_ENABLE_SSD_OFFLOAD", "perhaps", "ssd_offload.*neither true"),
        ("MOONCAKE_DEVICE", '{"0": "mlx5_0"', "devices.*does not map"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as told:
        given({variable: value})
    assert f"(environment {variable})" in str(told.value)


def test_the_tenant_that_sglang_calls_default_is_none() -> None:
    assert given({"MOONCAKE_TENANT_ID": "default"}).tenant == ""
    assert given({"MOONCAKE_TENANT_ID": "default"}, tenant="default").tenant == (
        "default"
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("master_server_address", "master"),
        ("local_hostname", "host"),
        ("global_segment_size", "segment_bytes"),
        ("device_name", "devices"),
        ("enable_ssd_offload", "ssd_offload"),
        ("ssd_offload_path", "ssd_path"),
        ("tenant_id", "tenant"),
        ("client_server_address", "standalone"),
        ("standalone_storage", "standalone"),
    ],
)
def test_a_name_of_sglang_is_refused_with_the_name_here(theirs: str, ours: str) -> None:
    with pytest.raises(SettingsError, match=f"Here it is '{ours}'"):
        given(NONE, **{theirs: "x"})


def test_a_total_of_the_environment_is_divided_by_the_ranks() -> None:
    settings = given({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "400gb"}, master="h:1")
    shard = Shard(tp_size=8, pp_size=2, layers=(0, 1))
    assert settings.completed(shard).segment_bytes == 25 << 30
    assert settings.completed(Shard()).segment_bytes == 400 << 30
    assert settings.completed().segment_bytes == 400 << 30
    assert given(master="h:1", segment_bytes="400gb").completed(
        shard
    ).segment_bytes == (400 << 30)
    little = given({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "64 MiB"}, master="h:1")
    with pytest.raises(SettingsError, match=r"over 8 ranks is 8\.0 MiB each"):
        little.completed(Shard(tp_size=8))
    none = given({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "0"}, master="h:1")
    assert none.completed(shard).segment_bytes == 0


def test_devices_may_be_mapped_to_ranks() -> None:
    text = '{"0": "mlx5_0", "1": "mlx5_1,mlx5_2"}'
    mapping = {"0": "mlx5_0", "1": "mlx5_1,mlx5_2"}
    for settings in (
        given({"MOONCAKE_DEVICE": text}, master="h:1"),
        given(devices=mapping, master="h:1"),
    ):
        ranks = [Shard(tp_size=4, tp_rank=rank) for rank in range(4)]
        assert settings.completed(ranks[0]).devices == "mlx5_0"
        assert settings.completed(ranks[1]).devices == "mlx5_1,mlx5_2"
        assert settings.completed().devices == "mlx5_0,mlx5_1,mlx5_2"
        with pytest.raises(SettingsError, match="none for TP rank 2"):
            settings.completed(ranks[2])
        assert hash(settings)
    assert given(devices=["mlx5_0", "mlx5_1"]).devices == "mlx5_0,mlx5_1"


def test_with_a_standalone_client_all_ranks_have_the_same_settings() -> None:
    """Only the client that gives memory out can register it."""
    settings = given({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gb"}, standalone="h:1")
    assert settings.completed(Shard(tp_size=8)) == settings.completed()


def test_no_master_is_a_clear_refusal() -> None:
    with pytest.raises(SettingsError, match="no master") as told:
        given().completed()
    assert "MOONCAKE_MASTER" in told.value.fix


@pytest.mark.parametrize("wrong", ["host", "host:", ":1", "h:0", "h:99999", "h:x"])
def test_an_address_is_a_host_and_a_port(wrong: str) -> None:
    with pytest.raises(SettingsError, match="host:port"):
        split_address(wrong)
    assert split_address("host:50051") == ("host", 50051)
