"""Settings of the file backend."""

from __future__ import annotations

from pathlib import Path

import attrs

from kvdock.config import option, path, size
from kvdock.errors import SettingsError


@attrs.frozen
class FileSettings:
    """Settings of the file backend.

    Raises:
        SettingsError: If a value is out of its range.
    """

    root: Path = path(help="Directory that holds the store; created if missing.")
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
    threads: int = option(
        2, help="Maximum number of threads that move the pages of one batch."
    )
    direct: bool = option(
        False, help="Bypass the page cache (O_DIRECT), where the file system can."
    )
    locks: bool = option(
        True,
        help="Detect living writers by kernel locks; set to false where hosts share "
        "a file system without locks.",
    )
    shared_root: bool = option(
        False, help="Accept a root that other users own or can write."
    )

    def __attrs_post_init__(self) -> None:
        """Reject values that are out of range."""
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise SettingsError(
                f"low_watermark {self.low_watermark} and high_watermark "
                f"{self.high_watermark} are not two ascending shares of the quota",
                fix="Choose 0 < low_watermark <= high_watermark <= 1.",
            )
        if self.segment_bytes < 1 << 16:
            raise SettingsError(
                f"segment_bytes {self.segment_bytes} is less than 64 KiB"
            )
        if not 1 <= self.threads <= 256:  # noqa: PLR2004 - more is a mistake
            raise SettingsError(f"threads {self.threads} is not between 1 and 256")
