"""Settings of the hf3fs backend."""

from __future__ import annotations

from enum import StrEnum

import attrs

from kvdock.config import choice, count, option, size
from kvdock.errors import SettingsError
from kvdock_segments import SegmentSettings

MAX_RINGS = 8
"""Most rings for each direction: the FUSE daemon serves those of all processes."""

_LEAST_BLOCK_BYTES = 4096


class Mode(StrEnum):
    """The ways to move the bytes of pages."""

    USRBIO = "usrbio"
    """Through rings of 3FS's USRBIO, from and to registered memory."""
    POSIX = "posix"
    """With `preadv` and `pwritev` on any mounted file system."""


@attrs.frozen
class Hf3fsSettings(SegmentSettings):
    """Settings of the hf3fs backend.

    Raises:
        SettingsError: If a value is out of its range.
    """

    mode: Mode = choice(
        Mode.USRBIO,
        help="How bytes move: usrbio, or posix on any mounted file system. Never "
        "chosen by what is installed.",
    )
    mount: str = option(
        "", help="Mount point of 3FS; empty to find it from root (usrbio)."
    )
    chunk: int = size(
        1 << 20,
        help="Chunk size of root's directory: slots divide it, or are multiples of "
        "it; 0 where the file system has no chunks (posix).",
    )
    entries: int = count(
        256, least=1, most=1 << 15, help="Operations that a ring takes (usrbio)."
    )
    rings: int = count(
        MAX_RINGS,
        least=1,
        most=MAX_RINGS,
        help="Maximum number of rings for each direction (usrbio).",
    )
    iov_limit: int = size(
        0,
        help="Maximum bytes of shared memory that this process registers; 0 for what "
        "/dev/shm holds (usrbio).",
    )
    iov_block: int = size(
        0,
        help="Bytes that are registered in one piece, where a network card does not "
        "take whole pools; 0 for all at once (usrbio).",
    )
    threads: int = count(
        2, least=1, most=256, help="Threads that move the pages of one batch (posix)."
    )
    direct: bool = option(False, help="Bypass the page cache with O_DIRECT (posix).")
    locks: bool = option(
        False,
        help="Detect living writers by kernel locks, where all hosts see each "
        "other's (posix; 3FS has none).",
    )

    def __attrs_post_init__(self) -> None:
        """Reject values that are out of range, or mean nothing in this mode."""
        super().__attrs_post_init__()
        if 0 < self.iov_block < _LEAST_BLOCK_BYTES:
            raise SettingsError(
                f"iov_block {self.iov_block} is less than {_LEAST_BLOCK_BYTES} bytes"
            )
        if self.chunk % 4096:
            raise SettingsError(
                f"chunk {self.chunk} is not a multiple of 4096 bytes",
                fix="Give the chunk size of the directory, for example 1 MiB.",
            )
        if self.mode is Mode.POSIX:
            return
        if not self.chunk:
            raise SettingsError(
                "chunk is 0, and every file of 3FS has chunks",
                fix="Give the chunk size of the directory (1 MiB is common).",
            )
        for name in ("direct", "locks"):
            if getattr(self, name):
                raise SettingsError(
                    f"{name} is for mode posix, and mode is {self.mode}",
                    fix="Leave it out, or set mode=posix.",
                )
