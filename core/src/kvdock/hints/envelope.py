"""Read an envelope of hints, whatever it holds: clients write it.

SGLang and vLLM carry the same fields, as structs of their own or as JSON. The component
that implements an action validates its payload; that is here, with one type for each
action and version. Their JSON schemas are on the reference page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec
from msgspec import Meta

from kvdock.retention import Retention

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array

MOST_BYTES = 64 << 10
"""Bytes of an envelope as JSON: it is read on a thread that serves every request."""
MOST_ACTIONS = 16
"""Actions of an envelope."""
_MOST_TEXT = 256
OTHER = "other"
"""Name of all actions that are not known: a client must not invent labels."""

_Seconds = Annotated[float, Meta(gt=0, le=10 * 365 * 86400)]
_Token = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(max_length=_MOST_TEXT)]


class _Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a payload; one that is not known makes it malformed."""


class Retain(_Payload, frozen=True):
    """Keep pages for some seconds from now, if the budget has room."""

    keep_s: _Seconds
    from_token: _Token = 0
    to_token: _Token | None = None


class Expire(_Payload, frozen=True):
    """Serve pages no longer than some seconds from now."""

    after_s: Annotated[float, Meta(ge=0, le=10 * 365 * 86400)]
    from_token: _Token = 0


class Forget(_Payload, frozen=True):
    """Serve pages no more, from a token position on, and store them no more."""

    from_token: _Token


class Prefetch(_Payload, frozen=True):
    """Bring pages of another prompt to the nearest tier; one of both is given."""

    hashes: list[Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,128}$")]] = []
    tokens: list[_Token] = []

    def __post_init__(self) -> None:
        """Reject a payload that names no pages, or names them twice."""
        if bool(self.hashes) == bool(self.tokens):
            raise ValueError("give either hashes or tokens")


_KNOWN: Mapping[tuple[str, str], type[_Payload]] = MappingProxyType(
    {
        ("kvdock.retain", "1"): Retain,
        ("kvdock.expire", "1"): Expire,
        ("kvdock.forget", "1"): Forget,
        ("kvdock.prefetch", "1"): Prefetch,
    }
)
_TYPES = frozenset(name for name, _ in _KNOWN)


def payload_schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the JSON schema of each action's payload, by type and version."""
    found = {}
    for known, payload in _KNOWN.items():
        schema = msgspec.json.schema(payload)
        found[known] = next(iter(schema["$defs"].values()))
    return found


class _Action(msgspec.Struct, frozen=True):
    action_id: _Text
    action_type: _Text
    action_version: _Text
    payload: msgspec.Raw = msgspec.Raw(b"{}")


class _Envelope(msgspec.Struct, frozen=True):
    protocol_version: _Text
    message_id: _Text
    actions: list[msgspec.Raw] = []


_READ_ENVELOPE = msgspec.json.Decoder(_Envelope)
_READ_ACTION = msgspec.json.Decoder(_Action)
_READ_PAYLOAD = MappingProxyType(
    {known: msgspec.json.Decoder(payload) for known, payload in _KNOWN.items()}
)


@attrs.frozen
class Hint:
    """One action that is known and well formed.

    Args:
        number: Its `action_id`.
        times: How long its pages are kept and served; nothing for a prefetch.
        first: The first token that it is about.
        end: The token behind its last one; None for all, later ones included.
        hashes: Page hashes to prefetch.
        tokens: Tokens of the prompt to prefetch.
    """

    action: str
    number: str
    times: Retention = attrs.field(factory=Retention)
    first: int = 0
    end: int | None = None
    hashes: tuple[str, ...] = attrs.field(default=(), repr=False)
    tokens: tuple[int, ...] = attrs.field(default=(), repr=False)

    @property
    def name(self) -> tuple[str, str]:
        """Return its type and the client's id of it."""
        return self.action, self.number

    def covers(self, ends: Int64Array, page_tokens: int) -> Any:  # noqa: ANN401 - BoolArray
        """Return of which pages it is about a token, bool (n,).

        Args:
            ends: int64 (n,), the token behind the last one of each page.
            page_tokens: Tokens of a page.
        """
        within = ends > self.first
        if self.end is not None:
            within &= ends - page_tokens < self.end
        return within


