"""Ask what may take long, or never answer, whether it can work here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from kvdock import AttachConfig, Backend, Finding
from kvdock.errors import KvdockError
from kvdock.plugin import run_probe
from kvdock.resilience import LateError, run_within

PROBE_S = 30.0
"""Time for a backend's probe where no option says another."""

Ask = Callable[[], Iterable[Finding]]


def ask_within(
    timeout_s: float, ask: Ask, hint: str = "Look for what it waits for."
) -> Iterable[Finding]:
    """Ask on a thread of its own, so that one that hangs is a finding."""
    deadline_s = time.monotonic() + timeout_s
    try:
        return run_within(deadline_s, lambda: run_probe(ask), "asking")
    except LateError:
        what = f"no answer within {timeout_s:g} s"
        return (Finding(ok=False, what=what, hint=hint),)


def require_ready(
    backend: Backend, settings: Mapping[str, object], advice: str = ""
) -> None:
    """Raise what a backend finds wrong before anything is stored in it.

    Without this, a disk without room shows as pages that were refused.

    Raises:
        SettingsError: If the settings are wrong.
        KvdockError: If its probe finds a problem.
    """
    config = AttachConfig(settings=backend.settings(settings))
    for finding in ask_within(PROBE_S, lambda: backend.probe(config)):
        if not finding.ok:
            raise KvdockError(
                f"backend {backend.name!r} cannot store pages here: {finding.what}",
                fix=" ".join(filter(None, (finding.hint, advice))),
            )
