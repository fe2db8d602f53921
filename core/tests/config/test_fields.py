"""Settings classes from mappings: what is taken, and how it is refused."""

from __future__ import annotations

import math
import time
import traceback
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvdock.batch import Operation
from kvdock.config.core import CoreSettings, Deadlines
from kvdock.config.fields import Alias, count, duration, option, secret, size
from kvdock.config.schema import structure
from kvdock.errors import SettingsError


@attrs.frozen(kw_only=True)
class Limits:
    room: int = size(1 << 20, help="How much.", alias=Alias(env="ROOM"))
    calls: int = count(1, least=1, help="How many.")


@attrs.frozen(kw_only=True)
class Settings:
    server: str = option(
        "",
        help='Where it listens: "host:port".',
        alias=Alias(env="SERVER", names=("server_address",)),
    )
    token: str = secret("", help="Who we are.")
    share: float = option(0.5, help="How much of it.")
    patience: float = duration("1 s", least="1 ms", most="1 h", help="How long.")
    limits: Limits = attrs.field(factory=Limits)

    def __attrs_post_init__(self) -> None:
        if self.token == self.server != "":
            raise SettingsError(f"{self.token} is the server", fix="Ask for a token.")


def made(given: dict[str, object], **environ: str) -> Settings:
    return structure(Settings, given, where="it", environ=environ)


def test_a_variable_of_others_counts_where_a_setting_is_not_given() -> None:
    assert made({}, SERVER="a:1").server == "a:1"
    assert made({}, ROOM="2 MiB").limits.room == 2 << 20
    assert made({"limits": {"calls": 3}}, ROOM="2 MiB").limits == Limits(
        room=2 << 20, calls=3
    )


def test_a_setting_that_is_given_its_default_is_given() -> None:
    assert made({"server": ""}, SERVER="a:1").server == ""
    assert made({"limits": {"room": 1 << 20}}, ROOM="2 MiB").limits.room == 1 << 20


@attrs.frozen
class Needy:
    server: str = option(help="Where.", alias=Alias(env="SERVER"))


def test_a_variable_of_others_does_for_a_setting_without_a_default() -> None:
    assert structure(Needy, {}, where="it", environ={"SERVER": "a:1"}).server == "a:1"
    with pytest.raises(SettingsError, match="it: setting 'server' is missing"):
        structure(Needy, {}, where="it", environ={})


@attrs.frozen
class Read:
    server: str = option("", help="Where.")
    tenant: int = option(
        0,
        help="Who.",
        alias=Alias(env="TENANT", parse=lambda text: text[1:]),
    )


def test_a_variable_may_be_read_in_a_way_of_its_own() -> None:
    assert structure(Read, {}, where="it", environ={"TENANT": "t7"}).tenant == 7
    with pytest.raises(SettingsError, match=r"tenant \(environment TENANT\): 'x'"):
        structure(Read, {}, where="it", environ={"TENANT": "tx"})


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        (
            {},
            {"ROOM": "lots"},
            r"it: limits\.room \(environment ROOM\): 'lots' is not a",
        ),
        ({"share": "half"}, {}, "it: share: 'half' is not a number"),
        ({"share": True}, {}, "it: share: True is not a number"),
        ({"share": float("nan")}, {}, "it: share: nan is not a number"),
        ({"limits": {"calls": 0}}, {}, r"it: limits\.calls must be at least 1, not 0"),
        ({"patience": "1 us"}, {}, "it: patience must be at least 1 ms, not 0.001 ms"),
        ({"patience": "2 h"}, {}, "it: patience must be at most 3600 s, not 7200 s"),
        ({"server": 5, "share": "x"}, {}, "it: server: 5 is not text; share: 'x' is"),
        ({"server_address": "a:1"}, {}, "Here it is 'server': Where it listens"),
        ({"severr": "a:1"}, {}, "Did you mean 'server'"),
        ({"limits": {"romm": 1}}, {}, r"setting 'limits\.romm'.*Did you mean 'room'"),
        ({"limits": 3}, {}, "'limits' is a group"),
    ],
)
def test_a_refusal_names_the_setting_and_its_source(
    given: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        made(given, **environ)


@pytest.mark.parametrize(
    "given",
    [
        {"token": 1234567890},
        {"token": ["1234567890"]},
        {"token": "1234567890", "server": "1234567890"},
        {"tokn": "1234567890"},
        {"token": "1234567890", "share": "x"},
    ],
)
def test_no_refusal_shows_a_secret(given: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as caught:
        made(given)
    assert "1234567890" not in "".join(traceback.format_exception(caught.value))
    if caught.value.fix:
        assert "1234567890" not in caught.value.fix


def test_what_does_not_fit_together_is_said_with_its_way_out() -> None:
    with pytest.raises(SettingsError) as caught:
        made({"token": "the-same-for-both", "server": "the-same-for-both"})
    assert str(caught.value) == "it: <hidden> is the server. Ask for a token."


@pytest.mark.parametrize("token", ["e", "is", "hidden", "the server"])
def test_no_gaps_show_a_short_secret(token: str) -> None:
    with pytest.raises(SettingsError) as caught:
        made({"token": token, "server": token})
    assert str(caught.value) == "it: <hidden>. Ask for a token."


@attrs.frozen(kw_only=True)
class Place:
    root: Path = option(help="Where it lies.")


def test_a_home_that_nobody_has_is_refused_with_the_way_out() -> None:
    with pytest.raises(SettingsError, match="'~nobody_here/kv' begins with no known"):
        structure(Place, {"root": "~nobody_here/kv"}, where="it")


CALLS = [one.name for one in attrs.fields(Deadlines) if one.name != "grace"]

BOUNDED = [("deadlines", name) for name in CALLS] + [
    ("breaker", name) for name in ("backoff", "max_backoff", "probe_timeout")
]


@pytest.mark.parametrize(("group", "name"), BOUNDED)
@pytest.mark.parametrize("value", [0, "0 s", "0.5 ms", 0.0])
def test_nothing_can_be_done_in_no_time(
    group: str, name: str, value: str | float
) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be at least 1 ms, not 0"):
        structure(CoreSettings, {group: {name: value}}, where="core")


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, "inf", "nan"])
def test_no_deadline_is_endless(value: Any) -> None:
    with pytest.raises(SettingsError, match="is not a duration"):
        structure(CoreSettings, {"deadlines": {"get": value}}, where="core")
    with pytest.raises(SettingsError, match="is not a duration"):
        attrs.evolve(Deadlines(), get=value)


def test_one_method_turns_an_operation_into_a_deadline() -> None:
    deadlines = Deadlines()
    now = time.monotonic()
    assert deadlines.until(Operation.CLEAR) - now == pytest.approx(8, abs=0.5)
    assert deadlines.until("attach") - now == pytest.approx(120, abs=0.5)
    assert deadlines.until("close", 3.0) - now == pytest.approx(3, abs=0.5)
    assert deadlines.until("delete", factor=2) - now == pytest.approx(10, abs=0.5)
    assert deadlines.until("close", math.inf) == math.inf
    with pytest.raises(AttributeError, match="gett"):
        deadlines.until("gett")
