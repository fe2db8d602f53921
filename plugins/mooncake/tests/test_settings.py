"""Settings from a mapping and from the environment."""

from __future__ import annotations

import pytest

from kvdock.errors import SettingsError
from kvdock.settings import structure
from kvdock_mooncake.settings import MooncakeSettings, Pin, split_address


def given(**values: object) -> MooncakeSettings:
    return structure(MooncakeSettings, values, where="test")


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
        ({"ssd_offload": True}, "absolute ssd_path"),
        ({"ssd_offload": True, "ssd_path": "here"}, "absolute ssd_path"),
        ({"ssd_offload": True, "ssd_path": "/d", "segment_bytes": 0}, "segment_bytes"),
        ({"setup_timeout_s": 0}, "above 0"),
        ({"full_wait_s": -1}, "negative"),
        ({"masters": "a:1"}, "Did you mean 'master'"),
    ],
)
def test_what_the_library_would_refuse_late_is_refused_now(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        given(**values)


def test_the_environment_fills_what_was_not_given() -> None:
    environ = {
        "MOONCAKE_MASTER": "10.0.0.1:50051",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1gb",
        "MOONCAKE_PROTOCOL": "rdma",
        "MOONCAKE_DEVICE": "mlx5_0",
        "MOONCAKE_ENABLE_SSD_OFFLOAD": "true",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/data",
    }
    full = given(protocol="rdma", devices="mlx5_1").completed(environ)
    assert full.master == "10.0.0.1:50051"
    assert full.segment_bytes == 1 << 30
    assert full.devices == "mlx5_1"
    assert full.ssd_offload
    assert full.ssd_path == "/data"


def test_no_master_is_a_clear_refusal() -> None:
    with pytest.raises(SettingsError, match="no master") as told:
        given().completed({})
    assert "MOONCAKE_MASTER" in told.value.fix


@pytest.mark.parametrize("wrong", ["host", "host:", ":1", "h:0", "h:99999", "h:x"])
def test_an_address_is_a_host_and_a_port(wrong: str) -> None:
    with pytest.raises(SettingsError, match="host:port"):
        split_address(wrong)
    assert split_address("host:50051") == ("host", 50051)
