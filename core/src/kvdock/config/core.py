"""The core's own settings: what storage may cost an engine, at most.

One schema, in groups. `kvdock.config.sources` fills it from files, environment
and the engine; an adapter may also build it in code.
"""

from __future__ import annotations

import time
from enum import StrEnum

import attrs

from kvdock.config.fields import choice, count, duration, option, size
from kvdock.config.tenants import Tenants, read_tenants

KEPT_FREE_BYTES = 256 << 20
"""Left free by default where kvdock itself takes memory, which is little."""


class Integrity(StrEnum):
    """The proof that a page's bytes are those that were stored."""

    AUTO = "auto"
    """The backend where a report of the kit proves that it does, otherwise a trailer of
    the core."""
    TRUST = "trust"
    """The backend where it declares that it does, proven or not."""
    ALWAYS = "always"
    """A trailer of the core for every backend, also where it verifies."""
    OFF = "off"
    """Neither: wrong bytes of the right length would be served."""


class StagingPolicy(StrEnum):
    """The pools that are moved through memory of the core."""

    ROUTED = "routed"
    """Those whose route says so."""
    SAFE = "safe"
    """Also those whose backend may touch the pages of an abandoned call: for an
    engine that cannot hold them back."""
    LOADS = "loads"
    """Loads of all pools, and stores of those whose route says so: for an engine
    that holds back pages that are stored, but not those that are loaded."""
    ALWAYS = "always"
    """All, whatever their backend promises."""


class PaysMode(StrEnum):
    """Choice between loading a prefix and computing it where that seems faster."""

    ALWAYS = "always"
    """What is found is loaded, and nothing is learned."""
    ADVISORY = "advisory"
    """What is found is loaded, and it is counted what would have been done."""
    ON = "on"
    """What does not pay is computed, once it is known what both cost."""


_LEAST = "1 ms"
"""The shortest time: with less, a call would be late before it is made."""


@attrs.frozen(kw_only=True)
class Deadlines:
    """The time that one call may take, over all pools and batches of it.

    Each is limited: whatever touches the world may hang.
    """

    exists: float = duration("1 s", least=_LEAST, help="Looking up a prefix.")
    get: float = duration("5 s", least=_LEAST, help="Loading pages.")
    put: float = duration("5 s", least=_LEAST, help="Storing pages.")
    delete: float = duration("5 s", least=_LEAST, help="Dropping objects.")
    retain: float = duration("5 s", least=_LEAST, help="Promising pages, or expiry.")
    send: float = duration("10 s", least=_LEAST, help="Sending pages to a peer.")
    clear: float = duration("8 s", least=_LEAST, help="Clearing a namespace.")
    attach: float = duration("120 s", least=_LEAST, help="Registering one pool.")
    release: float = duration("4 s", least=_LEAST, help="Releasing one pool.")
    close: float = duration("8 s", least=_LEAST, help="Detaching altogether.")
    grace: float = duration(
        "50 ms", help="How long past its deadline a call may still report."
    )

    def until(
        self, operation: str, timeout_s: float | None = None, *, factor: float = 1.0
    ) -> float:
        """Return the deadline of an operation that begins now.

        The one place that turns a duration of the settings into a time.

        Args:
            operation: A field of this class; an `Operation` is one.
            timeout_s: How long it may take instead.
            factor: So many times as long.

        Returns:
            Seconds on `time.monotonic()`'s clock.
        """
        seconds: float = getattr(self, operation) if timeout_s is None else timeout_s
        return time.monotonic() + factor * seconds


@attrs.frozen(kw_only=True)
class BreakerSettings:
    """Settings of the circuit breaker: when it opens, and when it tries again."""

    failures: int = count(5, least=1, help="Failed calls in a row that open it.")
    abandoned_calls: int = count(
        2, least=1, help="Calls over their deadline that open it."
    )
    backoff: float = duration(
        "1 s", least=_LEAST, help="Time until the first probe; doubles."
    )
    max_backoff: float = duration(
        "60 s", least=_LEAST, help="Longest time between probes, unless they hang."
    )
    probe_timeout: float = duration(
        "1 s", least=_LEAST, help="How long a probe may take."
    )
    max_hanging_probes: int = count(
        12, least=1, help="Probes of one operation that may hang at once."
    )


@attrs.frozen(kw_only=True)
class NegativeCacheSettings:
    """The time for which an answer "not there" is believed without asking again."""

    max_keys: int = count(65536, help="Keys remembered for each backend; 0 for none.")
    absent_ttl: float = duration(
        "0 s", help="Lifetime of a key that was absent; 0 asks every time."
    )
    corrupt_ttl: float = duration(
        "30 s", help="Lifetime of a key whose bytes were wrong."
    )


