"""Harming stored pages on disk, without knowing how a backend lays them out.

A page is found by its first and last bytes, wherever they lie below a directory. So
this works on any backend that keeps pages as plain bytes in files, one file
per page or many pages in one, and needs no help from it.
"""

import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import cast

import attrs
import numpy as np
import numpy.typing as npt


class Harm(StrEnum):
    """What happens to a page's bytes, or to the file that holds them."""

    FLIP = "flip"
    """One bit in the middle of the page changes."""

    TRUNCATE = "truncate"
    """The file ends in the middle of the page."""

    DELETE = "delete"
    """The page is gone: its file, or its bytes where the file holds others."""

    EXTEND = "extend"
    """The file has bytes behind its end."""


_KEY_BYTES = 8
_TABLE_BITS = 18
_ORDER = (Harm.FLIP, Harm.DELETE, Harm.TRUNCATE, Harm.EXTEND)


@attrs.frozen
class Place:
    """Where a page was found: byte range in a file."""

    path: Path
    start: int
    stop: int

    @property
    def middle(self) -> int:
        """A byte of the page far from its ends."""
        return (self.start + self.stop) // 2


@attrs.frozen
class Damage:
    """What was done to a store.

    Args:
        done: (pool, page, harm) of each page that was aimed at.
        lost: (pool, page) of all pages that cannot be whole any more.
        doubtful: (pool, page) of the last page of an extended file: a backend
            may give it up or distinguish the surplus.
    """

    done: tuple[tuple[str, int, Harm], ...]
    lost: frozenset[tuple[str, int]]
    doubtful: frozenset[tuple[str, int]]

    def joined(self, other: "Damage") -> "Damage":
        """Return both as one."""
        lost = self.lost | other.lost
        doubtful = (self.doubtful | other.doubtful) - lost
        return Damage(self.done + other.done, lost, doubtful)


@attrs.frozen
class StoredPages:
    """Pages of one pool that lie in a store.

    Args:
        page_bytes: Bytes of a page.
        ends: Page number to its first and its last bytes. The first alone do
            not distinguish pages: a draft that shares its first layer with the
            target has pages that begin like the target's.
    """

    page_bytes: int
    ends: Mapping[int, tuple[bytes, bytes]]


def inflict(
    directory: Path,
    pools: Mapping[str, StoredPages],
    targets: Sequence[tuple[str, int, Harm]],
) -> Damage:
    """Damage pages; return which pages that costs.

    Args:
        directory: Where the store lies.
        pools: All pages that were stored.
        targets: (pool, page, harm), each page at most once.
    """
    # All places are looked up before the first byte changes.
    inhabitants = _inhabitants(directory, pools)
    homes = {who: place for housed in inhabitants.values() for who, place in housed}
    aimed = [
        (pool, page, harm, homes[pool, page])
        for pool, page, harm in targets
        if (pool, page) in homes
    ]
    lost: set[tuple[str, int]] = set()
    doubtful: set[tuple[str, int]] = set()
    # What keeps a file's length comes first, or a place might lie behind its end.
    for pool, page, harm, place in sorted(aimed, key=lambda aim: _ORDER.index(aim[2])):
        housed = inhabitants[place.path]
        match harm:
            case Harm.FLIP:
                _flip(place)
                lost.add((pool, page))
            case Harm.DELETE:
                _delete(place, alone=len(housed) == 1)
                lost.add((pool, page))
            case Harm.TRUNCATE:
                os.truncate(place.path, place.middle)
                lost |= {who for who, at in housed if at.stop > place.middle}
            case Harm.EXTEND:
                with place.path.open("ab") as file:
                    file.write(b"surplus bytes behind the end")
                doubtful.add(max(housed, key=lambda house: house[1].stop)[0])
    done = tuple((pool, page, harm) for pool, page, harm, _ in aimed)
    return Damage(done, frozenset(lost), frozenset(doubtful - lost))


def _inhabitants(
    directory: Path, pools: Mapping[str, StoredPages]
) -> dict[Path, list[tuple[tuple[str, int], Place]]]:
    """Find out which pages each file below a directory holds."""
    heads: dict[bytes, list[tuple[str, int]]] = {}
    for pool, stored in pools.items():
        for page, (head, _) in stored.ends.items():
            heads.setdefault(head[:_KEY_BYTES], []).append((pool, page))
    found: dict[Path, list[tuple[tuple[str, int], Place]]] = {}
    for path in sorted(directory.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        for start in _occurrences(content, list(heads)):
            for pool, page in heads[content[start : start + _KEY_BYTES]]:
                head, tail = pools[pool].ends[page]
                stop = start + pools[pool].page_bytes
                whole = content.startswith(head, start) and (
                    content[stop - len(tail) : stop] == tail
                )
                if whole:
                    place = Place(path, start, stop)
                    found.setdefault(path, []).append(((pool, page), place))
    return found


def _occurrences(content: bytes, keys: Sequence[bytes]) -> list[int]:
    """Find all of many keys in one pass over a file's content.

    One search per key would read the file once for each of hundreds of pages.
    A table of hashed keys lets almost nothing through that is not one, so a
    file of 32 MiB takes a quarter of a second.

    Args:
        content: What to search.
        keys: Of `_KEY_BYTES` bytes each.

    Returns:
        Offsets at which a key begins, ascending.
    """
    if not keys:
        return []
    wanted = np.frombuffer(b"".join(keys), "<u8")
    table = np.zeros(1 << _TABLE_BITS, np.bool_)
    table[_hashed(wanted)] = True
    starts: list[int] = []
    for offset in range(_KEY_BYTES):
        count = max(0, len(content) - offset) // _KEY_BYTES
        words = np.frombuffer(content, "<u8", count, min(offset, len(content)))
        near = np.flatnonzero(table[_hashed(words)])
        exact = near[np.isin(words[near], wanted)]
        starts += (exact * _KEY_BYTES + offset).tolist()
    return sorted(starts)


def _hashed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = words * np.uint64(0x9E3779B97F4A7C15)
    return cast("npt.NDArray[np.uint64]", mixed >> np.uint64(64 - _TABLE_BITS))


def _flip(place: Place) -> None:
    with place.path.open("r+b") as file:
        file.seek(place.middle)
        byte = file.read(1)[0]
        file.seek(place.middle)
        file.write(bytes([byte ^ 0x40]))


def _delete(place: Place, *, alone: bool) -> None:
    if alone:
        place.path.unlink()
        return
    with place.path.open("r+b") as file:
        file.seek(place.start)
        file.write(bytes(place.stop - place.start))
