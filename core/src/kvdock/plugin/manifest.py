"""What a backend declares about itself: a plain record, no I/O.

Grammar of the names: a field is called after what is supported, `max_` begins
a limit, and a number carries its unit. Every field is read by a routing rule,
by the conformance kit, or by both; one that neither reads is deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_type_hints

import attrs

from kvdock.config.schema import CORE_WORDS
from kvdock.errors import ManifestError, did_you_mean
from kvdock.pools.enums import HitPolicy, Layout, PoolKind, Sharding
from kvdock.validators import Validators

API_VERSION = 2
"""Number of the newest contract between the core and a plugin."""

OLDEST_API_VERSION = 2
"""Number of the oldest contract that this core still keeps."""

_LIMITS = (
    "max_object_bytes",
    "max_batch_keys",
    "max_key_bytes",
    "max_send_rows",
    "landing_run_bytes",
)

BACKEND_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class Support(StrEnum):
    """How well a backend does something. True only for the last two."""

    UNDECLARED = "?"
    """Not declared; treated as NO, but shown as `?`."""
    NO = "no"
    """Declared as not supported."""
    EMULATED = "emulated"
    """It can, at a cost (a copy, a second request)."""
    NATIVE = "native"
    """It can, directly."""

    def __bool__(self) -> bool:
        """Return whether it can be relied on."""
        return self in (Support.EMULATED, Support.NATIVE)


class Scope(StrEnum):
    """How far something reaches, from near to far."""

    NONE = "none"
    """Nowhere."""
    NAMESPACE = "namespace"
    """One namespace: what one model and format stored."""
    PROCESS = "process"
    """This process."""
    HOST = "host"
    """Every process of this host."""
    CLUSTER = "cluster"
    """Every host that uses the same store."""

    def __le__(self, other: str) -> bool:
        """Compare reach, not spelling."""
        return self._reach <= Scope(other)._reach

    def __ge__(self, other: str) -> bool:
        """Compare reach, not spelling."""
        return self._reach >= Scope(other)._reach

    def __lt__(self, other: str) -> bool:
        """Compare reach, not spelling."""
        return self._reach < Scope(other)._reach

    def __gt__(self, other: str) -> bool:
        """Compare reach, not spelling."""
        return self._reach > Scope(other)._reach

    @property
    def _reach(self) -> int:
        return list(Scope).index(self)


class Capability(StrEnum):
    """What a pool may need from a backend; the router asks for each."""

    STORE = "store"
    """Keep pages of this kind at all."""
    HIT_POLICY = "hit_policy"
    """Answer which of the pages exist that this policy asks about."""
    LAYOUT = "layout"
    """Move pages that lie in this layout."""
    SHARDING = "sharding"
    """Keep what ranks hold under this division."""
    SPLIT_HEADS = "split_heads"
    """Keep a rank's heads as several objects."""
    DRAFT = "draft"
    """Keep pages of a draft model."""
    MULTI_BUFFER = "multi_buffer"
    """Move one object from and to several pieces of memory."""
    ZERO_COPY = "zero_copy"
    """Move bytes straight between the engine's memory and the store."""
    MEMORY_REGISTRATION = "memory_registration"
    """Reach the engine's memory, which may not be registrable."""
    HOST_ALLOCATOR = "host_allocator"
    """Reach any memory, and not only what the backend itself brings."""
    OBJECT_SIZE = "object_size"
    """Keep objects as large as this pool's."""
    BATCH_SIZE = "batch_size"
    """Take all objects of a page in one batch."""
    KEY_SIZE = "key_size"
    """Take keys as long as this pool's."""
    SHARING = "sharing"
    """Let the processes of the required scope find stored pages."""
    DURABILITY = "durability"
    """Keep stored bytes beyond the required scope."""
    CLEAR_REACH = "clear_reach"
    """Clear no more than may be cleared."""
    INTEGRITY = "integrity"
    """Verify what is returned."""
    EVICTION = "eviction"
    """Make room when full."""
    FORK_SAFE = "fork_safe"
    """Be used in forked children."""
    RETENTION = "retention"
    """Keep promises; EMULATED where pages expire and these settings promise none."""
    GATED_GET = "gated_get"
    """Leave memory alone once a GET was abandoned."""
    GATED_PUT = "gated_put"
    """Serve nothing that was taken from memory after a PUT was abandoned."""
    PEERS = "peers"
    """Move pages to a peer's memory instead of a store."""


@attrs.frozen
class Verdict:
    """One answer about one capability; truthy if it can be relied on.

    Args:
        support: The grade.
        reason: Why, for the route table.
    """

    support: Support
    reason: str

    def __bool__(self) -> bool:
        """Return whether the capability can be relied on."""
        return bool(self.support)


W = TypeVar("W", bound=StrEnum)


# A grade that is plain text is true even where it says "no". So words become
# members; what is not a word stays what it is, and a validator names its field.
def _member(kind: type[W], value: W) -> W:
    return kind(value) if value in list(kind) else value


