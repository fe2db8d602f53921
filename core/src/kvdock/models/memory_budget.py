"""How much host memory pools may take, and whether they fit.

The kernel reports more free memory than a container may use, so the smallest
of what the machine and every control group above this process have left
counts. Measured once when memory is to be allocated, on the calling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import PoolError
from kvdock.pools.validators import non_negative
from kvdock.units import format_bytes
from kvdock.validators import as_int, is_int

if TYPE_CHECKING:
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec

RESERVE_BYTES = 10 << 30
"""Left to everything else on the host.

Source: SGLang 0.5.23, `HICACHE_HOST_MEMORY_RESERVE_BYTES`.
"""


@attrs.frozen
class HostBudget:
    """Host memory that pools may take.

    Args:
        free_bytes: What is left by the tightest limit.
        limited_by: Which limit that is, for messages.
        reserve_bytes: What stays untouched of it.
    """

    free_bytes: int = attrs.field(converter=as_int, validator=non_negative)
    limited_by: str
    reserve_bytes: int = attrs.field(
        default=RESERVE_BYTES, converter=as_int, validator=non_negative
    )

    @classmethod
    def measure(
        cls, reserve_bytes: int = RESERVE_BYTES, *, root: Path = Path("/")
    ) -> HostBudget:
        """Ask the machine and its control groups.

        `root` is where `proc` and `sys` are mounted.
        """
        import psutil  # type: ignore[import-untyped]  # noqa: PLC0415 - has no types; only who allocates needs it

        limits = {"the machine": int(psutil.virtual_memory().available)}
        limits |= _control_groups(root)
        limited_by = min(limits, key=lambda name: limits[name])
        return cls(limits[limited_by], limited_by, reserve_bytes)

    @property
    def usable_bytes(self) -> int:
        """Return what is left after the reserve, at least 0."""
        return max(0, self.free_bytes - self.reserve_bytes)

    def pages_that_fit(
        self, pools: Sequence[PoolSpec], shard: Shard, *, ranks: int = 1
    ) -> int:
        """Return how many pages of all pools together there is room for.

        So many `ranks` share this host.

        Raises:
            PoolError: If no rank shares it.
        """
        if not is_int(as_int(ranks)) or ranks < 1:
            raise PoolError(f"{ranks!r} ranks cannot share a host")
        each = sum(pool.page_bytes(shard) for pool in pools)
        return self.usable_bytes // (each * ranks) if each else 0

    def check(
        self,
        rows: Sequence[tuple[str, int]],
        *,
        kind: str = "pool",
        times: str = "",
        fix: str = "",
    ) -> int:
        """Check that there is room for all of these; return their bytes.

        Each row is a name and the bytes that it needs; the texts are for the message.

        Raises:
            PoolError: Naming the first one that does not fit, with all numbers.
        """
        total = 0
        short = ""
        for name, nbytes in rows:
            total += nbytes
            if total > self.usable_bytes and not short:
                short = name
        if short:
            listed = ", ".join(f"{name} {format_bytes(n)}" for name, n in rows)
            raise PoolError(
                f"{kind} {short!r} does not fit: {listed}{times} make "
                f"{format_bytes(total)}, but {self.limited_by} has "
                f"{format_bytes(self.free_bytes)} left, of which "
                f"{format_bytes(self.reserve_bytes)} are kept in reserve",
                fix=fix or f"{format_bytes(self.usable_bytes)} are usable.",
            )
        return total


def _control_groups(root: Path) -> dict[str, int]:
    """Return what each limiting control group of this process has left."""
    left: dict[str, int] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        # A limit of any group above holds as well; inside a container the
        # path may be the host's, of which only the end or nothing is mounted.
        group = Path(path.lstrip("/"))
        for folder in [group, *group.parents]:
            place = root / base / folder
            ceiling, used = _number(place / limit), _number(place / usage)
            if ceiling is None or used is None:
                continue
            cached = _reclaimable(place / "memory.stat")
            name = "" if folder == Path() else folder
            left[f"control group /{name}"] = max(0, ceiling - used + cached)
    return left


def _reclaimable(path: Path) -> int:
    """Return the bytes of file cache that the kernel gives back at once."""
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        # A group may be called anything.
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
