"""The JSON files of other engines as a source of settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvdock import Shard
from kvdock.config import explain, load_configuration, structure
from kvdock.errors import SettingsError
from kvdock_mooncake.engine_files import LIBRARY_FILE, SGLANG_FILE, unused
from kvdock_mooncake.settings import MooncakeSettings, Protocol

RANKS = Shard(tp_size=4)
THEIRS = {
    "local_hostname": "here",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "10.0.0.1:50051",
    "global_segment_size": "4gb",
    "local_buffer_size": 1 << 30,
    "protocol": "rdma",
    "device_name": "mlx5_0",
    "enable_ssd_offload": True,
    "ssd_offload_path": "/data",
    "tenant_id": "team",
}


def given(environ: dict[str, str], **values: object) -> MooncakeSettings:
    return structure(MooncakeSettings, values, where="test", environ=environ)


def named(path: Path, variable: str, **content: object) -> dict[str, str]:
    path.write_text(json.dumps(content))
    return {variable: str(path)}


@pytest.mark.parametrize("variable", [LIBRARY_FILE, SGLANG_FILE])
def test_every_setting_of_a_file_is_read(tmp_path: Path, variable: str) -> None:
    full = given(named(tmp_path / "f.json", variable, **THEIRS))
    assert (full.master, full.host) == ("10.0.0.1:50051", "here")
    assert (full.protocol, full.devices) == (Protocol.RDMA, "mlx5_0")
    assert (full.ssd_offload, full.ssd_path) == (True, "/data")
    assert (full.tenant, full.standalone) == ("team", "")
    assert full.segment_bytes == 4 << 30


def test_what_is_null_or_empty_or_their_word_for_none_is_not_given(
    tmp_path: Path,
) -> None:
    environ = named(
        tmp_path / "f.json",
        SGLANG_FILE,
        master_server_address="h:1",
        device_name="",
        ssd_offload_path=None,
        tenant_id="default",
    )
    assert given({**environ, "MOONCAKE_DEVICE": "mlx5_1"}).devices == "mlx5_1"
    assert given(environ) == MooncakeSettings(master="h:1")


def test_the_segment_is_that_of_a_process_or_of_all_ranks_as_each_reads_it(
    tmp_path: Path,
) -> None:
    size = {"master_server_address": "h:1", "global_segment_size": "4gb"}
    library = named(tmp_path / "library.json", LIBRARY_FILE, **size)
    sglang = named(tmp_path / "sglang.json", SGLANG_FILE, **size)
    assert given(library).completed(RANKS).segment_bytes == 4 << 30
    assert given(sglang).completed(RANKS).segment_bytes == 1 << 30
    assert given(library | sglang).completed(RANKS).segment_bytes == 1 << 30


def test_a_client_of_the_host_is_used_where_the_file_wants_it(tmp_path: Path) -> None:
    client = {"client_server_address": "127.0.0.1:50052"}
    both = {**client, "master_server_address": "h:1"}
    file = tmp_path / "f.json"
    for content, standalone in (
        (client, "127.0.0.1:50052"),
        (both, ""),
        ({**both, "standalone_storage": True}, "127.0.0.1:50052"),
        ({**client, "standalone_storage": False}, ""),
    ):
        assert given(named(file, SGLANG_FILE, **content)).standalone == standalone


def test_the_file_goes_before_the_variables_and_both_origins_are_shown(
    tmp_path: Path,
) -> None:
    file = tmp_path / "f.json"
    environ = named(file, SGLANG_FILE, master_server_address="file:1")
    environ |= {"MOONCAKE_MASTER": "variable:1", "MOONCAKE_PROTOCOL": "rdma"}
    ours = load_configuration({}, environ=environ)
    rows = {
        row.path.removeprefix("backends.mooncake."): (row.value, row.origin)
        for row in explain(
            ours, {"backends.mooncake": MooncakeSettings}, environ=environ
        )
    }
    assert rows["master"] == ("file:1", f"file {file}, named by {SGLANG_FILE}")
    assert rows["protocol"] == ("rdma", "environment MOONCAKE_PROTOCOL")
    assert given(environ, master="ours:1").master == "ours:1"


def test_a_wrong_value_is_named_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    for content, message in (
        ({"global_segment_size": "4 gigs"}, "'4 gigs' is not a size"),
        ({"protocol": "rmda"}, "Did you mean 'rdma'"),
    ):
        with pytest.raises(SettingsError, match=message) as told:
            given(named(file, LIBRARY_FILE, **content))
        assert f"file {file}, named by {LIBRARY_FILE}" in str(told.value)


def test_keys_without_a_setting_here_are_listed() -> None:
    assert unused({**THEIRS, "check_server": True}) == [
        "check_server",
        "local_buffer_size",
    ]
