"""Directories that segments spill into."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock import Shard
from kvdock.errors import SettingsError
from kvdock_mooncake.settings import MooncakeSettings
from kvdock_mooncake.spill import SpillDirectory, owner_of


@pytest.fixture
def settings(tmp_path: Path) -> MooncakeSettings:
    return MooncakeSettings(ssd_offload=True, ssd_path=str(tmp_path / "new"))


def test_each_process_spills_into_a_directory_of_its_own(
    settings: MooncakeSettings,
) -> None:
    """Ranks of data, pipeline and context parallelism may have equal shards."""
    ranks = [owner_of("", Shard(tp_rank=rank, tp_size=2)) for rank in range(2)]
    told = [owner_of(process, Shard()) for process in ("dp0.pp1", "dp0.pp2")]
    claimed = [SpillDirectory.claim(settings, owner) for owner in (*ranks, *told)]
    assert len({one.path for one in claimed}) == 4
    assert [Path(one.path).name for one in claimed[2:]] == ["dp0.pp1", "dp0.pp2"]
    assert all(Path(one.path).is_dir() for one in claimed)
    assert not any(Path(claimed[0].path).iterdir())
    for one in claimed:
        one.mark_clean()


def test_two_processes_never_spill_into_one_directory(
    settings: MooncakeSettings,
) -> None:
    first = SpillDirectory.claim(settings, "me")
    with pytest.raises(SettingsError, match="another process"):
        SpillDirectory.claim(settings, "me")
    first.mark_clean()
    SpillDirectory.claim(settings, "me").mark_clean()


def test_only_after_a_lost_owner_is_the_master_waited_for(
    settings: MooncakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    first = SpillDirectory.claim(settings, "me")
    first.wait_for_previous_owner(7.0)
    first.disk.stop()
    first._lock.close()  # as a killed process would
    second = SpillDirectory.claim(settings, "me")
    assert second.lost
    second.wait_for_previous_owner(7.0)
    assert waits == [7.0]
    second.mark_clean()
    third = SpillDirectory.claim(settings, "me")
    assert not third.lost
    third.wait_for_previous_owner(7.0)
    third.mark_clean()
    assert waits == [7.0]


def test_an_owner_that_did_not_wait_to_the_end_leaves_the_waiting_to_the_next(
    settings: MooncakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SpillDirectory.claim(settings, "me")
    first.wait_for_previous_owner(7.0)
    first.disk.stop()
    first._lock.close()  # as a killed process would

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    second = SpillDirectory.claim(settings, "me")
    with pytest.raises(KeyboardInterrupt):
        second.wait_for_previous_owner(7.0)
    second.mark_clean()
    third = SpillDirectory.claim(settings, "me")
    assert third.lost
    third.mark_clean()


def test_a_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    wrong = MooncakeSettings(ssd_offload=True, ssd_path=str(tmp_path / "plain"))
    with pytest.raises(SettingsError, match="cannot be made"):
        SpillDirectory.claim(wrong, "me")
