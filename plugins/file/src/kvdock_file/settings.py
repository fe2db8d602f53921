"""Settings of the file backend."""

from __future__ import annotations

import attrs

from kvdock.config import count, option
from kvdock_segments import SegmentSettings


@attrs.frozen
class FileSettings(SegmentSettings):
    """Settings of the file backend.

    Raises:
        SettingsError: If a value is out of its range.
    """

    threads: int = count(
        2,
        least=1,
        most=256,
        help="Maximum number of threads that move the pages of one batch.",
    )
    direct: bool = option(
        False, help="Bypass the page cache (O_DIRECT), where the file system can."
    )
