"""What two processes say to each other about pages that go straight over.

Three messages, which the engine carries: an offer says how a pool's memory is
reached and laid out, a ticket where the tokens of one request go, and a
completion what became of them. They are MessagePack, read by a schema that bounds
every length before anything is built, and signed where the processes share a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import attrs
import msgspec
import numpy as np
from msgspec import Meta

from kvdock.batch import Outcome
from kvdock.errors import KvdockError, RegionError
from kvdock.geometry.grid import Grid, PartGrid
from kvdock.peers.keys import MAC_BYTES
from kvdock.pools.enums import Per  # noqa: TC001 - the schema reads it

if TYPE_CHECKING:
    from typing import Self

    from kvdock.arrays import Int64Array, UInt64Array
    from kvdock.peers.keys import MessageKeys

MAX_MESSAGE_BYTES = 64 << 20
"""Most bytes of a message: two pools with 4 million slots each."""

_MAX_SLOTS = 1 << 22
_MAX_LAYERS = 1 << 12
_MAX_POOLS = 64
_MAX_VOID = 1 << 16
_MAX_ENDPOINT_BYTES = 1 << 20
_FORMAT = b"kvd2"
_UNSIGNED = bytes(MAC_BYTES)

T = TypeVar("T")
W = TypeVar("W", bound="_Wire")

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 56)]
_Count = Annotated[int, Meta(ge=1, lt=1 << 56)]
_Few = Annotated[int, Meta(ge=0, le=_MAX_LAYERS)]
_Bases = Annotated[bytes, Meta(max_length=8 * _MAX_LAYERS)]
_Slots = Annotated[bytes, Meta(max_length=8 * _MAX_SLOTS)]
_Seconds = Annotated[float, Meta(ge=0, le=1e10)]


class MessageError(KvdockError):
    """A peer sent what is not the message that was expected."""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a message, as MessagePack has them."""


class _PartWire(_Wire, frozen=True, array_like=True):
    name: _Name
    row_bytes: _Count
    outer: _Count
    heads: tuple[_Number, _Number]
    bases: _Bases
    page_stride: _Number
    token_stride: _Number
    outer_stride: _Number
    head_stride: _Number


class _GridWire(_Wire, frozen=True, array_like=True):
    pool: _Name
    pages: _Count
    page_tokens: _Count
    per: Per
    layers: Annotated[tuple[_Number, ...], Meta(max_length=_MAX_LAYERS)]
    runs: tuple[_Few, _Few]
    interleave_tokens: _Count
    rank: tuple[_Few, _Few] | None
    parts: Annotated[tuple[_PartWire, ...], Meta(min_length=1, max_length=_MAX_POOLS)]


class _EpochWire(_Wire, frozen=True, array_like=True):
    process: _Name
    oldest: _Number
    void: Annotated[tuple[_Number, ...], Meta(max_length=_MAX_VOID)]


class _OfferWire(_Wire, frozen=True, tag="offer"):
    pool: _Name
    transport: _Name
    endpoint: Annotated[bytes, Meta(max_length=_MAX_ENDPOINT_BYTES)]
    grid: _GridWire
    compatibility: _Name
    required: bool
    epoch: _EpochWire


class _PoolTicketWire(_Wire, frozen=True, array_like=True):
    slots: _Slots
    landing: _GridWire | None


class _TicketWire(_Wire, frozen=True, tag="ticket"):
    request: _Name
    number: _Number
    sender: _Number
    claim: _Name
    epoch: _EpochWire
    duration_s: _Seconds
    digests: bool
    pools: Annotated[dict[_Name, _PoolTicketWire], Meta(max_length=_MAX_POOLS)]


class _CompletionWire(_Wire, frozen=True, tag="completion"):
    request: _Name
    sender: _Number
    ended: bool
    outcomes: Annotated[
        dict[_Name, Literal[tuple(map(int, Outcome))]],  # type: ignore[valid-type]
        Meta(max_length=_MAX_POOLS),
    ]
    digests: Annotated[dict[_Name, _Slots], Meta(max_length=_MAX_POOLS)]


