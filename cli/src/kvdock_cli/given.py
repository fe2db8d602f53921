"""Settings as they are given on the command line."""

from __future__ import annotations

from collections.abc import Iterable

from kvdock_cli.output import UsageProblem


def settings_of(pairs: Iterable[str]) -> dict[str, str]:
    """Read settings that are given as KEY=VALUE.

    Raises:
        UsageProblem: If one is not, or a key is given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageProblem(f"{pair!r} is no setting", fix="Write --set KEY=VALUE.")
        if key in found:
            raise UsageProblem(f"setting {key!r} is given twice")
        found[key] = value
    return found
