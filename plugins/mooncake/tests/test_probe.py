"""What the backend says about itself here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdock import AttachConfig
from kvdock_mooncake import plugin, preconditions, probe
from kvdock_mooncake.library import Wheel
from kvdock_mooncake.probe_cluster import probe_disk
from kvdock_mooncake.settings import MooncakeSettings, Protocol


def findings(settings: MooncakeSettings | None) -> Any:
    return plugin.kvdock_probe(AttachConfig(settings=settings))


def test_without_a_wheel_there_is_one_finding_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "installed", lambda: ())
    (only,) = findings(None)
    assert not only.ok
    assert "kvdock-mooncake[cpu]" in only.hint


def test_with_two_wheels_the_one_finding_names_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheels = (
        Wheel("mooncake-transfer-engine-non-cuda", "0.3.13.post1"),
        Wheel("mooncake-transfer-engine", "0.3.13.post1"),
    )
    monkeypatch.setattr(probe, "installed", lambda: wheels)
    (only,) = findings(None)
    assert not only.ok
    assert all(str(wheel) in only.what for wheel in wheels)


@pytest.mark.mooncake
def test_a_library_without_a_master_says_what_it_can_and_what_is_missing(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    monkeypatch.delenv("MOONCAKE_CLIENT", raising=False)
    found = findings(None)
    assert str(library.wheel) in found[0].what
    assert any("removal in batches" in one.what for one in found if one.ok)
    for feature in library.features():
        line = next(one for one in found if feature.name in one.what)
        assert line.ok
        assert (feature.since in line.what) is not feature.present
    assert [one for one in found if not one.ok] == [found[-1]]
    assert "MOONCAKE_MASTER" in found[-1].hint


@pytest.mark.mooncake
def test_a_file_of_an_engine_is_named_with_what_has_no_effect_here(
    library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del library
    variable = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
    assert not [one for one in findings(None) if variable in one.what]
    file = tmp_path / "theirs.json"
    file.write_text('{"master_server_address": "127.0.0.1:1", "check_server": true}')
    monkeypatch.setenv(variable, str(file))
    (told,) = [one for one in findings(None) if variable in one.what]
    assert told.ok
    assert told.what.startswith(f"settings come from {file}")
    assert told.what.endswith("not used here: check_server")


@pytest.mark.mooncake
def test_a_running_cluster_is_all_well(
    master: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The disk that tests run on may have less.
    monkeypatch.setattr("kvdock_mooncake.probe_cluster._LITTLE_BYTES", 0)
    found = findings(
        MooncakeSettings(
            master=master.address,
            segment_bytes=64 << 20,
            ssd_path=str(tmp_path / "not" / "yet"),
        )
    )
    found.append(probe_disk(tmp_path / "not" / "yet"))
    assert all(one.ok for one in found)
    assert any("64.0 MiB" in one.what for one in found)
    assert any("-put_start_discard_timeout_sec" in one.what for one in found)
    assert any("not/yet" in one.what for one in found)
    assert not (tmp_path / "not").exists()


@pytest.mark.mooncake
def test_a_master_that_is_away_and_a_missing_device_are_two_findings(
    library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del library
    monkeypatch.setattr("kvdock_mooncake.preconditions._RDMA_DEVICES", tmp_path)
    found = findings(
        MooncakeSettings(master="127.0.0.1:1", protocol=Protocol.RDMA, segment_bytes=0)
    )
    wrong = [one for one in found if not one.ok]
    assert len(wrong) == 2
    assert all(one.hint for one in wrong)


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("master", "ok", "said"),
    [
        ("etcd://127.0.0.1:1;127.0.0.1:2", False, "no etcd answers at etcd://"),
        ("k8s://somewhere", True, "not looked at: k8s://somewhere"),
    ],
)
def test_a_master_behind_a_scheme_is_looked_at_as_far_as_it_can_be(
    library: Any, master: str, said: str, *, ok: bool
) -> None:
    del library
    found = findings(MooncakeSettings(master=master, segment_bytes=0))
    assert [one.ok for one in found if said in one.what] == [ok]


def test_memory_that_caches_files_counts_as_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemFree:  1024 kB\nMemAvailable:  8388608 kB\nCached:  1 kB\n")
    monkeypatch.setattr(preconditions, "_MEMORY", told)
    assert probe._room(4 << 30).ok
    assert not probe._room(9 << 30).ok
    monkeypatch.setattr(preconditions, "_MEMORY", tmp_path / "none")
    assert preconditions.available_memory_bytes() > 0


def test_a_folder_that_is_closed_to_this_user_is_a_finding(tmp_path: Path) -> None:
    """Below it nothing can even be looked at."""
    script = """
import os, sys
import subprocess
import sys
from pathlib import Path
from kvdock_mooncake.probe_cluster import probe_disk
if not os.getuid():
    os.setuid(65534)
print(probe_disk(Path(sys.argv[1])))
"""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    done = subprocess.run(
        [sys.executable, "-c", script, str(closed / "spill")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    closed.chmod(0o700)
    assert "ok=False" in done.stdout, done.stderr
    assert "cannot be written" in done.stdout
