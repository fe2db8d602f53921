"""Wrong backends, each the image of a real defect, each caught by a test.

They test the kit: a contract that lets one of them pass is worth nothing.
`python -m mutants` runs them all.
"""

from __future__ import annotations

from mutants import (
    allocators,
    answers,
    keys,
    peers,
    promises,
    retention,
    rows,
    servers,
    stored,
    tiers,
)
from mutants.mutant import (
    FolderMutant,
    MemoryMutant,
    Mutant,
    PeerMutant,
    ServerMutant,
    word_of,
)

__all__ = [
    "MUTANTS",
    "FolderMutant",
    "MemoryMutant",
    "Mutant",
    "PeerMutant",
    "ServerMutant",
    "word_of",
]


def _of(*rooms: object) -> tuple[Mutant, ...]:
    found = [
        thing
        for room in rooms
        for name, thing in vars(room).items()
        if isinstance(thing, type)
        and issubclass(thing, MemoryMutant | FolderMutant | PeerMutant | ServerMutant)
        and not name.startswith("_")
        and "caught_by" in vars(thing)
    ]
    return tuple(dict.fromkeys(found))


MUTANTS = _of(
    keys,
    answers,
    stored,
    promises,
    servers,
    allocators,
    peers,
    retention,
    tiers,
    rows,
)
"""All mutants, in the order of the table in the docs."""


def __getattr__(name: str) -> object:
    """Make a fresh plugin: `mutants:key_without_rank`."""
    for mutant in MUTANTS:
        if word_of(mutant) == name:
            return mutant()
    raise AttributeError(name)
