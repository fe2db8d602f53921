"""Settings are checked, and what makes no sense in a mode is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from kvdock import Dock
from kvdock.errors import SettingsError
from kvdock_hf3fs.settings import Hf3fsSettings, Mode


def given(**settings: Any) -> Hf3fsSettings:
    backend = Dock.load(require=["hf3fs"]).backends["hf3fs"]
    found = backend.settings({"root": "/x", **settings})
    assert isinstance(found, Hf3fsSettings)
    return found


def test_only_the_root_is_required_and_the_mode_is_usrbio() -> None:
    assert given().mode is Mode.USRBIO
    with pytest.raises(SettingsError, match="is not a path"):
        given(root="")


def test_sizes_have_units_and_reach_the_store() -> None:
    settings = given(
        quota="1 GiB",
        segment_bytes="1 MiB",
        chunk="512 KiB",
        iov_limit="8 GiB",
        iov_block="64 MiB",
        open_files=12,
        free_space="2 MiB",
    )
    assert (settings.chunk, settings.iov_block) == (512 << 10, 64 << 20)
    assert (settings.quota, settings.segment_bytes) == (1 << 30, 1 << 20)
    assert (settings.open_files, settings.free_space) == (12, 2 << 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "auto"},
        {"chunk": 0},
        {"chunk": 1000},
        {"direct": True},
        {"locks": True},
        {"entries": 0},
        {"rings": 9},
        {"iov_block": 100},
        {"segment_bytes": 100},
        {"threads": 0},
    ],
    ids=str,
)
def test_what_cannot_be_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        given(**wrong)


def test_in_mode_posix_there_may_be_no_chunks() -> None:
    settings = given(mode="posix", chunk=0, direct=True, locks=True)
    assert settings.mode is Mode.POSIX
