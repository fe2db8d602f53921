"""Settings of the file backend."""

from __future__ import annotations

from pathlib import Path

import attrs

from kvdock.config.fields import option, size
from kvdock.errors import SettingsError


@attrs.frozen
class FileSettings:
    """Where and how the file backend keeps pages.

    Raises:
        SettingsError: If one of them cannot be meant.
    """

    root: Path = option(help="Directory that holds the store; created if missing.")
    quota: int = size(
        0, help="Most bytes that one namespace takes, all pools together; 0 for all."
    )
    free_space: int = size(
        1 << 30, help="Bytes that the file system keeps free for others."
    )
    high_watermark: float = option(
        1.0, help="Share of the quota at which the coldest pages begin to go."
    )
    low_watermark: float = option(
        0.95, help="Share of the quota that pages take once the coldest have gone."
    )
    segment_bytes: int = size(
        256 << 20, help="Largest segment file; small stores begin with smaller ones."
    )
    threads: int = option(2, help="Most threads that move the pages of one batch.")
    direct: bool = option(
        False, help="Bypass the page cache (O_DIRECT), where the file system can."
    )
    locks: bool = option(
        True,
        help="Tell living writers by locks of the kernel; false where hosts share "
        "a file system without locks.",
    )
    shared_root: bool = option(
        False, help="Accept a root that others own or may write."
    )

    def __attrs_post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise SettingsError(
                f"watermarks low {self.low_watermark} and high {self.high_watermark} "
                "are not two shares of the quota, the low one first",
                fix="Choose 0 < low_watermark <= high_watermark <= 1.",
            )
        if self.segment_bytes < 1 << 16:
            raise SettingsError(
                f"segment_bytes {self.segment_bytes} is less than 64 KiB"
            )
        if not 1 <= self.threads <= 256:  # noqa: PLR2004 - more is a mistake
            raise SettingsError(f"threads {self.threads} is not between 1 and 256")
