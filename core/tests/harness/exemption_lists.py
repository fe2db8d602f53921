"""Hold lists of exempt fields against the configurations that engines have."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from kvdock.errors import did_you_mean
from kvdock.identity import Exemption, _fields


def field_names(config: object) -> frozenset[str]:
    """Return the dotted names of all fields of a configuration, groups included."""
    names: set[str] = set()

    def visit(name: str, value: object, above: tuple[int, ...]) -> None:
        names.add(name)
        if id(value) not in above:
            for field, one in (_fields(value) or {}).items():
                visit(f"{name}.{field}" if name else field, one, (*above, id(value)))

    visit("", config, ())
    return frozenset(names - {""})


def stale_exemptions(
    exemptions: Iterable[Exemption], names: AbstractSet[str]
) -> tuple[str, ...]:
    """Return a sentence for each exemption of a field that no engine has."""
    return tuple(
        f"no field is called {one.field!r}. {did_you_mean(one.field, names)}".strip()
        for one in exemptions
        if not any(one.covers(name) for name in names)
    )
