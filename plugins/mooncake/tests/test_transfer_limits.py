"""Timeouts and call sizes with which a call ends before the library's limit."""

from __future__ import annotations

from typing import Any

import pytest

from kvdock_mooncake import connect
from kvdock_mooncake.settings import MooncakeSettings, Protocol
from kvdock_mooncake.transfer_limits import pieces_at_once, warnings

PROGRESS = "MC_TCP_PROGRESS_TIMEOUT_SEC"
STATUS = "MC_TCP_STATUS_TIMEOUT_SEC"
LANES = "MC_TCP_LANES_PER_PEER"


def environment(**given: str) -> dict[str, str]:
    """Return the variables as they are when the first store is set up."""
    environ = dict(given)
    connect.limit_patience(MooncakeSettings(), environ)
    return environ


def test_the_plugins_own_timeouts_end_a_full_call_in_time_without_a_warning() -> None:
    environ = environment()
    assert (environ[PROGRESS], environ[STATUS], environ[LANES]) == ("2", "2", "16")
    assert pieces_at_once(MooncakeSettings(), environ) == 128
    assert not warnings(MooncakeSettings(), environ)


def test_over_rdma_the_timeouts_of_tcp_are_left_alone() -> None:
    environ: dict[str, str] = {}
    settings = MooncakeSettings(protocol=Protocol.RDMA)
    connect.limit_patience(settings, environ)
    assert PROGRESS not in environ
    assert pieces_at_once(settings, environ) == 1024
    assert not warnings(settings, {PROGRESS: "100"})


@pytest.mark.parametrize(
    ("given", "pieces", "warning"),
    [
        # 11 pieces at a time, each for at most so many seconds, within 50 s.
        ({PROGRESS: "4"}, 128, ""),
        ({PROGRESS: "5"}, 110, "let 110 pieces"),
        ({STATUS: "25"}, 22, "calls are cut to that; with at most 4 seconds"),
        ({PROGRESS: "50"}, 11, "let 11 pieces"),
        ({PROGRESS: "51"}, 128, f"{PROGRESS}=51 is longer than"),
        # What the library does not understand is its default of 30 s.
        ({STATUS: "0"}, 11, "let 11 pieces"),
        ({STATUS: "-3"}, 11, "let 11 pieces"),
        ({PROGRESS: "soon"}, 11, "let 11 pieces"),
        ({LANES: "4"}, 50, "let 50 pieces"),
        ({LANES: "1"}, 25, "let 25 pieces"),
        ({LANES: "17"}, 50, "let 50 pieces"),
    ],
)
def test_values_of_the_user_cut_calls_or_are_named_in_a_warning(
    given: dict[str, str], pieces: int, warning: str
) -> None:
    environ = environment(**given)
    assert environ | given == environ, "what the user has set stays"
    assert pieces_at_once(MooncakeSettings(), environ) == pieces
    said = warnings(MooncakeSettings(), environ)
    assert len(said) == bool(warning)
    assert warning in "".join(said)


def test_more_pieces_than_end_in_time_are_taken_with_a_warning() -> None:
    settings = MooncakeSettings(max_pieces=1024)
    assert pieces_at_once(settings, environment()) == 1024
    (said,) = warnings(settings, environment())
    assert "max_pieces 1024 is more than the 275 pieces" in said
    assert not warnings(MooncakeSettings(max_pieces=275), environment())


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_client_warns_of_the_variables_before_it_joins(
    attached: Any,
    alone: MooncakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(STATUS, "55")
    rig = attached(alone)
    assert f"{STATUS}=55 is longer than a frozen owner may take" in caplog.text
    assert rig.handle.client.in_flight.most == 128
    rig.release()
