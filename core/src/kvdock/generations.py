"""Generations: which weights pages were computed with that changed under an engine.

The weights that an engine starts with are known by their files, and have no generation.
Each time they are replaced at run time a new one begins, which is a part of the
namespace: a page of another generation has another key. One that was given a run and a
version by its operator is the same in all engines of that run. Any other is private:
nothing finds its pages once the engine has left it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

import attrs

from kvdock.errors import KvdockError

_RUN_PREFIX = "run:"


@attrs.frozen(kw_only=True)
class Generation:
    """One state of weights.

    Args:
        run: The operator's name for the engines that have the same weights under the
            same version; "" for a private generation.
        version: Which weights of the run; of a private one a random token.
        weights: What stands for the files that they were loaded from, or "".
    """

    run: str = ""
    version: str
    weights: str = ""

    def __attrs_post_init__(self) -> None:
        """Refuse a generation that says nothing."""
        if not self.version:
            raise KvdockError("a generation without a version would mix all weights")

    @classmethod
    def private(cls) -> Generation:
        """Return one that no other engine has, and none had before."""
        return cls(version=secrets.token_hex(8))

    @classmethod
    def of(cls, record: Mapping[str, object]) -> Generation | None:
        """Return the generation of a namespace's record, or None."""
        try:
            given: Any = json.loads(str(record.get("generation", "")))
            return cls(**given)
        except (ValueError, TypeError, KvdockError):
            return None

    @property
    def text(self) -> str:
        """The text for a namespace: the same for the same generation."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    def __str__(self) -> str:
        """Name it for people."""
        return f"{self.run} {self.version}" if self.run else f"private {self.version}"


def run_of(setting: str) -> str:
    """Return the name of a run that a setting gives, "" for "private".

    >>> run_of("run:policy-3"), run_of("private")
    ('policy-3', '')

    Raises:
        KvdockError: If it is neither.
    """
    name = setting.removeprefix(_RUN_PREFIX).strip()
    if setting.startswith(_RUN_PREFIX) and name:
        return name
    if setting == "private":
        return ""
    raise KvdockError(
        f"generations is {setting!r}", fix='Write "private", or "run:" and a name.'
    )
