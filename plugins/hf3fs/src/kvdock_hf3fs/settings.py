"""Settings of the hf3fs backend."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import attrs

from kvdock.config import choice, count, option, path, size
from kvdock.errors import SettingsError

MAX_RINGS = 8
"""Most rings for each direction: the FUSE daemon serves those of all processes."""


class Mode(StrEnum):
    """How the bytes of pages are moved."""

    USRBIO = "usrbio"
    """Through rings of 3FS's USRBIO, from and to registered memory."""
    POSIX = "posix"
    """With `preadv` and `pwritev` on any mounted file system."""


@attrs.frozen
class Hf3fsSettings:
    """Settings of the hf3fs backend.

    Raises:
        SettingsError: If a value is out of its range.
    """

    root: Path = path(help="Directory that holds the store; created if missing.")
    mode: Mode = choice(
        Mode.USRBIO,
        help="How bytes move: usrbio, or posix on any mounted file system. Never "
        "chosen by what is installed.",
    )
    mount: str = option(
        "", help="Mount point of 3FS; empty to find it from root (usrbio)."
    )
    quota: int = size(
        0, help="Maximum bytes of one namespace, all pools together; 0 for no quota."
    )
    free_space: int = size(
        1 << 30, help="Bytes of the file system that stay free for other programs."
    )
    high_watermark: float = option(
        1.0, help="Share of the quota at which eviction begins."
    )
    low_watermark: float = option(
        1.0, help="Share of the quota at which eviction ends."
    )
    segment_bytes: int = size(
        256 << 20,
        help="Maximum size of a segment file; small stores begin with smaller ones.",
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
    open_files: int = count(
        0,
        most=1 << 20,
        help="Files of pages that stay open in each pool; 0 to derive it from the "
        "limit of descriptors.",
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
    shared_root: bool = option(
        False, help="Accept a root that other users own or can write."
    )

    def __attrs_post_init__(self) -> None:
        """Reject values that are out of range, or mean nothing in this mode."""
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise SettingsError(
                f"low_watermark {self.low_watermark} and high_watermark "
                f"{self.high_watermark} are not two ascending shares of the quota",
                fix="Choose 0 < low_watermark <= high_watermark <= 1.",
            )
        for name, least in (("segment_bytes", 1 << 16), ("iov_block", 1 << 12)):
            value = getattr(self, name)
            if value < least and (value or name == "segment_bytes"):
                raise SettingsError(f"{name} {value} is less than {least} bytes")
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
