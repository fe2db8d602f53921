"""Settings of the nixl backend."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import attrs

from kvdock import StrictEnum
from kvdock.config import Alias, choice, option, path, size
from kvdock.errors import SettingsError
from kvdock_nixl.ucx_transports import FENCED_TRANSPORTS


class IOMethod(StrictEnum):
    """How NIXL moves bytes between host memory and files."""

    IO_URING = "io_uring"
    """Its POSIX backend over io_uring."""

    AIO = "aio"
    """Its POSIX backend over Linux AIO; with direct I/O alone, because buffered
    AIO blocks inside of the system call and holds up every other transfer."""

    GDS = "gds"
    """GPUDirect Storage with NVIDIA's libcufile."""

    GDS_MT = "gds_mt"
    """GPUDirect Storage, on several threads of NIXL."""


NIXL_BACKENDS = MappingProxyType(
    {
        IOMethod.IO_URING: ("POSIX", MappingProxyType({"use_uring": "true"})),
        IOMethod.AIO: ("POSIX", MappingProxyType({"use_aio": "true"})),
        IOMethod.GDS: ("GDS", MappingProxyType({})),
        IOMethod.GDS_MT: ("GDS_MT", MappingProxyType({})),
    }
)
"""NIXL's name of each, and the parameters that it is created with."""


@attrs.frozen
class NixlSettings:
    """Settings of the nixl backend.

    Raises:
        SettingsError: If a value is out of its range.
    """

    root: Path = path(help="Directory that holds the store; created if missing.")
    io: IOMethod = choice(
        IOMethod.IO_URING,
        help="How NIXL moves bytes; all but io_uring need direct.",
    )
    direct: bool = option(
        False, help="Bypass the page cache (O_DIRECT), where the file system can."
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
    locks: bool = option(
        True,
        help="Detect living writers by kernel locks; set to false where hosts share "
        "a file system without locks.",
    )
    shared_root: bool = option(
        False, help="Accept a root that other users own or can write."
    )
    ucx_transports: str = option(
        FENCED_TRANSPORTS,
        help="Transports of direct transfers, as in UCX_TLS. With those by which a "
        "sender on the same host copies by itself (cma), slots of a sender that is "
        "lost stay held until it is dead.",
        alias=Alias(env="UCX_TLS"),
    )

    def __attrs_post_init__(self) -> None:
        """Reject values that are out of range or do not go together."""
        if self.io is not IOMethod.IO_URING and not self.direct:
            raise SettingsError(
                f"io {self.io.value!r} works with direct I/O alone",
                fix="Set direct to true, or io to io_uring.",
            )
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
