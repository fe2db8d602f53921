"""What an engine's mapping says to its adapter, the core and the plugins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from kvdock.config import (
    Deadlines,
    EngineSettings,
    Promote,
    StagingPolicy,
    Tier,
    Write,
    check_deadlines,
    explain,
    load_configuration,
    load_engine_configuration,
    option,
    read_tiers,
    split_settings,
)
from kvdock.config.sources import ENGINE_DEFAULT
from kvdock.errors import SettingsError


@attrs.frozen(kw_only=True)
class OwnSettings(EngineSettings):
    plugin: tuple[str, ...] = option((), help="Backends.")


DEFAULTS = {"core": {"calls": {"staging": "always"}, "deadlines": {"get": "4 s"}}}


def own(**more: object) -> OwnSettings:
    return split_settings(OwnSettings, {"plugin": ["a"], **more}, where="here")[0]


def test_keys_of_neither_adapter_nor_engine_are_the_plugins() -> None:
    given = {"plugin": ["a"], "salt": "s", "root": "/x", "of_engine": 1}
    mine, rest = split_settings(
        OwnSettings, given, where="here", engine_keys={"of_engine"}
    )
    assert (mine.plugin, mine.salt) == (("a",), "s")
    assert rest == {"root": "/x"}


def test_a_mapping_without_a_plugin_says_what_to_add() -> None:
    mine, _ = split_settings(OwnSettings, {}, where="here")
    with pytest.raises(SettingsError, match=r'does not say.*Add "plugin".*"tiers"'):
        load_engine_configuration(mine, mine.plugin, {}, environ={})


def test_an_engine_takes_tiers_from_each_source_and_its_own_last() -> None:
    environ = {"KVDOCK_TIERS": "a, b"}
    bare, _ = split_settings(OwnSettings, {}, where="here")
    found = load_engine_configuration(bare, (), {}, environ=environ)
    assert [one.backend for one in found.tiers] == ["a", "b"]
    said, _ = split_settings(
        OwnSettings,
        {"tiers": ["b", {"backend": "c", "write": "never"}], "backends": {"c": {}}},
        where="here",
    )
    found = load_engine_configuration(said, (), {}, environ=environ)
    assert [one.backend for one in found.tiers] == ["b", "c"]
    with pytest.raises(SettingsError, match=r"'d', which stores no pool.*go to b, c"):
        load_engine_configuration(
            attrs.evolve(said, backends={"d": {}}), (), {}, environ={}
        )


def test_plugin_and_tiers_exclude_each_other() -> None:
    environ = {"KVDOCK_TIERS": "a,b"}
    with pytest.raises(SettingsError, match=r"both plugin and tiers \(.*KVDOCK_TIERS"):
        load_engine_configuration(own(), ["a"], {}, environ=environ)
    bare, _ = split_settings(OwnSettings, {"tiers": ["a"]}, where="here")
    with pytest.raises(SettingsError, match="root: with tiers it is not known"):
        load_engine_configuration(bare, (), {"root": "/x"}, environ={})


def test_an_engines_default_is_weaker_than_every_source() -> None:
    found = load_engine_configuration(own(), ["a"], {}, defaults=DEFAULTS, environ={})
    assert found.core.calls.staging is StagingPolicy.ALWAYS
    assert found.core.deadlines.get == 4
    assert found.origins["core.deadlines.get"] == ENGINE_DEFAULT
    said = load_engine_configuration(
        own(core={"calls": {"staging": "routed"}}),
        ["a"],
        {},
        defaults=DEFAULTS,
        environ={"KVDOCK_CORE__DEADLINES__GET": "2 s"},
    )
    assert said.core.calls.staging is StagingPolicy.ROUTED
    assert said.core.deadlines.get == 2
    assert DEFAULTS["core"]["deadlines"] == {"get": "4 s"}


def test_what_is_left_over_belongs_to_the_only_plugin() -> None:
    found = load_engine_configuration(
        own(backends={"a": {"threads": 3}}), ["a"], {"root": "/x"}, environ={}
    )
    assert found.backends == {"a": {"threads": 3, "root": "/x"}}


def test_what_is_left_over_is_rejected_where_there_are_several_plugins() -> None:
    with pytest.raises(SettingsError, match=r"root: with the plugins a, b .*backends"):
        load_engine_configuration(own(), ["a", "b"], {"root": "/x"}, environ={})
    found = load_engine_configuration(
        own(backends={"b": {"root": "/x"}}), ["a", "b"], {}, environ={}
    )
    assert found.backends == {"b": {"root": "/x"}}


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"backends": {"aa": {}}}, "'aa', which stores no pool. Did you mean 'a'?"),
        ({"backends": {"zz": {}}}, "'zz', which stores no pool. Pools go to a, c."),
        ({"observers": {"metrics": {}}}, "'metrics', which is not switched on. Add"),
        ({"backends": {"a": 3}}, "section 'backends' is not made of settings"),
    ],
)
def test_settings_without_an_effect_are_rejected(
    more: Mapping[str, object], what: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(what)):
        load_engine_configuration(
            own(routes={"draft": "c"}, **more), ["a"], {}, environ={}
        )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"exists": 10.0}, r"exists is 10 s, and E gives up on its queue after 10 s"),
        ({"get": 5.0}, r"E makes 2 such calls in a row.*less than 4\.95 s"),
        ({"get": 1.0, "grace": 4.0}, r"shorter core\.deadlines\.grace"),
    ],
)
def test_deadlines_longer_than_the_engine_waits_are_rejected(
    given: Mapping[str, float], what: str
) -> None:
    def check(deadlines: Deadlines) -> None:
        check_deadlines(
            deadlines,
            engine="E",
            waits_for="its queue",
            limit_s=10,
            calls={"exists": 1, "get": 2},
        )

    check(Deadlines(get=4.9))
    with pytest.raises(SettingsError, match=what):
        check(Deadlines(**{"get": 1.0, **given}))


def test_the_nearest_is_written_at_once_and_the_others_behind() -> None:
    near, disk, far = read_tiers(["near", "disk", "far"])
    assert near == Tier("near", Write.THROUGH, Promote.SECOND)
    assert disk == Tier("disk", Write.BEHIND, Promote.SECOND)
    assert far == Tier("far", Write.BEHIND, Promote.SECOND)


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
