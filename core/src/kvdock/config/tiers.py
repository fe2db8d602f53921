"""Tiers: the backends that keep the same pages, near first, and their rules.

    tiers = ["memory", "disk", {backend = "far", promote = "never"}]

Both rules of a tier say what comes into it: pages that the engine stores, and pages
that were loaded from a tier farther away.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import cast

import attrs

from kvdock.config.convert import to_word
from kvdock.errors import SettingsError, did_you_mean
from kvdock.strict_enum import StrictEnum


class Write(StrictEnum):
    """The time at which a stored page gets to a tier."""

    THROUGH = "through"
    """Before the call that stores it returns."""
    BEHIND = "behind"
    """Later, as a copy from a nearer tier."""
    NEVER = "never"
    """Not at all: the tier has what others stored there, or what is promoted."""


class Promote(StrictEnum):
    """The use at which a page from a farther tier is copied to a tier."""

    ALWAYS = "always"
    """The first."""
    SECOND = "second"
    """The second: what is used once wears out no disk."""
    NEVER = "never"
    """None."""


class Locality(StrictEnum):
    """The hosts that see what is stored in a tier.

    Routers are told, and what others see is loaded once for all calls that ask at the
    same time.
    """

    AUTO = "auto"
    """What its backend declares: remote where it shares pages with a cluster."""
    LOCAL = "local"
    """This host alone."""
    REMOTE = "remote"
    """Others too, as a folder that several hosts mount."""


@attrs.frozen
class Tier:
    """One tier of a chain.

    Args:
        backend: The backend, or the instance of one.
        write: When stored pages get there.
        promote: When pages that were loaded from farther away are copied there.
        locality: Which hosts see its pages.
    """

    backend: str
    write: Write = attrs.field(default=Write.BEHIND, converter=Write)
    promote: Promote = attrs.field(default=Promote.SECOND, converter=Promote)
    locality: Locality = attrs.field(default=Locality.AUTO, converter=Locality)

    def __str__(self) -> str:
        """Render as a few words."""
        written = {
            Write.THROUGH: "written at once",
            Write.BEHIND: "written behind",
            Write.NEVER: "never written",
        }
        promoted = {
            Promote.ALWAYS: "promoted at the first use",
            Promote.SECOND: "promoted at the second use",
            Promote.NEVER: "never promoted",
        }
        return f"{written[self.write]}, {promoted[self.promote]}"


_RULES = tuple(one.name for one in attrs.fields(Tier))


def read_tiers(given: object, origin: str = "") -> tuple[Tier, ...]:
    """Read tiers, near first, each a backend's name or a table.

    Text, as the environment has it, is names with commas between them, or JSON.

    Raises:
        SettingsError: On what is not a tier, or one that is given twice.
    """
    where = f"tiers ({origin})" if origin else "tiers"
    if isinstance(given, str):
        given = _from_text(given, where)
    if not isinstance(given, list | tuple):
        raise SettingsError(
            f"{where}: {given!r} is not a list", fix='Write tiers = ["memory", "disk"].'
        )
    found: list[Tier] = []
    for at, one in enumerate(cast("Iterable[object]", given)):
        tier = one if isinstance(one, Tier) else _tier(one, at, where)
        if tier.backend in [other.backend for other in found]:
            raise SettingsError(
                f"{where}: {tier.backend!r} is given twice",
                fix="Give each tier an instance of its own.",
            )
        found.append(tier)
    if found and all(tier.write is Write.NEVER for tier in found):
        raise SettingsError(f"{where}: no tier is written, so no page would be stored")
    return tuple(found)


def _from_text(text: str, where: str) -> object:
    if not text.lstrip().startswith("["):
        return [word for word in map(str.strip, text.split(",")) if word]
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{where}: {text!r} is not JSON: {error}") from error


def _tier(given: object, at: int, where: str) -> Tier:
    nearest = Write.THROUGH if at == 0 else Write.BEHIND
    if isinstance(given, str) and given:
        return Tier(given, nearest)
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"{where}: {given!r} is not a tier",
            fix='Write a name, or {backend = "NAME", write = "behind"}.',
        )
    for key in given:
        if key not in _RULES:
            raise SettingsError(
                f"{where}: a tier has no {key!r}",
                fix=did_you_mean(str(key), _RULES) or f"It has {', '.join(_RULES)}.",
            )
    name = given.get("backend")
    if not isinstance(name, str) or not name:
        raise SettingsError(
            f"{where}: tier {at + 1} names no backend", fix='Add backend = "NAME".'
        )
    try:
        return Tier(
            name,
            to_word(given.get("write", nearest), Write),
            to_word(given.get("promote", Promote.SECOND), Promote),
            to_word(given.get("locality", "auto"), Locality),
        )
    except SettingsError as error:
        raise SettingsError(
            f"{where}: tier {name!r}: {error.what}", fix=error.fix
        ) from error
