"""Read a master's report on its cluster over HTTP.

The client library has no call for any of it. Every request has a deadline, and a
master whose HTTP port is elsewhere, or closed, only means that it is not known.
"""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING

import attrs

from kvdock import Capacity
from kvdock_mooncake.settings import split_address

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings

PORT = 9003
"""Where a master serves HTTP unless -metrics_port says otherwise."""

_WITHIN_S = 1.0
_MOST_BYTES = 8 << 20
_OK = 200
_CONFLICT = 409  # the answer to a question about tenants where there are none
_SAMPLE = re.compile(r"^(master_\w+) (\d+(?:\.\d+)?(?:e\+?\d+)?)$", re.MULTILINE)

_UNLIMITED_BYTES = 1 << 60
"""A master without a limit for files reports nearly 2**63 bytes."""


@attrs.frozen
class MasterStatus:
    """The HTTP side of a master."""

    host: str
    port: int

    @classmethod
    def of(cls, settings: MooncakeSettings) -> MasterStatus | None:
        """Return where to ask; None where neither master nor port is known."""
        if settings.master_http:
            return cls(*split_address(settings.master_http, "master_http"))
        if settings.standalone or not settings.master or "://" in settings.master:
            return None
        return cls(split_address(settings.master)[0], PORT)

    @property
    def address(self) -> str:
        """Return where it is asked."""
        return f"{self.host}:{self.port}"

    def segments(self) -> tuple[str, ...] | None:
        """Return the names of all segments; None where that is not known."""
        status, text = self._get("/get_all_segments")
        return tuple(text.split()) if status == _OK else None

    def capacity(self) -> Capacity | None:
        """Return what the cluster's memory and disks hold; None if not known."""
        status, text = self._get("/metrics")
        found = {name: int(float(count)) for name, count in _SAMPLE.findall(text)}
        limit = found.get("master_total_capacity_bytes")
        if status != _OK or not limit:
            return None
        used = found.get("master_allocated_bytes", 0)
        disk = found.get("master_total_file_capacity_bytes", 0)
        if 0 < disk < _UNLIMITED_BYTES:
            used += found.get("master_allocated_file_size_bytes", 0)
            limit += disk
        return Capacity(used, limit)

    def has_tenants(self) -> bool | None:
        """Return whether it keeps tenants apart; None where that is not known."""
        status, _ = self._get("/api/v1/tenant_quotas")
        return {_OK: True, _CONFLICT: False}.get(status)

    def _get(self, path: str) -> tuple[int, str]:
        """Ask once; return the status and the answer, 0 and "" if none came."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_WITHIN_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST_BYTES).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()
