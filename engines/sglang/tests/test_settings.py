"""What an operator says, checked before anything is attached."""

from __future__ import annotations

import re

import pytest

from kvdock.errors import SettingsError
from kvdock_sglang.settings import GIVES_UP_S, collect

FILE: dict[str, object] = {"plugin": "file", "root": "/x"}


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"routes": {"manba": "file"}}, "no pool 'manba'. Did you mean 'mamba'?"),
        ({"routes": {"kvcache": "file"}}, "no pool 'kvcache'"),
        (
            {"backends": {"fil": {"x": 1}}},
            "backend 'fil', which stores no pool. Did you mean 'file'?",
        ),
        (
            {"backends": {"mooncake": {}}},
            "'mooncake', which stores no pool. Pools go to file",
        ),
        (
            {"observers": {"metrics": {}}},
            "observer 'metrics', which is not switched on. Add 'metrics'",
        ),
    ],
)
def test_a_name_that_names_nothing_is_rejected(
    more: dict[str, object], what: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(what)):
        collect({**FILE, **more})


def test_settings_of_a_backend_that_a_route_names_are_taken() -> None:
    given = collect(
        {
            **FILE,
            "routes": {"deepseek_v4_c4_state": "mooncake"},
            "backends": {"mooncake": {"master": "h:1"}, "file": {"threads": 3}},
        }
    )
    assert given.backends == {
        "mooncake": {"master": "h:1"},
        "file": {"root": "/x", "threads": 3},
    }


@pytest.mark.parametrize(
    ("name", "most"), [("exists", 9.9), ("get", 4.9), ("put", 4.9), ("close", 9.9)]
)
@pytest.mark.parametrize("far", [10, "1 min"])
def test_calls_must_end_before_sglang_gives_up_on_its_threads(
    name: str, most: float, far: object
) -> None:
    with pytest.raises(SettingsError, match=f"core.deadlines.{name} is .* gives up"):
        collect({**FILE, "core": {"deadlines": {name: far}}})
    given = collect({**FILE, "core": {"deadlines": {name: most}}})
    assert getattr(given.core.deadlines, name) == pytest.approx(most)


@pytest.mark.parametrize("name", ["get", "put"])
def test_two_calls_of_one_transfer_end_before_sglang_gives_up(name: str) -> None:
    """A target and its draft are moved by calls of their own, one after the other."""
    with pytest.raises(SettingsError, match="makes 2 such calls in a row"):
        collect({**FILE, "core": {"deadlines": {name: 5}}})
    unsaid = collect(FILE).core.deadlines
    assert 2 * (getattr(unsaid, name) + unsaid.grace) < GIVES_UP_S


def test_a_grace_that_takes_the_time_of_calls_is_named() -> None:
    with pytest.raises(SettingsError, match=r"shorter core\.deadlines\.grace"):
        collect({**FILE, "core": {"deadlines": {"grace": 6}}})
    quick = {"get": 1, "put": 1}
    with pytest.raises(SettingsError, match=r"core\.deadlines\.exists is 9 s"):
        collect({**FILE, "core": {"deadlines": {"exists": 9, "grace": 2, **quick}}})


def test_the_salt_is_never_shown() -> None:
    given = collect({**FILE, "salt": "hush-hush"})
    assert given.own.salt == "hush-hush"
    assert "hush" not in repr(given)
    with pytest.raises(SettingsError) as rejected:
        collect({**FILE, "salt": ["hush-hush"]})
    assert "salt" in str(rejected.value)
    assert "hush" not in str(rejected.value)


def test_a_variable_that_is_no_setting_stops_the_doctor_and_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVDOCK_COER__PAGE_EVENTS", "1")
    what = "environment variable KVDOCK_COER__PAGE_EVENTS is not a setting"
    with pytest.raises(SettingsError, match=what):
        collect(FILE)
    assert collect(FILE, lenient=True).own.plugin == "file"
    assert what in caplog.text