@attrs.frozen(kw_only=True)
class CallSettings:
    """Limits on what goes on at once."""

    max_concurrent_calls: int = count(8, least=1, help="Calls at once in each backend.")
    max_abandoned_calls: int = count(
        8, least=1, help="Calls over their deadline until a backend is cut off."
    )
    batch_pages: int = count(1024, least=1, help="Most pages of one batch.")
    batch_bytes: int = size(32 << 20, help="Most bytes of one batch.")
    staging: StagingPolicy = choice(
        StagingPolicy.ROUTED, help="Which pools are staged."
    )
    staging_bytes: int = size(
        4 << 20, help="Most bytes of a batch that is staged; a page at least."
    )
    staging_buffers: int = count(
        4, least=1, help="Batches that a staged pool may have under way."
    )
    capacity_interval: float = duration(
        "10 s", help="How often an observed backend is asked how full it is."
    )


@attrs.frozen(kw_only=True)
class HostMemorySettings:
    """The share of the host's memory that the core may take for itself."""

    reserve: int = size(
        KEPT_FREE_BYTES,
        help="Left free of what the machine and its control groups have.",
    )


@attrs.frozen(kw_only=True)
class TransferSettings:
    """Reads and writes in the background."""

    readers: int = count(1, least=1, help="Workers that load.")
    writers: int = count(1, least=1, help="Workers that store.")
    queue: int = count(64, least=1, help="Transfers waiting in each direction.")


@attrs.frozen(kw_only=True)
class PeerSettings:
    """Pages that go straight to a peer's memory, or come from one."""

    verify: bool = option(
        True, help="Compare a digest of each page where it arrives; for TCP."
    )
    senders: int = count(2, least=1, help="Requests that are sent to a peer at once.")
    queue: int = count(64, least=1, help="Requests that wait for a peer.")
    landing_bytes: int = size(
        64 << 20, help="Memory of each pool for pages whose slots are scattered."
    )
    max_held_percent: int = count(
        25, help="Slots of a pool that ended requests may hold for lost senders."
    )
    key_file: str = option(
        "", help="File of keys for messages of peers, one a line; the first signs."
    )


@attrs.frozen(kw_only=True)
class TierSettings:
    """Limits on the cost of a chain of tiers: lookups farther away, and copies."""

    lookup: float = duration(
        "250 ms",
        least=_LEAST,
        help="How long a lookup may wait for each tier behind the nearest.",
    )
    threads: int = count(2, least=1, help="Copies between tiers at once.")
    queue_bytes: int = size(
        1 << 30, help="Pages that may wait to be copied; more are not copied."
    )
    batch_bytes: int = size(
        8 << 20,
        help="Most bytes of one copy, or of one load from a far tier, at a time; "
        "each pool takes six times as much, and so does each of its tiers.",
    )
    uses: int = count(
        1 << 16, help="Pages of each pool remembered for their second use."
    )


@attrs.frozen(kw_only=True)
class RetentionSettings:
    """How long pages are kept and served."""

    max_age: float = duration(
        "0 s", help="Pages are not served any longer than this; 0 for ever."
    )
    erase_within: float = duration(
        "60 s",
        least="10 s",
        help="How soon after its time an expired page is overwritten.",
    )
    hints: bool = option(
        True, help="Whether hints that clients send with requests are followed."
    )


@attrs.frozen(kw_only=True)
class PaysSettings:
    """Settings of the choice between loading a prefix and computing it."""

    mode: PaysMode = choice(PaysMode.ON, help="Who decides: always, advisory or on.")
    margin: float = option(
        0.03,
        help="Share that is added to what a load is expected to take.",
    )
    recompute: float = option(
        0.0,
        help="Tokens per second that the engine prefills, as `kvdock bench --engine` "
        "prints it; 0 to learn it from the engine.",
    )


@attrs.frozen(kw_only=True)
class CoreSettings:
    """All settings of the core."""

    integrity: Integrity = choice(Integrity.AUTO, help="Who verifies pages.")
    self_test: bool = option(False, help="Move one page of each pool when attaching.")
    page_events: int = count(
        0, help="Stored pages whose removal the engine is to hear of; 0 for none."
    )
    observers: tuple[str, ...] = option((), help="Observers to switch on, by name.")
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    breaker: BreakerSettings = attrs.field(factory=BreakerSettings)
    negative_cache: NegativeCacheSettings = attrs.field(factory=NegativeCacheSettings)
    calls: CallSettings = attrs.field(factory=CallSettings)
    transfers: TransferSettings = attrs.field(factory=TransferSettings)
    peers: PeerSettings = attrs.field(factory=PeerSettings)
    tiers: TierSettings = attrs.field(factory=TierSettings)
    retention: RetentionSettings = attrs.field(factory=RetentionSettings)
    host_memory: HostMemorySettings = attrs.field(factory=HostMemorySettings)
    pays: PaysSettings = attrs.field(factory=PaysSettings)
    tenants: Tenants = attrs.field(
        factory=Tenants,
        converter=read_tenants,
        repr=False,
        metadata={
            "help": "Tenants, from the section `tenants`.",
            "secret": True,
            "explains": True,  # it shows names of files and variables, never a salt
        },
    )
