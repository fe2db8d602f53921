"""Look for settings that this cluster cannot fulfil.

The library takes them without a word, or fails with a number once an engine starts:
it ignores unknown segments and tenants, and stores fewer replicas than asked for.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock import Finding
from kvdock.errors import KvdockError
from kvdock.units import format_bytes
from kvdock_mooncake.connect import join
from kvdock_mooncake.master_status import MasterStatus
from kvdock_mooncake.settings import OWN_SEGMENT
from kvdock_mooncake.teardown import end_store

if TYPE_CHECKING:
    from kvdock_mooncake.library import Library
    from kvdock_mooncake.settings import MooncakeSettings

_LITTLE_BYTES = 1 << 30
"""Less room on a spill disk is soon used up."""


def probe_cluster(library: Library, settings: MooncakeSettings) -> list[Finding]:
    """Look at what the master, which answers, offers to these settings."""
    found = [*_host(settings)]
    status = MasterStatus.of(settings)
    segments = status.segments() if status else None
    if status and segments is not None:
        found += _segments(settings, segments)
    elif status and (settings.tenant or settings.replicas > 1 or settings.segments):
        found.append(
            Finding(
                ok=True,
                warning=True,
                what=f"no HTTP port of the master answers at {status.address}: tenant, "
                "replicas and preferred_segment are not checked",
                hint="Set master_http to the address of its -metrics_port.",
            )
        )
    if status and settings.tenant and status.has_tenants() is False:
        found.append(
            Finding(
                ok=False,
                what=f"tenant {settings.tenant!r} is ignored: the master keeps no "
                "tenants apart",
                hint="Start it with -enable_multi_tenants, or leave tenant out.",
            )
        )
    if settings.ssd_offload:
        found.append(_offload(library, settings))
    return found


def _host(settings: MooncakeSettings) -> list[Finding]:
    """Check that peers can resolve the name of this host."""
    if not settings.host:
        return []
    name = settings.host.rpartition(":")[0] or settings.host
    try:
        socket.getaddrinfo(name.strip("[]"), None)
    except OSError as error:
        return [
            Finding(
                ok=False,
                what=f"host {settings.host!r} cannot be resolved: "
                f"{error.strerror or error}",
                hint="Set `host` (MOONCAKE_LOCAL_HOSTNAME) to a name or an address at "
                "which peers reach this host, or leave it out.",
            )
        ]
    return []


def _segments(settings: MooncakeSettings, known: tuple[str, ...]) -> list[Finding]:
    """Compare what is preferred and how often with the segments that there are."""
    found = []
    unknown = [one for one in settings.segments if one not in (OWN_SEGMENT, *known)]
    if unknown:
        found.append(
            Finding(
                ok=False,
                what=f"preferred_segment names {', '.join(unknown)}, which the cluster "
                "does not have: it is ignored",
                hint=f"It has {', '.join(known) or 'none'}.",
            )
        )
    owners = len(known) + bool(settings.segment_bytes and not settings.standalone)
    if settings.replicas > owners:
        found.append(
            Finding(
                ok=False,
                what=f"replicas is {settings.replicas}, and the cluster has {owners} "
                "owners of memory with this process: fewer copies are stored",
                hint="Start more owners, or lower replicas.",
            )
        )
    if not owners:
        found.append(
            Finding(
                ok=False,
                what="no process of the cluster lends memory, and segment_bytes is 0: "
                "nothing can be stored",
                hint="Start a mooncake_client, or set segment_bytes.",
            )
        )
    return found


def _offload(library: Library, settings: MooncakeSettings) -> Finding:
    """Join once with a disk and without memory: the master says if it takes it."""
    with tempfile.TemporaryDirectory(prefix="kvdock-offload-") as folder:
        trial = attrs.evolve(settings, segment_bytes=0, ssd_offload=False)
        try:
            end_store(join(library, trial, str(Path(folder).resolve())))
        except KvdockError as error:
            return Finding(
                ok=False,
                what=f"ssd_offload does not work: {error.what}",
                hint="Start the master with -enable_offload=true, or turn ssd_offload "
                "off.",
            )
    return Finding(ok=True, what="the master takes objects that are spilled to disks")


def probe_disk(folder: Path) -> Finding:
    """Look whether spilled objects can be written, and whether there is room."""
    # Not `exists`, which raises below a folder that is closed to this user.
    above = next(one for one in (folder, *folder.parents) if os.access(one, os.F_OK))
    if not os.access(above, os.W_OK | os.X_OK):
        return Finding(
            ok=False,
            what=f"ssd_path {folder} cannot be written",
            hint=f"Make {above} writable for this user.",
        )
    free = shutil.disk_usage(above).free
    return Finding(
        ok=free >= _LITTLE_BYTES,
        what=f"ssd_path {folder} can be written and has {format_bytes(free)} free",
        hint=f"Free at least {format_bytes(_LITTLE_BYTES)}, or name another ssd_path.",
    )
