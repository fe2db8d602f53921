"""Read and damage stored objects past the store: for the conformance kit."""

from __future__ import annotations

import os
from pathlib import Path

from kvdock.segments.inspect import Location, locate


class SegmentOracle:
    """Reads and damages the slots of segment files.

    A backend on segments makes its own oracle of it and of `kvdock.testing.Oracle`:

        class MyOracle(SegmentOracle, Oracle): ...

    Args:
        root: The store's root directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def _place(self, key: str) -> Location:
        (place,) = locate(self.root, key)
        return place

    def peek(self, key: str) -> bytes | None:
        """Read an object's slot."""
        places = locate(self.root, key)
        if not places:
            return None
        with places[0].path.open("rb") as file:
            return os.pread(file.fileno(), places[0].nbytes, places[0].offset)

    def poke(self, key: str, offset: int, data: bytes) -> None:
        """Write into an object's slot."""
        place = self._place(key)
        with place.path.open("r+b") as file:
            os.pwrite(file.fileno(), data, place.offset + offset)

    def resize(self, key: str, nbytes: int) -> None:
        """Spoil what lies beyond a length."""
        # A slot has no end of its own; a file may well be cut within one.
        place = self._place(key)
        if nbytes > place.nbytes:
            raise NotImplementedError("extend a slot")
        self.poke(key, nbytes, b"\xee" * (place.nbytes - nbytes))

    def swap(self, key: str, other: str) -> None:
        """Let the bytes of two slots change places."""
        one, two = self.peek(key) or b"", self.peek(other) or b""
        self.poke(key, 0, two)
        self.poke(other, 0, one)

    def remove(self, key: str) -> None:
        """Blank a slot; its record stays."""
        place = self._place(key)
        with place.path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes(place.nbytes), place.offset)
