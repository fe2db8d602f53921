"""Settings of the nixl backend."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import attrs

from kvdock.config import Alias, choice, option, path
from kvdock.errors import SettingsError
from kvdock.strict_enum import StrictEnum
from kvdock_nixl.ucx_transports import FENCED_TRANSPORTS
from kvdock_segments import SegmentSettings


class IOMethod(StrictEnum):
    """The ways in which NIXL moves bytes between host memory and files."""

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
class NixlSettings(SegmentSettings):
    """Settings of the nixl backend.

    Raises:
        SettingsError: If a value is out of its range.
    """

    root: Path | None = path(  # type: ignore[assignment]  # a path in all others
        help="Directory that holds the store; created if missing. May be left out "
        "where pages only go to peers.",
        required=False,
    )
    io: IOMethod = choice(
        IOMethod.IO_URING,
        help="How NIXL moves bytes; all but io_uring need direct.",
    )
    direct: bool = option(
        False, help="Bypass the page cache (O_DIRECT), where the file system can."
    )
    ucx_transports: str = option(
        FENCED_TRANSPORTS,
        help="Transports of transfers to peers, as in UCX_TLS. With those by which a "
        "sender on the same host copies by itself (cma), slots of a sender that is "
        "lost stay held until it is dead.",
        alias=Alias(env="UCX_TLS"),
    )

    def __attrs_post_init__(self) -> None:
        """Reject values that are out of range or do not go together."""
        super().__attrs_post_init__()
        if self.io is not IOMethod.IO_URING and not self.direct:
            raise SettingsError(
                f"io {self.io.value!r} works with direct I/O alone",
                fix="Set direct to true, or io to io_uring.",
            )

    def require_root(self) -> Path:
        """Return the root, without which no page is stored."""
        if self.root is None:
            raise SettingsError(
                "setting 'root' is missing",
                fix="Name a directory; only pools that all go to peers need none.",
            )
        return self.root
