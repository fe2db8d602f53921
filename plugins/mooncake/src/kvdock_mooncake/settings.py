"""Settings of the mooncake backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import attrs

from kvdock.errors import SettingsError
from kvdock.settings import format_bytes, option, size, structure

SMALLEST_SEGMENT_BYTES = 16 << 20


class Pin(StrEnum):
    """How firmly the store keeps what this process puts."""

    NONE = "none"
    """It may be evicted."""
    SOFT = "soft"
    """It is evicted after everything that is not pinned."""
    HARD = "hard"
    """It is never evicted; a full store then refuses new objects."""


@attrs.frozen(kw_only=True)
class MooncakeSettings:
    """How a process joins a Mooncake cluster, and how it stores."""

    environment: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "master": "MOONCAKE_MASTER",
            "host": "MOONCAKE_LOCAL_HOSTNAME",
            "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
            "protocol": "MOONCAKE_PROTOCOL",
            "devices": "MOONCAKE_DEVICE",
            "segment_bytes": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
            "ssd_offload": "MOONCAKE_ENABLE_SSD_OFFLOAD",
            "ssd_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
            "standalone": "MOONCAKE_CLIENT",
        }
    )
    """Setting to the environment variable that engines use for it."""

    master: str = option("", help='Address of the master: "host:port".')
    host: str = option(
        "", help="Name or address at which peers reach this host; found if empty."
    )
    metadata_server: str = option(
        "P2PHANDSHAKE", help="Metadata server, or P2PHANDSHAKE for none."
    )
    protocol: str = option("tcp", help='Transport: "tcp" or "rdma".')
    devices: str = option("", help="RDMA devices, separated by commas.")
    segment_bytes: int = size(
        4 << 30, help="DRAM that this process lends to the cluster; 0 lends none."
    )
    ssd_offload: bool = option(False, help="Spill this process's segment to a disk.")
    ssd_path: str = option("", help="Directory of the spilled objects.")
    tenant: str = option("", help="Tenant, where the master keeps tenants apart.")
    standalone: str = option(
        "", help='A client process on this host that owns the memory: "host:port".'
    )
    standalone_bytes: int = size(
        1 << 30, help="Memory that a standalone client shares with this process."
    )
    replicas: int = option(1, help="Copies of each object, as far as there is room.")
    pin: Pin = attrs.field(
        default=Pin.NONE,
        converter=Pin,
        metadata={"help": "How firmly the store keeps objects: none, soft or hard."},
    )
    preferred_segment: str = option(
        "", help='Segment to store in ("host:port"), or "self" for the own one.'
    )
    setup_timeout_s: float = option(20.0, help="How long joining may take.")
    rpc_timeout_s: float = option(
        3.0, help="How long the master may take; MC_RPC_TIMEOUT_MS goes before it."
    )
    full_wait_s: float = option(
        0.2, help="How long to wait for room, and for pages that others still write."
    )
    lease_s: float = option(
        10.0, help="Lease that the master grants (-default_kv_lease_ttl)."
    )
    client_ttl_s: float = option(
        10.0, help="How long the master waits for a lost process (-client_ttl)."
    )
    max_pieces: int = option(
        1024, help="Pieces of memory under way at once, over all threads."
    )
    # A batch of the core, 32 MiB and its trailers, is one call.
    max_call_bytes: int = size(48 << 20, help="Bytes of one call of the library.")

    def __attrs_post_init__(self) -> None:
        """Refuse what the library would refuse late, or not at all."""
        if 0 < self.segment_bytes < SMALLEST_SEGMENT_BYTES:
            raise SettingsError(
                f"segment_bytes {format_bytes(self.segment_bytes)} is too small",
                fix=f"Lend {format_bytes(SMALLEST_SEGMENT_BYTES)} or more, or 0.",
            )
        if self.protocol not in ("tcp", "rdma"):
            raise SettingsError(
                f"protocol {self.protocol!r} is not known", fix='Use "tcp" or "rdma".'
            )
        if self.replicas < 1 or self.max_pieces < 1 or self.max_call_bytes < 1:
            raise SettingsError(
                "replicas, max_pieces and max_call_bytes must be at least 1"
            )
        for name in ("setup_timeout_s", "rpc_timeout_s"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} must be above 0")
        for name in ("full_wait_s", "lease_s", "client_ttl_s"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} must not be negative")
        if self.ssd_offload and not Path(self.ssd_path).is_absolute():
            raise SettingsError(
                f"ssd_offload needs an absolute ssd_path, not {self.ssd_path!r}"
            )
        if self.ssd_offload and not self.segment_bytes:
            raise SettingsError(
                "ssd_offload spills the own segment, but segment_bytes is 0",
                fix="Give this process a segment, or turn ssd_offload off.",
            )

    def completed(self, environ: Mapping[str, str] = os.environ) -> MooncakeSettings:
        """Take from the environment what is still as it was declared.

        Args:
            environ: Where MOONCAKE_* is read.

        Raises:
            SettingsError: If there is no master's address, or a variable is
                not valid.
        """
        given: dict[str, object] = {}
        for field in attrs.fields(MooncakeSettings):
            value = getattr(self, field.name)
            variable = self.environment.get(field.name, "")
            if value == field.default and environ.get(variable):
                given[field.name] = environ[variable]
            else:
                given[field.name] = value
        full = structure(MooncakeSettings, given, where="backend 'mooncake'")
        if not full.master and not full.standalone:
            raise SettingsError(
                "backend 'mooncake': no master is configured",
                fix="Set `master` to host:port, or MOONCAKE_MASTER.",
            )
        return full


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port", also with an IPv6 host in brackets.

    >>> split_address("[::1]:50051")
    ('::1', 50051)

    Raises:
        SettingsError: If it is not an address.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise SettingsError(f"{address!r} is not host:port")
    return host, int(port)
