"""Say whether the backend could work here, and what is missing."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from kvdock import Finding
from kvdock.errors import KvdockError
from kvdock.units import format_bytes
from kvdock_mooncake.connect import limit_patience
from kvdock_mooncake.engine_files import unused
from kvdock_mooncake.library import Library, installed, load, the_wheel
from kvdock_mooncake.master import Master
from kvdock_mooncake.preconditions import (
    available_memory_bytes,
    check_leases,
    check_library,
    check_metadata_server,
    check_transport,
)
from kvdock_mooncake.probe_cluster import probe_cluster, probe_disk
from kvdock_mooncake.settings import MooncakeSettings
from kvdock_mooncake.transfer_limits import warnings


def _no(error: KvdockError) -> Finding:
    return Finding(ok=False, what=error.what, hint=error.fix)


def findings(settings: MooncakeSettings) -> list[Finding]:
    """Look at the wheel, its features, the master, transport and disk."""
    found: list[Finding] = []
    try:
        found.append(Finding(ok=True, what=f"{the_wheel(installed())} is installed"))
        library = load()
    except KvdockError as error:
        return [*found, _no(error)]
    found += _features(library)
    found += _files()
    try:
        settings = settings.completed()
        check_library(library, settings)
        check_leases(settings)
    except KvdockError as error:
        return [*found, _no(error)]
    master = Master.of(settings)
    answers = False
    try:
        master.connect()
        said = "something listens at" if master.addresses else "not looked at:"
        found.append(Finding(ok=True, what=f"{said} {master.address}"))
        found.append(_flags(settings))
        answers = True
    except KvdockError as error:
        found.append(_no(error))
    try:
        check_transport(settings)
        check_metadata_server(settings)
        found.append(Finding(ok=True, what=f"transport {settings.protocol}"))
    except KvdockError as error:
        found.append(_no(error))
    environ = dict(os.environ)
    limit_patience(settings, environ)
    for warning in warnings(settings, environ):
        found.append(Finding(ok=False, what=warning, hint="Leave it to the plugin."))
    if settings.segment_bytes and not settings.standalone:
        found.append(_room(settings.segment_bytes))
    if settings.ssd_offload:
        found.append(probe_disk(Path(settings.ssd_path)))
    if answers and not any(not one.ok for one in found):
        # Asked last: it may join the cluster for a moment.
        found += probe_cluster(library, settings)
    return found


def _features(library: Library) -> list[Finding]:
    """List what this release brings, and in which one the rest comes."""
    have = [one.name for one in library.features() if one.present]
    lack = [one for one in library.features() if not one.present]
    # A missing feature is a fact, not an error, until a setting needs it.
    return [
        Finding(ok=True, what=f"it has {', '.join(have)}"),
        *(
            Finding(ok=True, what=f"it has no {one.name}: {one.since} brings them")
            for one in lack
        ),
    ]


def _files() -> list[Finding]:
    """Name the files of engines that are read, and what of them has no effect."""
    found = []
    for file in MooncakeSettings.foreign_files:
        path = os.environ.get(file.variable)
        # One that cannot be read is an error where settings are made of it.
        with suppress(OSError, ValueError):
            left = unused(json.loads(Path(path).read_text())) if path else []
            without = f"; not used here: {', '.join(left)}" if left else ""
            if path:
                what = f"settings come from {path} ({file.variable}){without}"
                hint = "Give what they say as settings." if left else ""
                found.append(Finding(ok=True, what=what, hint=hint, warning=bool(left)))
    return found


def _flags(settings: MooncakeSettings) -> Finding:
    """Name the master's flags, which it does not report, for the user to compare."""
    what = (
        f"the master must have -default_kv_lease_ttl={settings.lease_s * 1000:.0f} and "
        f"-client_ttl={settings.client_ttl_s:.0f}; for as long as its "
        "-put_start_discard_timeout_sec pages of a killed writer stay misses"
    )
    return Finding(ok=True, what=what)


def _room(segment_bytes: int) -> Finding:
    """Compare the segment with the memory of the host."""
    memory = available_memory_bytes()
    what = f"lends {format_bytes(segment_bytes)} of {format_bytes(memory)} free memory"
    return Finding(ok=segment_bytes < memory, what=what, hint="Lower segment_bytes.")
