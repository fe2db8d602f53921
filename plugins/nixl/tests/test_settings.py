"""Settings are checked, and reach the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock import Dock
from kvdock.errors import SettingsError
from kvdock.plugin import import_entry_point, list_entry_points
from kvdock_nixl.admin import open_store
from kvdock_nixl.settings import IOMethod, NixlSettings


def given(**settings: object) -> NixlSettings:
    found = Dock.load(require=["nixl"]).backends["nixl"].settings(settings)
    assert isinstance(found, NixlSettings)
    return found


def test_nothing_is_required_and_io_uring_is_the_default() -> None:
    settings = given(root="")
    assert given() == settings
    assert (settings.root, settings.io, settings.direct) == (
        None, IOMethod.IO_URING, False,
    )  # fmt: skip


@pytest.mark.parametrize("io", ["aio", "gds", "gds_mt"])
def test_what_needs_direct_io_is_rejected_without_it(io: str) -> None:
    with pytest.raises(SettingsError, match="works with direct I/O alone"):
        given(root="/x", io=io)
    assert given(root="/x", io=io, direct="yes").io == io


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("io", "posix_aio"),
        ("segment_bytes", 100),
    ],
)
def test_values_out_of_range_are_rejected(setting: str, value: object) -> None:
    with pytest.raises(SettingsError):
        given(**({"root": "/x"} | {setting: value}))


def test_the_limits_of_the_store_follow_the_settings() -> None:
    settings = given(
        root="/x",
        quota="1 GiB",
        free_space="2 MiB",
        segment_bytes="1 MiB",
    )
    assert (settings.quota, settings.free_space) == (1 << 30, 2 << 20)
    assert settings.segment_bytes == 1 << 20


def test_the_store_commands_find_a_directory_and_leave_urls_to_others(
    tmp_path: Path,
) -> None:
    found = [one for one in list_entry_points("kvdock.stores") if one.name == "nixl"]
    assert import_entry_point(found[0]) is open_store
    assert open_store("s3://bucket", {}) is None
    store = open_store(str(tmp_path), {"io": "aio", "direct": True})
    assert store is not None
    assert store.namespaces() == ()
