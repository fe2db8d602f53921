"""Try whether two transfer engines of this host reach each other."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kvdock import Finding
from kvdock.errors import KvdockError
from kvdock.resilience import run_within
from kvdock_mooncake.direct_engine import DirectEngine

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings

_TIME_S = 5.0


def probe_direct(settings: MooncakeSettings) -> Finding:
    """Write a few bytes from one engine to another, at the address that peers use."""
    engines: list[DirectEngine] = []
    deadline_s = time.monotonic() + _TIME_S
    try:
        for _ in range(2):
            start = partial(DirectEngine.open, settings, (), listens=True)
            engine = run_within(
                deadline_s, start, "starting a transfer engine", DirectEngine.close
            )
            engines.append(engine)
        sender, receiver = engines
        write = partial(sender.reach, receiver.address, receiver.scratch_address)
        arrived = run_within(deadline_s, write, f"writing to {receiver.address}")
    except KvdockError as error:
        return Finding(ok=False, what=error.what, hint=error.fix)
    finally:
        for engine in engines:
            engine.close()
    if arrived:
        what = f"a peer's memory is reached at {receiver.address} ({settings.protocol})"
        return Finding(ok=True, what=what)
    return Finding(
        ok=False,
        what=f"no peer is reached at {receiver.address}",
        hint="Set `host` to an address of this host that peers reach, and open all "
        "ports above 1024 between the hosts.",
    )
