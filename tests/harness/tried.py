"""Plugins that are installed, tried once: each command would try all of them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from kvdock.plugin import (
    BACKENDS_GROUP,
    COMMANDS_GROUP,
    OBSERVERS_GROUP,
    TRIAL_S,
    Candidate,
    PluginProblem,
    list_entry_points,
    try_each,
)
from kvdock_cli.commands import doctor
from kvdock_cli.commands import list as listing

if TYPE_CHECKING:
    import pytest


@cache
def _sound() -> frozenset[Candidate]:
    groups = (BACKENDS_GROUP, OBSERVERS_GROUP, doctor.GROUP, COMMANDS_GROUP)
    found = [one for group in groups for one in list_entry_points(group)]
    return frozenset(found) - try_each(found).keys()


def try_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands of this process try nothing but what a test installs itself.

    Called before the test installs anything.
    """
    sound = _sound()

    def rest(
        candidates: Sequence[Candidate], timeout_s: float = TRIAL_S
    ) -> dict[Candidate, PluginProblem]:
        return try_each([one for one in candidates if one not in sound], timeout_s)

    for module in (doctor, listing):
        monkeypatch.setattr(module, "try_each", rest)