@attrs.frozen
class RequestHints:
    """The hints of one request.

    Args:
        hints: Those that are known and well formed, in their order.
    """

    request: str = ""
    hints: tuple[Hint, ...] = ()

    def times(self, ends: Int64Array, page_tokens: int) -> list[Retention]:
        """Return how long pages that are stored now are kept and served.

        The longest promise and the earliest end count.
        """
        found = [Retention()] * len(ends)
        for hint in self.hints:
            if hint.times:
                for at in hint.covers(ends, page_tokens).nonzero()[0].tolist():
                    found[at] = _both(found[at], hint.times)
        return found


def _both(one: Retention, other: Retention) -> Retention:
    ends = [at for at in (one.expire_at, other.expire_at) if at]
    keep = max(one.keep_until, other.keep_until)
    return Retention(min(keep, *ends) if ends else keep, min(ends, default=0))


def read_envelope(
    request: str, given: object, answer: Callable[[str, str, str], None]
) -> RequestHints:
    """Return the hints of a request; never raises.

    Args:
        request: Its id.
        given: The envelope: JSON's types, or a struct of the engine's.
        answer: Called with (action, number, outcome) for each action: "taken",
            "ignored" where it is not known, or "malformed". A malformed envelope
            counts as one action, and so does one of too many bytes or actions:
            "dropped".
    """
    try:
        raw = b"" if _is_too_large(given) else msgspec.json.encode(given)
        envelope = _READ_ENVELOPE.decode(raw) if raw else None
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        # What a client writes may be of any depth and type.
        answer(OTHER, "", "malformed")
        return RequestHints(request)
    if (
        envelope is None
        or len(raw) > MOST_BYTES
        or len(envelope.actions) > MOST_ACTIONS
    ):
        answer(OTHER, "", "dropped")
        return RequestHints(request)
    hints = [hint for action in envelope.actions for hint in _read(action, answer)]
    return RequestHints(request, tuple(hints))


def _is_too_large(given: object) -> bool:
    """Return whether an envelope has more values and text than it may have bytes.

    Looks at no more of it than that, however large it is.
    """
    left, waiting = MOST_BYTES, [given]
    while waiting:
        value = waiting.pop()
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.astuple(value)
        if isinstance(value, str | list | tuple | dict):
            left -= len(value)
        if left < 0:
            return True
        if isinstance(value, dict):
            waiting += (*value, *value.values())
        elif isinstance(value, list | tuple):
            waiting += value
    return False


def _read(raw: msgspec.Raw, answer: Callable[[str, str, str], None]) -> Iterable[Hint]:
    try:
        action = _READ_ACTION.decode(raw)
    except ValueError:
        answer(OTHER, "", "malformed")
        return
    name = action.action_type if action.action_type in _TYPES else OTHER
    read = _READ_PAYLOAD.get((action.action_type, action.action_version))
    if read is None:
        answer(name, action.action_id, "ignored")
        return
    try:
        payload = read.decode(action.payload)
    except ValueError:
        answer(name, action.action_id, "malformed")
        return
    answer(name, action.action_id, "taken")
    yield _hint(name, action.action_id, payload)


def _hint(name: str, number: str, payload: _Payload) -> Hint:
    match payload:
        case Retain():
            times = Retention.lasting(keep_s=payload.keep_s)
            return Hint(name, number, times, payload.from_token, payload.to_token)
        case Expire():
            times = Retention.lasting(expire_s=payload.after_s)
            return Hint(name, number, times, payload.from_token)
        case Forget():
            times = Retention.lasting(expire_s=0)
            return Hint(name, number, times, payload.from_token)
        case Prefetch():
            named = tuple(payload.hashes), tuple(payload.tokens)
            return Hint(name, number, hashes=named[0], tokens=named[1])
    raise AssertionError(payload)
