"""What two processes say to each other about pages that go straight over.

Three messages, which the engine carries: an offer says how a pool's memory is
reached and laid out, a ticket where the tokens of one request go, and a
completion what became of them. Bytes without pickle; what arrives is checked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from kvdock.batch import Outcome
from kvdock.errors import KvdockError, RegionError
from kvdock.grid import Grid

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, UInt64Array

MAX_MESSAGE_BYTES = 64 << 20
"""Most bytes of a message: 8 million slots."""

_HEAD = struct.Struct("<4sI")
_VERSION = b"kvd1"

T = TypeVar("T")


class MessageError(KvdockError):
    """A peer sent what is not the message that was expected."""


@attrs.frozen(kw_only=True)
class Offer:
    """One pool of a process, as its peers need to know it.

    Args:
        pool: The pool's name.
        transport: The backend that reaches its memory.
        endpoint: What that backend's hook said; empty for a side that only sends.
        grid: Where its tokens lie.
        compatibility: Digest of all that must be equal on both sides.
        required: Whether a request is incomplete without it.
    """

    pool: str
    transport: str
    endpoint: bytes = attrs.field(repr=False)
    grid: Grid = attrs.field(repr=False)
    compatibility: str
    required: bool

    def to_bytes(self) -> bytes:
        """Encode it, for a peer."""
        head = {
            "pool": self.pool,
            "transport": self.transport,
            "compatibility": self.compatibility,
            "required": self.required,
        }
        return _encode("offer", head, [self.endpoint, self.grid.to_bytes()])

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Decode an offer that came from a peer.

        Raises:
            MessageError: If it is not an offer.
        """

        def read(head: dict[str, Any], parts: list[bytes]) -> Offer:
            endpoint, grid = parts
            return cls(
                pool=_text(head["pool"]),
                transport=_text(head["transport"]),
                endpoint=endpoint,
                grid=Grid.from_bytes(grid),
                compatibility=_text(head["compatibility"]),
                required=head["required"] is True,
            )

        return _decode("offer", data, read)


@attrs.frozen(eq=False)
class PoolTicket:
    """Where the tokens of one request go, of one pool.

    Args:
        slots: int64 (n,), for each token its slot of `grid`, or for pools with
            parts per page the page for each page; below 0 for none.
        landing: The grid of a landing area; None for the pool's own, as offered.
    """

    slots: Int64Array = attrs.field(repr=False)
    landing: Grid | None = attrs.field(default=None, repr=False)


@attrs.frozen(eq=False, kw_only=True)
class Ticket:
    """What a receiver gives one sender of a request.

    Args:
        request: Names the request at the receiver.
        sender: Number of the sender among those of the request.
        digests: Whether the completion has digests of the pages.
        pools: Pool name to where its tokens go.
    """

    request: str
    sender: int
    digests: bool
    pools: Mapping[str, PoolTicket]

    def to_bytes(self) -> bytes:
        """Encode it, for a peer."""
        head: dict[str, Any] = {
            "request": self.request,
            "sender": self.sender,
            "digests": self.digests,
            "pools": list(self.pools),
        }
        parts = []
        for one in self.pools.values():
            landing = b"" if one.landing is None else one.landing.to_bytes()
            parts += [one.slots.astype("<i8").tobytes(), landing]
        return _encode("ticket", head, parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """Decode a ticket that came from a peer.

        Raises:
            MessageError: If it is not a ticket.
        """

        def read(head: dict[str, Any], parts: list[bytes]) -> Ticket:
            pools = {}
            pairs = zip(parts[::2], parts[1::2], strict=True)
            for name, (slots, grid) in zip(head["pools"], pairs, strict=True):
                numbers = np.frombuffer(slots, "<i8").astype(np.int64)
                landing = Grid.from_bytes(grid) if grid else None
                pools[_text(name)] = PoolTicket(numbers, landing)
            return cls(
                request=_text(head["request"]),
                sender=int(head["sender"]),
                digests=head["digests"] is True,
                pools=pools,
            )

        return _decode("ticket", data, read)


@attrs.frozen(eq=False, kw_only=True)
class Completion:
    """What became of a request, as its sender knows.

    Args:
        request: The ticket's.
        sender: The ticket's.
        ended: Whether no byte of it can land any more.
        outcomes: Pool name to what became of all its rows, the worst of them.
        digests: Pool name to uint64 (pages,), XXH3-64 of what was sent of each
            page; empty where the ticket asked for none.
    """

    request: str
    sender: int
    ended: bool
    outcomes: Mapping[str, Outcome]
    digests: Mapping[str, UInt64Array] = attrs.field(factory=dict, repr=False)

    def to_bytes(self) -> bytes:
        """Encode it, for a peer."""
        head: dict[str, Any] = {
            "request": self.request,
            "sender": self.sender,
            "ended": self.ended,
            "outcomes": {name: int(one) for name, one in self.outcomes.items()},
            "digests": list(self.digests),
        }
        parts = [one.astype("<u8").tobytes() for one in self.digests.values()]
        return _encode("completion", head, parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Completion:
        """Decode a completion that came from a peer.

        Raises:
            MessageError: If it is not a completion.
        """

        def read(head: dict[str, Any], parts: list[bytes]) -> Completion:
            digests = zip(head["digests"], parts, strict=True)
            return cls(
                request=_text(head["request"]),
                sender=int(head["sender"]),
                ended=head["ended"] is True,
                outcomes={
                    _text(name): Outcome(code)
                    for name, code in head["outcomes"].items()
                },
                digests={
                    _text(name): np.frombuffer(part, "<u8").astype(np.uint64)
                    for name, part in digests
                },
            )

        return _decode("completion", data, read)


def _encode(kind: str, head: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    sizes = [len(part) for part in parts]
    text = json.dumps({"kind": kind, "sizes": sizes, **head}).encode()
    return b"".join([_HEAD.pack(_VERSION, len(text)), text, *parts])


def _decode(
    kind: str, data: bytes, read: Callable[[dict[str, Any], list[bytes]], T]
) -> T:
    try:
        head, parts = _split(kind, data)
        return read(head, parts)
    except (
        ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error,
    ) as error:  # fmt: skip
        raise MessageError(
            f"a peer sent what is not a {kind}: {type(error).__name__}: {error}",
            fix="Both sides need the same version of kvdock.",
        ) from error
    except RegionError as error:
        raise MessageError(error.what, fix=error.fix) from error


def _split(kind: str, data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the head of a message and its parts."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(data)} bytes")
    version, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if version != _VERSION or end > len(data):
        raise ValueError(version)
    head: dict[str, Any] = json.loads(data[_HEAD.size : end])
    if head["kind"] != kind:
        raise ValueError(head["kind"])
    parts = []
    for size in head["sizes"]:
        if size < 0 or end + size > len(data):
            raise ValueError(size)
        parts.append(bytes(data[end : end + size]))
        end += size
    return head, parts


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
