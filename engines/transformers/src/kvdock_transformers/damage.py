"""Harming stored pages on disk, without knowing how a backend lays them out.

A page is found by its first and last bytes, wherever they lie below a directory. So
this works on any backend that keeps pages as plain bytes in files, one file
per page or many pages in one, and needs no help from it.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import attrs


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
            may give it up or tell the surplus apart.
    """

    done: tuple[tuple[str, int, Harm], ...]
    lost: frozenset[tuple[str, int]]
    doubtful: frozenset[tuple[str, int]]


@attrs.frozen
class StoredPages:
    """Pages of one pool that lie in a store.

    Args:
        page_bytes: Bytes of a page.
        ends: Page number to its first and its last bytes. The first alone do
            not tell pages apart: a draft that shares its first layer with the
            target has pages that begin like the target's.
    """

    page_bytes: int
    ends: Mapping[int, tuple[bytes, bytes]]

    def find(self, page: int, path: Path) -> Place | None:
        """Find a page in a file, by its first and last bytes."""
        if not path.stat().st_size:
            return None
        head, tail = self.ends[page]
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            start = content.find(head)
            while start >= 0:
                stop = start + self.page_bytes
                if content[stop - len(tail) : stop] == tail:
                    return Place(path, start, stop)
                start = content.find(head, start + 1)
        return None


def inflict(
    directory: Path,
    pools: Mapping[str, StoredPages],
    targets: Sequence[tuple[str, int, Harm]],
) -> Damage:
    """Harm pages, and tell which pages that costs.

    Args:
        directory: Where the store lies.
        pools: All pages that were stored.
        targets: (pool, page, harm), each page at most once.
    """
    aimed = []
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for pool, page, harm in targets:
        places = (pools[pool].find(page, path) for path in files)
        place = next(filter(None, places), None)
        if place is not None:
            aimed.append((pool, page, harm, place))
    # All places are looked up before the first byte changes.
    harmed = sorted({place.path for *_, place in aimed})
    inhabitants = {path: _inhabitants(path, pools) for path in harmed}
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
    path: Path, pools: Mapping[str, StoredPages]
) -> list[tuple[tuple[str, int], Place]]:
    found = (
        ((pool, page), stored.find(page, path))
        for pool, stored in pools.items()
        for page in stored.ends
    )
    return [(who, place) for who, place in found if place is not None]


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
