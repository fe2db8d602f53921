"""Check the needs of a set-up before the library is asked.

The library reports most of it as one number, after seconds or minutes, or not at
all: it takes TCP where an RDMA device is missing, and a segment that the host has
no memory for until it is written to.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvdock.errors import PluginError
from kvdock.units import format_bytes, format_seconds
from kvdock_mooncake.master import ClusterError, Master

if TYPE_CHECKING:
    from kvdock_mooncake.library import Library
    from kvdock_mooncake.settings import MooncakeSettings

_RDMA_DEVICES = Path("/sys/class/infiniband")
_MEMORY = Path("/proc/meminfo")
_CONNECT_S = 2.0
_BYTES_S = 1e9
"""What loopback carries between two processes, measured; a slower link needs more."""

REQUIRED = frozenset(
    (
        "batch_get_into",
        "batch_get_into_multi_buffers",
        "batch_get_replica_desc",
        "batch_is_exist",
        "batch_put_from",
        "batch_put_from_multi_buffers",
        "close",
        "get_hostname",
        "is_exist",
        "register_buffer",
        "remove",
        "remove_by_regex",
        "setup",
        "setup_dummy",
        "unregister_buffer",
    )
)
"""Methods of a store that this plugin calls with every release."""


def check_before_setup(library: Library, settings: MooncakeSettings) -> None:
    """Check all that a set-up with these settings needs."""
    check_library(library, settings)
    check_leases(settings)
    check_transport(settings)
    Master.of(settings).connect()
    check_metadata_server(settings)
    check_memory(settings)


def check_library(library: Library, settings: MooncakeSettings) -> None:
    """Reject settings that the installed release does not know."""
    wanted = {
        "SSD offload": settings.ssd_offload,
        "tenants": bool(settings.tenant),
        "lifetimes of soft pins": bool(settings.soft_pin_ttl_s),
    }
    for feature in library.features():
        if wanted.get(feature.name) and not feature.present:
            raise PluginError(
                f"{library.wheel} has no {feature.name}",
                fix=f"Upgrade it to {feature.since} or newer.",
            )
    if missing := sorted(REQUIRED - library.methods):
        raise PluginError(
            f"{library.wheel} has no {', '.join(missing)}",
            fix="Upgrade it to 0.3.10.post2 or newer.",
        )


def check_leases(settings: MooncakeSettings) -> None:
    """Reject leases that end before a whole call can be read."""
    needed_s = round(settings.max_call_bytes / _BYTES_S, 3)
    # With 0 nothing is said about the master, and nothing is answered from memory.
    if 0 < settings.lease_s < needed_s:
        raise ClusterError(
            f"lease_s {format_seconds(settings.lease_s)} is too short: a call of "
            f"{format_bytes(settings.max_call_bytes)} (max_call_bytes) takes "
            f"{format_seconds(needed_s)} or more to read, and a read that outlasts its "
            "lease is a miss",
            fix="Start the master with -default_kv_lease_ttl=5000 and set lease_s to "
            "the same (5 s), or lower max_call_bytes.",
        )


def check_transport(settings: MooncakeSettings) -> None:
    """Reject RDMA without a device: the library would use TCP without a word."""
    if settings.protocol != "rdma":
        return
    present = {path.name for path in _RDMA_DEVICES.glob("*")}
    wanted = {name.strip() for name in settings.devices.split(",") if name.strip()}
    if not present or wanted - present:
        raise ClusterError(
            f"protocol rdma needs {', '.join(sorted(wanted)) or 'a device'}, "
            f"and this host has {', '.join(sorted(present)) or 'no RDMA device'}",
            fix='Correct `devices`, or set protocol = "tcp".',
        )


def check_metadata_server(settings: MooncakeSettings) -> None:
    """Connect to a metadata server that has an HTTP address."""
    address = settings.metadata_server
    if settings.standalone or not address.startswith(("http://", "https://")):
        return
    try:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no metadata server answers at {address}: "
            f"{getattr(error, 'strerror', None) or error}",
            fix="Start it there, correct `metadata_server` "
            "(MOONCAKE_TE_META_DATA_SERVER), or leave it out: P2PHANDSHAKE needs none.",
        ) from error


def check_memory(settings: MooncakeSettings) -> None:
    """Reject a segment for which the host has no memory."""
    if settings.standalone:
        return
    free = available_memory_bytes()
    if settings.segment_bytes > free:
        raise ClusterError(
            f"segment_bytes {format_bytes(settings.segment_bytes)} is more than the "
            f"{format_bytes(free)} of memory that are free on this host",
            fix="Lower segment_bytes (MOONCAKE_GLOBAL_SEGMENT_SIZE), or set it to 0 "
            "and let a mooncake_client on another host lend memory.",
        )


def available_memory_bytes() -> int:
    """Return what a process could have: a full page cache gives way."""
    try:
        found = re.search(
            r"^MemAvailable: +(\d+) kB$", _MEMORY.read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    if found:
        return int(found[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
