"""Settings of the mooncake backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvdock.config import (
    Alias,
    ForeignFile,
    choice,
    count,
    duration,
    option,
    size,
)
from kvdock.errors import SettingsError
from kvdock.units import format_bytes, parse_bytes
from kvdock_mooncake import engine_files
from kvdock_mooncake.engine_files import EngineBytes

if TYPE_CHECKING:
    from kvdock import Shard

SMALLEST_SEGMENT_BYTES = 16 << 20
OWN_SEGMENT = "self"
_NO_MASTER_SCHEMES = ("http", "https", "tcp")


class Protocol(StrEnum):
    """The transport between the hosts of a cluster."""

    TCP = "tcp"
    """Through sockets; needs nothing."""
    RDMA = "rdma"
    """From memory to memory; needs a device."""


class Pin(StrEnum):
    """The pins of objects that this process puts."""

    NONE = "none"
    """It may be evicted."""
    SOFT = "soft"
    """It is evicted after everything that is not pinned."""
    HARD = "hard"
    """It is never evicted; a full store then rejects new objects."""


def _lent(value: str | float) -> int:
    return value if isinstance(value, EngineBytes) else parse_bytes(value)


def _devices(value: object) -> str:
    """Read device names: text, a list, or a mapping of ranks, as JSON."""
    if isinstance(value, Mapping):
        value = json.dumps(dict(value))
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        raise SettingsError(f"{value!r} is not text, a list, or a mapping of ranks")
    _by_rank(value)
    return value


def _segments(value: object) -> str:
    """Read segment names: text, or a list."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) for name in names
    ):
        raise SettingsError(f"{value!r} is not text or a list of segments")
    return ",".join(name.strip() for name in names if name.strip())


def _by_rank(devices: str) -> dict[int, str] | None:
    """Return the devices of each TP rank; None where all have the same."""
    if not devices.lstrip().startswith("{"):
        return None
    wrong = SettingsError(
        f"{devices!r} does not map ranks to devices",
        fix="""Write 'mlx5_0,mlx5_1', or '{"0": "mlx5_0", "1": "mlx5_1"}'.""",
    )
    try:
        found = json.loads(devices)
        ranked = {int(rank): names for rank, names in found.items()}
    except ValueError:
        raise wrong from None
    if not ranked or not all(isinstance(names, str) for names in ranked.values()):
        raise wrong
    return ranked


