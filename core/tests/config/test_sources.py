from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from kvdock.config.core import (
    CallSettings,
    CoreSettings,
    Integrity,
    StagingPolicy,
)
from kvdock.config.fields import (
    Alias,
    ForeignFile,
    count,
    duration,
    option,
    secret,
    size,
)
from kvdock.config.schema import structure
from kvdock.config.sources import Setting, explain, load_configuration
from kvdock.errors import SettingsError
from kvdock.units import parse_seconds


@attrs.frozen
class StoreSettings:
    server: str = option(help="Where it listens.")
    token: str = secret("", help="Who we are.")
    space: int = size(1 << 20, help="How much it may take.")


@attrs.frozen
class ForeignLimits:
    room: int = size(1 << 10, help="How much.", alias=Alias(env="THEIR_ROOM"))


@attrs.frozen
class ForeignSettings:
    server: str = option("", help="Where.", alias=Alias(env="THEIR_SERVER"))
    token: str = secret("", help="Who.", alias=Alias(env="THEIR_TOKEN"))
    limits: ForeignLimits = attrs.field(factory=ForeignLimits)


SCHEMAS = {"backends.store": StoreSettings}


def rows(*args: object, **kwargs: object) -> dict[str, Setting]:
    configuration = load_configuration(*args, **kwargs)  # type: ignore[arg-type]
    return {row.path: row for row in explain(configuration, SCHEMAS)}


def test_the_stronger_source_wins_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text(
        '[core]\nintegrity = "off"\n[core.deadlines]\nget = "1 s"\nput = "2 s"\n'
        'exists = "3 s"\n'
    )
    environ = {
        "KVDOCK_CONFIG": str(file),
        "KVDOCK_CORE__DEADLINES__PUT": "20 ms",
        "KVDOCK_CORE__DEADLINES__EXISTS": "30 ms",
        "HOME": "/",
    }
    engine = {"core": {"deadlines": {"exists": 0.5}}}
    core = load_configuration(engine, environ=environ).core
    assert core.integrity is Integrity.OFF
    assert core.deadlines.get == 1.0
    assert core.deadlines.put == 0.02
    assert core.deadlines.exists == 0.5
    assert core.deadlines.clear == CoreSettings().deadlines.clear
    assert {
        path: row.origin
        for path, row in rows(
            engine, environ=environ | {"KVDOCK_BACKENDS__STORE__SERVER": "x"}
        ).items()
        if row.origin != "default"
    } == {
        "core.integrity": f"file {file}",
        "core.deadlines.get": f"file {file}",
        "core.deadlines.put": "environment KVDOCK_CORE__DEADLINES__PUT",
        "core.deadlines.exists": "engine",
        "backends.store.server": "environment KVDOCK_BACKENDS__STORE__SERVER",
    }


def test_a_value_beside_settings_of_its_name_is_refused() -> None:
    given = {"KVDOCK_CORE__DEADLINES": "5 s", "KVDOCK_CORE__DEADLINES__GET": "2 s"}
    with pytest.raises(SettingsError) as refused:
        load_configuration(environ=given)
    assert str(refused.value) == (
        "core.deadlines is a group of settings in environment "
        "KVDOCK_CORE__DEADLINES__GET, and one value in environment "
        "KVDOCK_CORE__DEADLINES. Remove the one that is wrong."
    )


def test_a_setting_without_a_name_is_refused() -> None:
    engine: Any = {"backends": {"file": {3: "x"}}}
    with pytest.raises(SettingsError, match="settings have names, not 3"):
        load_configuration(engine, environ={})


def test_what_kubernetes_sets_for_services_of_our_name_is_no_setting() -> None:
    address = "10.0.0.11"
    service = {
        "SERVICE_HOST": address,
        "SERVICE_PORT": "8080",
        "SERVICE_PORT_HTTP_METRICS": "8080",
        "PORT": f"tcp://{address}:8080",
        "PORT_8080_TCP": f"tcp://{address}:8080",
        "PORT_8080_TCP_PROTO": "tcp",
        "PORT_8080_TCP_PORT": "8080",
        "PORT_8080_TCP_ADDR": address,
        "PORT_53_UDP": f"udp://{address}:53",
    }
    environ = {
        f"{name}_{rest}": value
        for name in ("KVDOCK", "KVDOCK_MASTER", "KVDOCK_FILE_STORE")
        for rest, value in service.items()
    }
    assert load_configuration(environ=environ) == load_configuration(environ={})