def _members(kind: type[W], value: Iterable[W]) -> frozenset[W]:
    alone = isinstance(value, str) or not isinstance(value, Iterable)
    words: Iterable[Any] = (value,) if alone else value
    return frozenset(_member(kind, word) for word in words)


def _hit_policies(value: Iterable[HitPolicy]) -> frozenset[HitPolicy]:
    return _members(HitPolicy, value)


def _layouts(value: Iterable[Layout]) -> frozenset[Layout]:
    return _members(Layout, value)


def _shardings(value: Iterable[Sharding]) -> frozenset[Sharding]:
    return _members(Sharding, value)


_CHECK = Validators(ManifestError)


def _word(default: StrEnum) -> Any:  # noqa: ANN401 - as attrs.field
    kind = type(default)
    return attrs.field(
        default=default,
        converter=lambda value: _member(kind, value),
        validator=_CHECK.members(kind),
    )


def _grade() -> Any:  # noqa: ANN401 - as attrs.field
    """Declare how well something is done; not declared by default."""
    return _word(Support.UNDECLARED)


def _scope() -> Any:  # noqa: ANN401 - as attrs.field
    """Declare how far something reaches; nowhere by default."""
    return _word(Scope.NONE)


@attrs.frozen(kw_only=True)
class KindSupport:
    """What a backend can do with pools of one kind.

    Args:
        hit_policies: Which questions about a prefix it answers; those that
            want every page where nothing is said.
        layouts: How pages may lie in memory; any way where nothing is said.
        shardings: How ranks may divide a pool; any way where nothing is said.
        split_heads: Keeps a rank's heads as several objects.
        draft: Keeps pages of draft models.
        multi_buffer: Moves one object from and to several pieces of memory.
    """

    hit_policies: frozenset[HitPolicy] = attrs.field(
        default=frozenset({HitPolicy.ALL_PAGES}),
        converter=_hit_policies,
        validator=_CHECK.members(HitPolicy),
    )
    layouts: frozenset[Layout] = attrs.field(
        default=frozenset(Layout), converter=_layouts, validator=_CHECK.members(Layout)
    )
    shardings: frozenset[Sharding] = attrs.field(
        default=frozenset(Sharding),
        converter=_shardings,
        validator=_CHECK.members(Sharding),
    )
    split_heads: Support = _grade()
    draft: Support = _grade()
    multi_buffer: Support = _grade()

    @classmethod
    def of_every_kind(cls) -> dict[PoolKind, Self]:
        """Return the kinds of a backend that keeps any pool, as bytes under a key."""
        yes = Support.NATIVE
        any_pool = cls(
            hit_policies=HitPolicy, split_heads=yes, draft=yes, multi_buffer=yes
        )
        return dict.fromkeys(PoolKind, any_pool)


def _kinds(
    value: Mapping[PoolKind, KindSupport] | Iterable[tuple[PoolKind, KindSupport]],
) -> Mapping[PoolKind, KindSupport]:
    try:
        found = dict(value)
    except (TypeError, ValueError) as error:
        raise ManifestError(f"kinds is not a mapping: {value!r}") from error
    return {_member(PoolKind, kind): support for kind, support in found.items()}


def _check_kind(backend: str, kind: object, support: object) -> None:
    if kind not in list(PoolKind):
        raise ManifestError(
            f"backend {backend!r} declares an unknown kind of pool, {str(kind)!r}",
            fix=did_you_mean(str(kind), [one.value for one in PoolKind])
            or f"Known are {', '.join(PoolKind)}.",
        )
    if not isinstance(support, KindSupport):
        raise ManifestError(
            f"backend {backend!r} declares {str(kind)!r}: {support!r}",
            fix="Map members of PoolKind to KindSupport records.",
        )