@attrs.frozen(kw_only=True)
class MooncakeSettings:
    """Settings of the mooncake backend."""

    foreign_files: ClassVar[tuple[ForeignFile, ...]] = (
        ForeignFile(
            variable=engine_files.LIBRARY_FILE, read=engine_files.of_each_process
        ),
        ForeignFile(variable=engine_files.SGLANG_FILE, read=engine_files.of_all_ranks),
    )

    master: str = option(
        "",
        help='Address of the master: "host:port".',
        alias=Alias(
            env="MOONCAKE_MASTER",
            names=("master_server_address", "master_server_addr"),
        ),
    )
    master_http: str = option(
        "",
        help="Address of the master's HTTP port (-metrics_port), for its capacity; if "
        "empty, port 9003 on its host.",
    )
    host: str = option(
        "",
        help="Name or address at which peers reach this host; found if empty.",
        alias=Alias(env="MOONCAKE_LOCAL_HOSTNAME", names=("local_hostname",)),
    )
    metadata_server: str = option(
        "P2PHANDSHAKE",
        help="Metadata server, or P2PHANDSHAKE for none.",
        alias=Alias(env="MOONCAKE_TE_META_DATA_SERVER"),
    )
    protocol: Protocol = choice(
        Protocol.TCP,
        help='Transport: "tcp" or "rdma".',
        alias=Alias(env="MOONCAKE_PROTOCOL"),
    )
    devices: str = attrs.field(
        default="",
        converter=_devices,
        metadata={
            "help": "RDMA devices, separated by commas, or a mapping of TP ranks.",
            "alias": Alias(
                env="MOONCAKE_DEVICE",
                names=("device_name", "rdma_devices", "ib_device"),
            ),
        },
    )
    segment_bytes: int = attrs.field(
        default=4 << 30,
        converter=_lent,
        metadata={
            "help": "DRAM that this process lends to the cluster; 0 lends none.",
            "unit": "bytes",
            "alias": Alias(
                env="MOONCAKE_GLOBAL_SEGMENT_SIZE",
                # There it is what all ranks of an engine lend together.
                parse=lambda text: EngineBytes(parse_bytes(text)),
                names=("global_segment_size",),
            ),
        },
    )
    ssd_offload: bool = option(
        False,
        help="Spill this process's segment to a disk.",
        alias=Alias(env="MOONCAKE_ENABLE_SSD_OFFLOAD", names=("enable_ssd_offload",)),
    )
    ssd_path: str = option(
        "",
        help="Directory of the spilled objects.",
        alias=Alias(
            env="MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", names=("ssd_offload_path",)
        ),
    )
    tenant: str = option(
        "",
        help="Tenant, where the master keeps tenants apart.",
        alias=Alias(
            env="MOONCAKE_TENANT_ID",
            # There it is the word for having none.
            parse=lambda text: "" if text == "default" else text,
            names=("tenant_id",),
        ),
    )
    standalone: str = option(
        "",
        help='A client process on this host that owns the memory: "host:port".',
        alias=Alias(
            env="MOONCAKE_CLIENT",
            names=("client_server_address", "standalone_storage"),
        ),
    )
    standalone_bytes: int = size(
        1 << 30, help="Memory that a standalone client shares with this process."
    )
    replicas: int = count(
        1, least=1, most=1024, help="Copies of each object, as far as there is room."
    )
    pin: Pin = choice(
        Pin.NONE, help="How firmly the store keeps objects: none, soft or hard."
    )
    soft_pin_ttl_s: float = duration(
        "0 s",
        most="8760 h",
        help="How long a soft pin lasts; 0 for as long as the master says.",
    )
    preferred_segment: str = attrs.field(
        default="",
        converter=_segments,
        metadata={
            "help": 'Segments to store in, in this order: "host:port", or "self" for '
            "the own one; a list, or text with commas.",
        },
    )
    setup_timeout_s: float = duration(
        "20 s", least="1 ms", most="24 h", help="How long joining may take."
    )
    rpc_timeout_s: float = duration(
        "3 s",
        least="1 ms",
        most="24 h",
        help="How long the master may take; MC_RPC_TIMEOUT_MS goes before it.",
    )
    full_wait_s: float = duration(
        "200 ms",
        most="24 h",
        help="How long to wait for room, and for pages that others still write.",
    )
    lease_s: float = duration(
        "10 s",
        most="24 h",
        help="Lease that the master grants (-default_kv_lease_ttl).",
    )
    client_ttl_s: float = duration(
        "10 s",
        most="24 h",
        help="How long the master waits for a lost process (-client_ttl).",
    )
    max_pieces: int = count(
        0,
        help="Pieces of memory under way at once, over all threads; 0 for as many as "
        "end in time under a frozen owner: 128 over TCP, 1024 over RDMA.",
    )
    # A batch of the core, 32 MiB and its trailers, is one call.
    max_call_bytes: int = size(48 << 20, help="Bytes of one call of the library.")
    max_held_bytes: int = size(
        256 << 20,
        help="Memory that may stay leased after transfers that were given up.",
    )

    def __attrs_post_init__(self) -> None:
        """Reject what the library would reject late, or not at all."""
        for name in ("master", "master_http", "standalone"):
            address = getattr(self, name)
            scheme, apart, _ = address.partition("://")
            if address and (not apart or scheme in _NO_MASTER_SCHEMES):
                split_address(address, name)
        if 0 < self.segment_bytes < SMALLEST_SEGMENT_BYTES:
            raise SettingsError(
                f"segment_bytes {format_bytes(self.segment_bytes)} is too small",
                fix=f"Lend {format_bytes(SMALLEST_SEGMENT_BYTES)} or more, or 0.",
            )
        if self.soft_pin_ttl_s and self.pin is not Pin.SOFT:
            raise SettingsError(
                f"soft_pin_ttl_s is given, and pin is {self.pin}",
                fix='Set pin = "soft", or leave soft_pin_ttl_s out.',
            )
        if self.max_call_bytes < 1:
            raise SettingsError("max_call_bytes must be at least 1")
        if self.ssd_offload and not Path(self.ssd_path).is_absolute():
            raise SettingsError(
                f"ssd_offload needs an absolute ssd_path, not {self.ssd_path!r}"
            )
        if self.ssd_offload and not self.segment_bytes:
            raise SettingsError(
                "ssd_offload spills the own segment, but segment_bytes is 0",
                fix="Give this process a segment, or turn ssd_offload off.",
            )

    @property
    def segments(self) -> tuple[str, ...]:
        """The preferred segments, in their order."""
        return tuple(filter(None, self.preferred_segment.split(",")))

    def completed(self, shard: Shard | None = None) -> MooncakeSettings:
        """Work out what one rank of an engine has of them.

        A standalone client lends and travels in a rank's place, so then nothing is the
        rank's own. Without a shard all ranks are looked at as one.

        Raises:
            SettingsError: If there is no master's address, or nothing is left
                for this rank.
        """
        if self.standalone:
            return self
        if not self.master:
            raise SettingsError(
                "backend 'mooncake': no master is configured",
                fix="Set `master` to host:port, or MOONCAKE_MASTER.",
            )
        lent = int(self.segment_bytes)
        if shard and isinstance(self.segment_bytes, EngineBytes):
            ranks = shard.tp_size * shard.pp_size
            lent //= ranks
            if self.segment_bytes and lent < SMALLEST_SEGMENT_BYTES:
                raise SettingsError(
                    "what the engine lends together (MOONCAKE_GLOBAL_SEGMENT_SIZE, or "
                    f"global_segment_size of a file) over {ranks} ranks is "
                    f"{format_bytes(lent)} each, which is too small",
                    fix=f"Lend {format_bytes(SMALLEST_SEGMENT_BYTES)} or more each.",
                )
        return attrs.evolve(self, segment_bytes=lent, devices=self._devices_of(shard))

    def _devices_of(self, shard: Shard | None) -> str:
        ranked = _by_rank(self.devices)
        if ranked is None:
            return self.devices
        if shard is None:
            return ",".join(ranked.values())
        if shard.tp_rank not in ranked:
            raise SettingsError(
                f"devices (MOONCAKE_DEVICE) have none for TP rank {shard.tp_rank}",
                fix=f"There are some for {', '.join(map(str, ranked))}.",
            )
        return ranked[shard.tp_rank]


def split_address(address: str, name: str = "") -> tuple[str, int]:
    """Split "host:port", also with an IPv6 host in brackets.

    >>> split_address("[::1]:50051")
    ('::1', 50051)
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain = bracketed or not set(host) & set(":/, ")
    if not host or not plain or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        prefix = f"{name} " if name else ""
        raise SettingsError(
            f"{prefix}{address!r} is not host:port",
            fix='Write it like "10.0.0.1:50051".',
        )
    return host, int(port)
