"""Settings of a store on segments: what file, nixl and hf3fs have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.config import count, option, path, size
from kvdock.errors import SettingsError

if TYPE_CHECKING:
    from kvdock_segments.root_check import RootFinding

_LEAST_SEGMENT_BYTES = 64 << 10


@attrs.frozen
class SegmentSettings:
    """Settings of a store on segments; a backend extends them.

    Raises:
        SettingsError: If a value is out of its range.
    """

    root: Path = path(help="Directory that holds the store; created if missing.")
    quota: int = size(
        0, help="Maximum bytes of one namespace, all pools together; 0 for no quota."
    )
    root_quota: int = size(
        0,
        help="Maximum bytes of all namespaces of the root; 0 for what its file system "
        "has, less free_space.",
    )
    free_space: int = size(
        1 << 30, help="Bytes of the file system that stay free for other programs."
    )
    segment_bytes: int = size(
        256 << 20,
        help="Maximum size of a segment file; small stores begin with smaller ones.",
    )
    open_files: int = count(
        0,
        most=1 << 20,
        help="Files of pages that stay open in each pool; 0 to derive it from the "
        "limit of descriptors.",
    )
    retained_share: float = option(
        0.5, help="Share of the quota that may be promised to pages (retention)."
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
        if not 0 <= self.retained_share <= 1:
            raise SettingsError(
                f"retained_share {self.retained_share} is not a share of the quota",
                fix="Choose 0 <= retained_share <= 1.",
            )
        if self.segment_bytes < _LEAST_SEGMENT_BYTES:
            raise SettingsError(
                f"segment_bytes {self.segment_bytes} is less than 64 KiB"
            )

    def check_root(self, *, direct: bool) -> tuple[RootFinding, ...]:
        """Look at the root; try to bypass the page cache if `direct`."""
        from kvdock_segments.root_check import check_root  # noqa: PLC0415 - numpy, 65 ms

        return check_root(
            self.root,
            free_bytes=self.free_space,
            shared=self.shared_root,
            direct=direct,
        )