_encoder = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(_OfferWire)
_tickets = msgspec.msgpack.Decoder(_TicketWire)
_completions = msgspec.msgpack.Decoder(_CompletionWire)


@attrs.frozen
class Epoch:
    """Which tickets of a receiver may still be used, as it was at one moment.

    Args:
        process: Names the receiver's process; another one after a restart.
        oldest: The lowest number of a request that was pending, or the next one.
        void: Numbers above that whose requests had ended.
    """

    process: str
    oldest: int
    void: tuple[int, ...] = ()

    def voids(self, number: int) -> bool:
        """Return whether the request of a number is over."""
        return number < self.oldest or number in self.void


@attrs.frozen(eq=False, kw_only=True)
class Message:
    """A message from one process to another.

    Args:
        keys: What signs it; None for no signature.
        sealed: The bytes that it was read from; empty where it was made here.
    """

    keys: MessageKeys | None = attrs.field(default=None, repr=False)
    sealed: bytes = attrs.field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """Encode it, for a peer."""
        body = _encoder.encode(self._wire())
        mac = _UNSIGNED if self.keys is None else self.keys.sign(body)
        return b"".join((_FORMAT, mac, body))

    def _wire(self) -> _Wire:
        raise NotImplementedError

    def check(self, keys: MessageKeys | None) -> Self:
        """Check that a peer with one of these keys has made it; return it.

        Raises:
            UnsignedError: If none has.
        """
        if keys is not None and self.sealed:
            start = len(_FORMAT)
            mac = self.sealed[start : start + MAC_BYTES]
            keys.check(mac, memoryview(self.sealed)[start + MAC_BYTES :])
        return self


@attrs.frozen(eq=False, kw_only=True)
class Offer(Message):
    """One pool of a process, as its peers need to know it.

    Args:
        transport: The backend that reaches its memory.
        endpoint: What that backend's hook said; empty for a side that only sends.
        grid: Where its tokens lie.
        compatibility: Digest of all that must be equal on both sides.
        required: Whether a request is incomplete without it.
        epoch: Names the process, and says which tickets of it are over.
    """

    pool: str
    transport: str
    endpoint: bytes = attrs.field(repr=False)
    grid: Grid = attrs.field(repr=False)
    compatibility: str
    required: bool
    epoch: Epoch

    def _wire(self) -> _OfferWire:
        epoch = _to_wire(_EpochWire, self.epoch)
        return _to_wire(_OfferWire, self, grid=_grid_to_wire(self.grid), epoch=epoch)

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Decode an offer that came from a peer.

        Raises:
            MessageError: If it is not an offer.
        """

        def read(wire: _OfferWire) -> Offer:
            grid, epoch = _grid_from_wire(wire.grid), _epoch(wire.epoch)
            return cls(**_wired(wire, grid=grid, epoch=epoch, sealed=data))

        return _decode("offer", _offers, data, read)


@attrs.frozen(eq=False)
class PoolTicket:
    """The places of one pool for the tokens of one request.

    Args:
        slots: int64 (n,), for each token its slot of `grid`, or for pools with
            parts per page the page for each page; below 0 for none.
        landing: The grid of a landing area; None for the pool's own, as offered.
    """

    slots: Int64Array = attrs.field(repr=False)
    landing: Grid | None = attrs.field(default=None, repr=False)


@attrs.frozen(eq=False, kw_only=True)
class Ticket(Message):
    """What a receiver gives one sender of a request: it may be used once.

    Args:
        request: Names the request at the receiver.
        number: Number of the request there, later ones have higher ones.
        sender: Number of the sender among those of the request.
        claim: Names the process that may use it, as its offers did.
        epoch: Names the receiver, and says which of its tickets are over.
        duration_s: How long it may be used, and its bytes may come; each side
            counts by its own clock, from when it was made and from when it came.
        digests: Whether the completion has digests of the pages.
        pools: Pool name to where its tokens go.
        received_s: When this process got it, on `time.monotonic()`'s clock.
    """

    request: str
    number: int
    sender: int
    claim: str
    epoch: Epoch
    duration_s: float
    digests: bool
    pools: Mapping[str, PoolTicket]
    received_s: float = attrs.field(factory=time.monotonic, repr=False)

    @property
    def expires_s(self) -> float:
        """Until when this process may use it, on `time.monotonic()`'s clock."""
        return self.received_s + self.duration_s

    def _wire(self) -> _TicketWire:
        pools = {
            name: _PoolTicketWire(
                one.slots.astype("<i8").tobytes(),
                None if one.landing is None else _grid_to_wire(one.landing),
            )
            for name, one in self.pools.items()
        }
        epoch = _to_wire(_EpochWire, self.epoch)
        return _to_wire(_TicketWire, self, epoch=epoch, pools=pools)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """Decode a ticket when it has come from a peer: its time runs from here.

        Raises:
            MessageError: If it is not a ticket.
        """

        def read(wire: _TicketWire) -> Ticket:
            pools = {}
            for name, one in wire.pools.items():
                landing = None if one.landing is None else _grid_from_wire(one.landing)
                numbers = np.frombuffer(one.slots, "<i8").astype(np.int64)
                pools[name] = PoolTicket(numbers, landing)
            epoch = _epoch(wire.epoch)
            return cls(**_wired(wire, epoch=epoch, pools=pools, sealed=data))

        return _decode("ticket", _tickets, data, read)