@pytest.mark.parametrize(
    "name", ["KVDOCK_PORT", "KVDOCK_BACKENDS_STORE_PORT", "KVDOCK_SERVICE"]
)
def test_what_only_looks_like_a_service_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is not a setting"):
        load_configuration(environ={name: "50051"})


def test_an_engine_warns_of_a_variable_that_is_no_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"KVDOCK_COER__DEADLINES__GET": "2 s", "KVDOCK_CORE__DEADLINES__GET": "9"}
    found = load_configuration(environ=environ, lenient=True)
    assert found.core.deadlines.get == 9
    assert "KVDOCK_COER__DEADLINES__GET is not a setting" in caplog.text


def test_a_setting_may_be_called_like_what_kubernetes_sets() -> None:
    environ = {
        "KVDOCK_BACKENDS__STORE__PORT": "tcp://h:1",
        "KVDOCK_BACKENDS__STORE__SERVICE_HOST": "h",
    }
    found = load_configuration(environ=environ).backends["store"]
    assert found == {"port": "tcp://h:1", "service_host": "h"}


@pytest.mark.parametrize(
    ("engine", "environ", "message"),
    [
        ({"cores": {}}, {}, "engine: unknown section 'cores'.*'core'"),
        ({"tiers": {}}, {}, "engine: tiers is a list of backends, not a section"),
        (
            {"core": {"deadlines": {"gte": 1}}},
            {},
            r"core: unknown setting 'deadlines\.gte' \(engine\).*'get'",
        ),
        (
            {},
            {"KVDOCK_CORE__INTEGRTY": "off"},
            "KVDOCK_CORE__INTEGRTY.*'integrity'",
        ),
        (
            {},
            {"KVDOCK_PLUGIN": "x"},
            "KVDOCK_PLUGIN is not a setting.*'KVDOCK_PLUGINS'",
        ),
        (
            {},
            {"KVDOCK_CORE__INTEGRITY": "offf"},
            r"integrity \(environment KVDOCK_CORE__INTEGRITY\): 'offf' is.*'off'",
        ),
        (
            {"core": {"deadlines": {"get": "soon"}}},
            {},
            r"deadlines\.get \(engine\): 'soon' is not a duration",
        ),
        (
            {"core": {"calls": {"max_concurrent_calls": 0}}},
            {},
            r"calls\.max_concurrent_calls \(engine\) must be at least 1, not 0",
        ),
        ({"core": {"deadlines": 5}}, {}, "'deadlines' is a group"),
        ({"core": 5}, {}, "not made of settings"),
        ({"backends": {"store": 5}}, {}, "not made of settings"),
    ],
)
def test_what_is_wrong_is_refused_by_name_with_the_way_out(
    engine: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_configuration(engine, environ=environ)


@pytest.mark.parametrize(
    ("build", "name", "wrong", "right"),
    [
        (CoreSettings, "integrity", "offf", Integrity.OFF),
        (CallSettings, "staging", "alway", StagingPolicy.ALWAYS),
    ],
)
def test_a_setting_with_a_list_of_words_takes_no_other_even_from_code(
    build: type, name: str, wrong: str, right: StrEnum
) -> None:
    with pytest.raises(SettingsError, match=f"{wrong!r} is not known.*{right.value!r}"):
        build(**{name: wrong})
    for value in (None, 3, ""):
        with pytest.raises(SettingsError, match=f"Known are .*{right.value}"):
            build(**{name: value})
    for given in (right, right.value):
        assert getattr(build(**{name: given}), name) is right


def test_a_backend_that_is_not_there_gets_no_settings() -> None:
    engine = {"backends": {"stroe": {"server": "x"}}}
    with pytest.raises(SettingsError, match=r"'stroe'.*\(engine\).*'store'"):
        rows(engine, environ={})


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.ini", "", "neither TOML nor JSON"),
        ("b.toml", "[", "cannot be read"),
        ("c.json", "[]", "holds no settings but a list"),
        ("d.json", "[" * 100_000, "cannot be read"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(SettingsError, match=message):
            load_configuration(file=tmp_path / name, environ={})


def test_a_missing_file_is_reported_as_missing_with_what_names_it(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "none"
    with pytest.raises(SettingsError, match=r"none is missing\. Create it\."):
        load_configuration(file=missing, environ={})
    with pytest.raises(SettingsError, match="which KVDOCK_CONFIG names, is missing"):
        load_configuration(environ={"KVDOCK_CONFIG": str(missing)})


def test_variables_of_others_are_the_weakest_source_and_are_named(
    tmp_path: Path,
) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[backends.foreign.limits]\nroom = "2 KiB"\n')
    others = {"THEIR_SERVER": "theirs", "THEIR_TOKEN": "sesame", "THEIR_ROOM": "5 KiB"}

    def found(environ: dict[str, str], engine: dict[str, object]) -> dict[str, str]:
        configuration = load_configuration(engine, environ=environ)
        schemas = {"backends.foreign": ForeignSettings}
        return {
            row.path.removeprefix("backends.foreign."): f"{row.value}, {row.origin}"
            for row in explain(configuration, schemas, environ=environ)
            if row.path.startswith("backends")
        }

    assert found(others, {}) == {
        "server": "theirs, environment THEIR_SERVER",
        "token": "<hidden>, environment THEIR_TOKEN",
        "limits.room": "5 KiB, environment THEIR_ROOM",
    }
    ours = {"KVDOCK_BACKENDS__FOREIGN__SERVER": "ours", "KVDOCK_CONFIG": str(file)}
    engine: dict[str, object] = {"backends": {"foreign": {"token": ""}}}
    assert found({**others, **ours}, engine) == {
        "server": "ours, environment KVDOCK_BACKENDS__FOREIGN__SERVER",
        "token": ", engine",
        "limits.room": f"2 KiB, file {file}",
    }


def translated(content: Mapping[str, object]) -> Mapping[str, object]:
    """Read a file of others, which calls a server an address."""
    return {"server": content["address"]} if "address" in content else {}


@attrs.frozen(kw_only=True)
class FiledSettings:
    foreign_files: ClassVar[tuple[ForeignFile, ...]] = (
        ForeignFile(variable="THEIR_FILE", read=translated),
        ForeignFile(variable="THEIR_OTHER_FILE", read=translated),
    )

    server: str = option("", help="Where.", alias=Alias(env="THEIR_SERVER"))
    room: int = size(1 << 10, help="How much.", alias=Alias(env="THEIR_ROOM"))


def test_a_file_of_others_is_stronger_than_their_variables_and_weaker_than_ours(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.conf"
    one.write_text('{"address": "one", "colour": "red"}')
    two.write_text('{"address": "two"}')
    environ = {"THEIR_SERVER": "variable", "THEIR_ROOM": "5 KiB"}

    def found(**ours: str) -> tuple[str, str]:
        given = load_configuration(environ={**environ, **ours})
        schemas = {"backends.f": FiledSettings}
        rows = {r.path: r for r in explain(given, schemas, environ=environ)}
        assert rows["backends.f.room"].origin == "environment THEIR_ROOM"
        row = rows["backends.f.server"]
        return row.value, row.origin

    assert found() == ("variable", "environment THEIR_SERVER")
    environ["THEIR_FILE"] = str(one)
    assert found() == ("one", f"file {one}, named by THEIR_FILE")
    environ["THEIR_OTHER_FILE"] = str(two)
    assert found() == ("two", f"file {two}, named by THEIR_OTHER_FILE")
    ours = "KVDOCK_BACKENDS__F__SERVER"
    assert found(**{ours: "ours"}) == ("ours", f"environment {ours}")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"address": 3}'])
def test_a_file_of_others_that_cannot_be_read_is_named_with_its_variable(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "theirs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError) as told:
        structure(
            FiledSettings, {}, where="backend 'f'", environ={"THEIR_FILE": str(path)}
        )
    assert f"file {path}, named by THEIR_FILE" in told.value.what


@attrs.frozen(kw_only=True)
class Fleet:
    servers: tuple[str, ...] = option((), help="Where they are.")


def test_no_password_in_a_list_of_addresses_is_shown() -> None:
    servers = ["redis://me:se@same@one:1/0", "redis://two:1/0", "redis://three/a@b"]
    given = load_configuration({"backends": {"f": {"servers": servers}}}, environ={})
    found = {row.path: row for row in explain(given, {"backends.f": Fleet})}
    shown = ["redis://<hidden>@one:1/0", "redis://two:1/0", "redis://three/a@b"]
    assert found["backends.f.servers"].value == ", ".join(shown)
    assert found["backends.f.servers"].typed == shown


def test_secrets_are_never_shown() -> None:
    store = {"server": "redis://me:sesame@host:1/0", "token": "sesame"}
    found = rows({"backends": {"store": store}}, environ={})
    assert found["backends.store.token"].value == "<hidden>"
    assert found["backends.store.server"].value == "redis://<hidden>@host:1/0"
    assert not any("sesame" in f"{row.value} {row.typed}" for row in found.values())
    assert "sesame" not in repr(structure(StoreSettings, store, where="store")).replace(
        store["server"], ""
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250 ms", 0.25),
        ("5s", 5),
        ("1.5", 1.5),
        (2, 2.0),
        ("2 min", 120),
        ("10us", 1e-5),
    ],
)
def test_durations_have_units(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@attrs.frozen(kw_only=True)
class Typed:
    """Settings of every kind that the environment can only give as text."""

    ssd_offload: bool = option(False, help="Whether.")
    threads: int = count(4, least=1, most=64, help="How many.")
    room: int = size(1 << 10, help="How much.")
    wait: float = duration("1 s", help="How long.")
    root: Path = option(Path("/"), help="Where.")
    names: tuple[str, ...] = option((), help="Which.")

    def __attrs_post_init__(self) -> None:
        """Reject settings that are right one by one and do not fit together."""
        if self.ssd_offload and not self.names:
            raise SettingsError("ssd_offload needs names")


def shown(**given: str) -> dict[str, Setting]:
    environ = {f"KVDOCK_BACKENDS__TYPED__{k.upper()}": v for k, v in given.items()}
    configuration = load_configuration(environ=environ)
    found = explain(configuration, {"backends.typed": Typed}, environ=environ)
    return {row.path.rpartition(".")[2]: row for row in found}


def test_settings_are_shown_as_their_schema_reads_them() -> None:
    found = shown(
        ssd_offload="1", threads="8", room="5 KiB", wait="250 ms", root="/a", names="x"
    )
    assert (found["ssd_offload"].value, found["ssd_offload"].typed) == ("true", True)
    assert (found["threads"].value, found["threads"].typed) == ("8", 8)
    assert (found["room"].value, found["room"].typed) == ("5 KiB", 5120)
    assert (found["wait"].typed, found["wait"].unit) == (0.25, "seconds")
    assert found["root"].typed == "/a"
    assert found["names"].typed == ["x"]
    defaults = shown()
    assert defaults["ssd_offload"].typed is False
    assert (defaults["room"].typed, defaults["room"].unit) == (1024, "bytes")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threads": "x"}, r"threads \(environment KVDOCK_.*\): 'x' is not a whole"),
        ({"threads": "99"}, r"threads \(environment .*\) must be at most 64, not 99"),
        ({"ssd_offload": "maybe"}, "'maybe' is neither true nor false"),
        ({"ssd_offload": "on"}, "backends.typed: ssd_offload needs names"),
    ],
)
def test_values_that_a_backend_does_not_take_are_not_shown_as_if_it_did(
    given: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        shown(**given)


@pytest.mark.parametrize(
    ("variable", "right"),
    [
        ("KVDOCK_FILE__ROOT", "KVDOCK_BACKENDS__FILE__ROOT"),
        ("KVDOCK_FILE_ROOT", "KVDOCK_BACKENDS__FILE__ROOT"),
        ("KVDOCK_FIEL__ROOT", "KVDOCK_BACKENDS__FILE__ROOT"),
        ("KVDOCK_METRICS__PORT", "KVDOCK_OBSERVERS__METRICS__PORT"),
        ("KVDOCK_DEADLINES__GET", "KVDOCK_CORE__DEADLINES__GET"),
    ],
)
def test_a_variable_without_its_section_is_answered_with_the_whole_name(
    variable: str, right: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_configuration(environ={variable: "x"})
    assert caught.value.what == f"environment variable {variable} is not a setting"
    assert caught.value.fix == f"Did you mean {right}?"


@pytest.mark.parametrize(
    "value", [None, [], {}, b"1", True, "", "9" * 5000, float("inf"), float("nan"), -1]
)
@pytest.mark.parametrize(
    ("group", "name", "wanted"),
    [
        ("deadlines", "get", "is not a duration"),
        ("calls", "batch_bytes", "is not a size in bytes"),
        ("calls", "max_concurrent_calls", "is not a whole number|must be at least 1"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_the_words_of_its_setting(
    group: str, name: str, wanted: str, value: object
) -> None:
    with pytest.raises(SettingsError, match=wanted):
        load_configuration({"core": {group: {name: value}}}, environ={})
