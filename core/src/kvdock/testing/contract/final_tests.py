"""The seal: what of a suite is its author's to say, and what is not.

Looked at when a class is made and again when its tests are collected: a
decorator marks a class only after it was made.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvdock.errors import KvdockError
from kvdock.testing.cases import is_contract_test

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OPEN = frozenset({"plugin", "config", "small", "oracle", "tiers"}) | frozenset(
    {"tidy", "scale", "large_objects", "stays_s"}
)
"""What an author says; everything else of a suite is sealed."""

_QUIET = frozenset({"skip", "skipif", "xfail"})
"""Marks by which a test ends without having passed or failed."""


class SealedError(KvdockError):
    """A test of the contract was overridden without saying why it fails."""


def contract_of(suite: type) -> Mapping[str, object]:
    """Return the tests of the contract that a suite has, by name."""
    return {
        name: thing
        for base in suite.__mro__
        for name, thing in vars(base).items()
        # From the author's class down to the contract: the last one stays.
        if is_contract_test(thing)
    }


def check_seal(suite: type, machinery: Mapping[str, object]) -> None:
    """Reject a class that changes the contract without a reason.

    What counts is what Python finds under a name, whichever base it is from.
    """
    for name, own in machinery.items():
        if inspect.getattr_static(suite, name) is not own:
            raise SealedError(
                f"{suite.__name__} overrides {name}, which belongs to the contract",
                fix=f"Yours to say are {', '.join(sorted(OPEN))}.",
            )
    for base in suite.__mro__:
        quiet = _names(_marks(vars(base).get("pytestmark"))) & _QUIET
        if quiet:
            raise SealedError(
                f"{suite.__name__} marks the whole contract with {min(quiet)}",
                fix="Override the tests that fail, each with a reason; leave out "
                "of the manifest what the backend cannot do.",
            )
    for name, own in contract_of(suite).items():
        override = inspect.getattr_static(suite, name)
        if override is not own:
            _excused(suite, name, override)


def check_collected(test: pytest.Item) -> None:
    """Reject a test that a mark around its class expects to fail.

    A module may skip its tests, which shows, where a server is missing.
    """
    for node, _mark in test.iter_markers_with_node("xfail"):
        if node is not test:
            raise SealedError(
                f"{node.name} marks the whole contract with xfail",
                fix="Override the tests that fail, each with a reason.",
            )


def _excused(suite: type, name: str, override: object) -> None:
    """See that an override says why it fails, and fails when it does not."""
    marks = _marks(getattr(override, "pytestmark", None))
    excuses = [mark for mark in marks if mark.name in _QUIET]
    if not excuses or not all(map(_says_why, excuses)):
        raise SealedError(
            f"{suite.__name__} overrides {name}, a test of the contract",
            fix="Mark it with @pytest.mark.xfail(reason=...), without a condition "
            "and without strict=False.",
        )
    # An author's own settings of pytest may ignore an xfail that passes.
    cast("Any", override).pytestmark = [
        mark
        if mark.name != "xfail"
        else pytest.mark.xfail(**{**mark.kwargs, "strict": True}).mark
        for mark in marks
    ]


def _says_why(mark: pytest.Mark) -> bool:
    said = mark.kwargs
    return (
        mark.name == "xfail"
        and not mark.args
        and "condition" not in said
        and bool(said.get("strict", True))
        and bool(str(said.get("reason", "")).strip())
    )


def _marks(found: object) -> list[pytest.Mark]:
    """Return marks from what pytest lets stand as `pytestmark`."""
    each: Iterable[Any] = found if isinstance(found, list | tuple) else [found]
    return [getattr(one, "mark", one) for one in each if one is not None]


def _names(marks: Iterable[pytest.Mark]) -> set[str]:
    return {mark.name for mark in marks}
