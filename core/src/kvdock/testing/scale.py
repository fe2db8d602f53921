"""How slow the store under test is, and what follows for a test."""

from __future__ import annotations

import attrs

from kvdock.errors import SettingsError

_LARGEST = 1000.0


def _check(_: object, __: object, value: float) -> None:
    if not 1.0 <= value <= _LARGEST:
        raise SettingsError(
            f"a store cannot be {value:g} times as slow as a local one",
            fix=f"Give a scale from 1 to {_LARGEST:g}.",
        )


@attrs.frozen
class Scale:
    """Return how many times slower than a local store the one under test is.

    A slow store gets more time for each call and fewer of the calls that only
    repeat what was tried already. What is compared stays the same.

    Args:
        factor: 1 for a local store; about 10 for a server that is written in
            Python.
    """

    factor: float = attrs.field(default=1.0, converter=float, validator=_check)

    def seconds(self, usual_s: float) -> float:
        """Return how long something may take that usually takes `usual_s`."""
        return usual_s * self.factor

    def count(self, usual: int, least: int = 1) -> int:
        """Return how often to repeat what is usually done `usual` times."""
        return max(min(least, usual), round(usual / self.factor))
