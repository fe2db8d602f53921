"""Tiers as files, environment and code give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock.config import Promote, Tier, Write, explain, load_configuration, read_tiers
from kvdock.errors import SettingsError


def test_the_nearest_is_written_at_once_and_the_others_behind() -> None:
    near, disk, far = read_tiers(["near", "disk", "far"])
    assert near == Tier("near", Write.THROUGH, Promote.SECOND)
    assert disk == Tier("disk", Write.BEHIND, Promote.SECOND)
    assert far == Tier("far", Write.BEHIND, Promote.SECOND)


def test_a_tier_may_be_a_table_or_itself() -> None:
    table = {"backend": "far", "write": "never", "promote": "always"}
    mine = Tier("disk", Write.THROUGH)
    assert read_tiers(["near", mine, table])[1:] == (
        mine,
        Tier("far", Write.NEVER, Promote.ALWAYS),
    )


def test_code_may_give_the_words_of_a_rule() -> None:
    assert Tier("far", write="through") == Tier("far", Write.THROUGH)
    with pytest.raises(ValueError, match="soon"):
        Tier("far", write="soon")


def test_a_file_and_the_environment_have_tiers(tmp_path: Path) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('tiers = ["near", {backend = "far", write = "through"}]\n')
    found = load_configuration(file=file, environ={})
    assert found.tiers == (
        Tier("near", Write.THROUGH),
        Tier("far", Write.THROUGH),
    )
    rows = [row for row in explain(found, {}, environ={}) if row.path == "tiers"]
    assert [row.value for row in rows] == [
        "near: written at once, promoted at the second use",
        "far: written at once, promoted at the second use",
    ]
    assert all(str(file) in row.origin for row in rows)
    as_json = '["a", {"backend": "b", "promote": "never"}]'
    found = load_configuration(file=file, environ={"KVDOCK_TIERS": as_json})
    assert found.tiers[1] == Tier("b", Write.BEHIND, Promote.NEVER)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["a", "a"], "'a' is given twice"),
        ([{"backend": "a", "writ": "behind"}], "no 'writ'. Did you mean 'write'"),
        ([{"backend": "a", "write": "behnd"}], "tier 'a': 'behnd'.*'behind'"),
        ([{"backend": "a", "promote": 3}], "tier 'a': 3 is not known"),
        ([{"write": "behind"}], "tier 1 names no backend"),
        ([3], "3 is not a tier"),
        (7, "7 is not a list"),
        ("[1", "is not JSON"),
        ([{"backend": "a", "write": "never"}], "no tier is written"),
    ],
)
def test_what_is_no_tier_is_rejected_by_name(given: object, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        read_tiers(given)


def test_a_message_says_where_tiers_come_from() -> None:
    with pytest.raises(SettingsError, match=r"tiers \(environment KVDOCK_TIERS\)"):
        load_configuration(environ={"KVDOCK_TIERS": "a,a"})
    with pytest.raises(SettingsError, match="Did you mean 'KVDOCK_TIERS'"):
        load_configuration(environ={"KVDOCK_TIER": "a"})