@attrs.frozen(kw_only=True)
class Manifest:
    """What one backend can do.

    Args:
        name: The backend's one name: also its entry point's.
        api: The number of the contract that it was written for.
        summary: What it is, in one line.
        kinds: What it can do for each kind of pool that it takes.
        zero_copy: Moves bytes from and to addresses of the engine's memory.
        memory_registration: Wants to know memory before it moves bytes; what
            may not be registered is staged.
        host_allocator: Brings memory of its own; pools elsewhere are staged.
            Where only some settings ask for that, `kvdock_check_capability`
            distinguishes them.
        gated_get: Never lands bytes in the memory of a GET that was abandoned:
            it writes there only inside of `Batch.gate`, and waits for no I/O in it.
        gated_put: Never serves bytes that a PUT took from memory after it was
            abandoned: it reads there only inside of `Batch.gate`, or hashes
            there before it writes, so that changed bytes are found corrupt. A
            pool is staged for an engine that uses pages again at once, unless
            both grades can be relied on.
        peers: Writes rows of memory into a peer's memory: the member `peers` of its
            stores, and `Operation.SEND`.
        integrity: Verifies length and content of what it returns.
        eviction: Makes room by itself when it is full.
        touch: Evicts by use, and counts objects as used when it is told so. This
            and the next two declare members of a store; see `kvdock.plugin.store`.
        removed: Knows which of its objects are no longer there.
        capacity: Knows how full it is.
        retention: Keeps promises and lets objects expire: `Operation.RETAIN`, and the
            times of a PUT. Where it is emulated, trailers of the core let objects
            expire, `Batch.keep_until` of a PUT is a wish, and nothing is promised.
        tenant_quotas: Keeps the quotas of tenants, `AttachConfig.tenants`: while others
            are above theirs, a tenant within its own loses no page to them.
        durability: What stored bytes survive the end of.
        sharing: Who finds what was stored.
        clear_reach: How far a clear goes.
        max_object_bytes: Largest object, or 0 for no limit of its own.
        max_batch_keys: Most keys of one batch, or 0.
        max_key_bytes: Longest key, or 0.
        max_send_rows: Most rows of one SEND, or 0; the core cuts them.
        landing_run_bytes: Rows that are shorter than this on average go to a
            landing area, as whole pages that the receiver copies to their slots:
            measured, where that begins to be faster. 0 where rows always go to
            their slots.
        send_drain_s: How long after a sender failed or died bytes may still land
            that it had sent: what lies in the buffers of sockets.
        fork_safe: Whether a handle may be used in a forked child.
        sealed: Whether a wrapper encrypts each object, and proves at each load that it
            was stored under this key. Such pages have a namespace of their own, and no
            trailer of the core. Only wrappers declare it.
        settings: The attrs class of its settings, or None.
    """

    name: str = attrs.field(validator=_CHECK.text)
    api: int
    summary: str = attrs.field(validator=_CHECK.text)
    kinds: Mapping[PoolKind, KindSupport] = attrs.field(converter=_kinds)
    zero_copy: Support = _grade()
    memory_registration: Support = _grade()
    host_allocator: Support = _grade()
    gated_get: Support = _grade()
    gated_put: Support = _grade()
    peers: Support = _grade()
    integrity: Support = _grade()
    eviction: Support = _grade()
    touch: Support = _grade()
    removed: Support = _grade()
    capacity: Support = _grade()
    retention: Support = _grade()
    tenant_quotas: Support = _grade()
    durability: Scope = _scope()
    sharing: Scope = _scope()
    clear_reach: Scope = _scope()
    max_object_bytes: int = attrs.field(default=0, validator=_CHECK.integer)
    max_batch_keys: int = attrs.field(default=0, validator=_CHECK.integer)
    max_key_bytes: int = attrs.field(default=0, validator=_CHECK.integer)
    max_send_rows: int = attrs.field(default=0, validator=_CHECK.integer)
    landing_run_bytes: int = attrs.field(default=0, validator=_CHECK.integer)
    send_drain_s: float = attrs.field(default=0.0, validator=_CHECK.seconds)
    fork_safe: Support = _grade()
    sealed: bool = False
    settings: type | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse a manifest that contradicts itself."""
        if not BACKEND_NAME.fullmatch(self.name):
            raise ManifestError(
                f"{self.name!r} is not a valid backend name",
                fix="Use a-z, 0-9 and _, beginning with a letter.",
            )
        if not self.kinds:
            raise ManifestError(f"backend {self.name!r} takes no kind of pool")
        for kind, support in self.kinds.items():
            _check_kind(self.name, kind, support)
        for limit in _LIMITS:
            if getattr(self, limit) < 0:
                raise ManifestError(f"backend {self.name!r}: {limit} is negative")
        if self.settings is not None and not attrs.has(self.settings):
            raise ManifestError(
                f"backend {self.name!r}: {self.settings!r} is not an attrs class"
            )
        fields = attrs.fields(self.settings) if self.settings else ()
        for field in fields:
            if field.name in CORE_WORDS:
                raise ManifestError(
                    f"backend {self.name!r}: a setting is called {field.name!r}, which "
                    "is a word of the core's",
                    fix="Give it another name.",
                )

    @property
    def path_setting(self) -> str:
        """Return the first setting whose type is a path; "" without one.

        A backend says by this type where it keeps its directory, so no setting has
        to be known by name.
        """
        for name, hint in (
            get_type_hints(self.settings).items() if self.settings else ()
        ):
            if Path in (hint, *get_args(hint)):
                return name
        return ""

    def support(self, capability: Capability, kind: PoolKind) -> Support:
        """Return the declared grade of a graded capability for a kind."""
        mine = self.kinds.get(kind)
        if mine is None:
            return Support.NO
        graded: dict[Capability, Support] = {
            Capability.STORE: Support.NATIVE,
            Capability.SPLIT_HEADS: mine.split_heads,
            Capability.DRAFT: mine.draft,
            Capability.MULTI_BUFFER: mine.multi_buffer,
            Capability.ZERO_COPY: self.zero_copy,
            Capability.GATED_GET: self.gated_get,
            Capability.GATED_PUT: self.gated_put,
            Capability.PEERS: self.peers,
            Capability.INTEGRITY: self.integrity,
            Capability.EVICTION: self.eviction,
            Capability.FORK_SAFE: self.fork_safe,
            Capability.RETENTION: self.retention,
        }
        return graded[capability]
