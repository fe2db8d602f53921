"""Read and damage stored objects past the store: for the conformance kit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

from kvdock_segments import index_file, segment
from kvdock_segments.walk import Location, locate

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock_segments.format import Records
    from kvdock_segments.io import IORequest, IOResult
    from kvdock_segments.store import SegmentStore


class SegmentOracle:
    """Reads and damages the slots of segment files.

    A backend on segments makes its own oracle of it and of `kvdock.testing.Oracle`:

        class MyOracle(SegmentOracle, Oracle): ...
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def small(self, folder: Path) -> dict[str, object]:
        """Return the settings of a store of 4 MiB."""
        return {
            "root": str(folder),
            "free_space": 0,
            "quota": "4 MiB",
            "segment_bytes": "1 MiB",
        }

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
        self.poke(key, 0, bytes(self._place(key).nbytes))

    @contextmanager
    def failing(
        self, handle: object, part: str, fails: Callable[[str], bool]
    ) -> Iterator[None]:
        """Let writes of pages, or of their records, fail with EIO."""
        if part == "index":
            failing = _failing_records(fails)
            with (
                patch.object(segment, "write_records", failing),
                patch.object(index_file, "write_records", failing),
            ):
                yield
            return
        while hasattr(handle, "inner"):  # a store around a store
            handle = handle.inner
        store = cast("SegmentStore", handle)
        engine, files = store._engine, store._catalog.files  # noqa: SLF001 - not public
        move = engine.move

        def moved(request: IORequest) -> IOResult:
            result = move(request)
            for row in range(len(request)) if request.write else ():
                name = files.name_of(request.files[int(request.file_of[row])])
                if fails(f"{name} at {int(request.offsets[row])}"):
                    result.errors[row], result.nbytes[row] = errno.EIO, 0
            return result

        with patch.object(engine, "move", moved):
            yield


def _failing_records(
    fails: Callable[[str], bool],
) -> Callable[[int, Int64Array, Records], None]:
    """Return what writes records and fails at some places."""
    write = index_file.write_records

    def write_records(fd: int, slots: Int64Array, records: Records) -> None:
        file = os.fstat(fd).st_ino
        if any([fails(f"{file} at {slot}") for slot in slots.tolist()]):  # noqa: C419 - each is a place
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(fd, slots, records)

    return write_records