@attrs.frozen(eq=False, kw_only=True)
class Completion(Message):
    """The end of a request, as its sender knows it.

    Args:
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

    def _wire(self) -> _CompletionWire:
        outcomes = {name: int(one) for name, one in self.outcomes.items()}
        digests = {
            name: one.astype("<u8").tobytes() for name, one in self.digests.items()
        }
        return _to_wire(_CompletionWire, self, outcomes=outcomes, digests=digests)

    @classmethod
    def from_bytes(cls, data: bytes) -> Completion:
        """Decode a completion that came from a peer.

        Raises:
            MessageError: If it is not a completion.
        """

        def read(wire: _CompletionWire) -> Completion:
            outcomes = {name: Outcome(one) for name, one in wire.outcomes.items()}
            digests = {
                name: np.frombuffer(one, "<u8").astype(np.uint64)
                for name, one in wire.digests.items()
            }
            return cls(**_wired(wire, outcomes=outcomes, digests=digests, sealed=data))

        return _decode("completion", _completions, data, read)


def _decode(
    kind: str,
    decoder: msgspec.msgpack.Decoder[Any],
    data: bytes,
    read: Callable[[Any], T],
) -> T:
    try:
        return read(decoder.decode(_body(data)))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MessageError(
            f"a peer sent what is not a {kind}: {error}",
            fix="Both sides need the same version of kvdock.",
        ) from error
    except RegionError as error:
        raise MessageError(error.what, fix=error.fix) from error


def _body(data: bytes) -> memoryview:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(data)} bytes")
    if data[: len(_FORMAT)] != _FORMAT:
        raise ValueError("another format")
    return memoryview(data)[len(_FORMAT) + MAC_BYTES :]


def _epoch(wire: _EpochWire) -> Epoch:
    return Epoch(wire.process, wire.oldest, wire.void)


def _grid_to_wire(grid: Grid) -> _GridWire:
    parts = tuple(
        _to_wire(_PartWire, part, bases=part.bases.astype("<i8").tobytes())
        for part in grid.parts
    )
    return _to_wire(_GridWire, grid, parts=parts)


def _to_wire(kind: type[W], record: object, **other: object) -> W:
    """Return a record as the wire has it; its fields have the same names."""
    given = {name: getattr(record, name) for name in kind.__struct_fields__}
    return kind(**{**given, **other})


def _grid_from_wire(wire: _GridWire) -> Grid:
    parts = tuple(
        PartGrid(
            **_wired(part, bases=np.frombuffer(part.bases, "<i8").astype(np.int64))
        )
        for part in wire.parts
    )
    grid = Grid(**_wired(wire, parts=parts))
    grid.check()
    return grid


def _wired(wire: _Wire, **other: object) -> dict[str, Any]:
    """Return what a record of ours has, whose fields have the same names."""
    return msgspec.structs.asdict(wire) | other
