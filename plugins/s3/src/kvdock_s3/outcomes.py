"""The meaning of the client's errors.

The client has few classes of errors; what it met is in its message.

Source: obstore 0.12, obstore.exceptions.
"""

from __future__ import annotations

import re
from types import MappingProxyType

import attrs

from kvdock import Outcome

_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_CONFLICT = "ConditionalRequestConflict"
_FULL = ("507", "QuotaExceeded", "XMinioStorageFull", "InsufficientStorage")
_SKEWED = "RequestTimeTooSkewed"
_MAX_CHARS = 300
_CLIENTS_WORDS = re.compile(
    r"Generic \w+ error: |Error performing .*? - |Server returned non-2xx "
)
"""What the client says of itself and of its attempts, before what happened."""


@attrs.frozen
class Failure:
    """One failed request.

    Args:
        status: HTTP status, or "" where no answer came.
        code: The service's own word for it, or "".
    """

    outcome: Outcome
    sentence: str
    status: str = ""
    code: str = ""
    unreachable: bool = False

    @property
    def is_forbidden(self) -> bool:
        """Return whether the credentials do not allow the request."""
        return self.status in ("401", "403")

    @property
    def is_clock_wrong(self) -> bool:
        """Return whether the service rejects this host's clock."""
        return self.code == _SKEWED


def explain(error: Exception) -> Failure:
    """Turn an error of the client into what it means."""
    text = str(error)
    status = _first(_STATUS, text)
    code = _first(_CODE, text)
    unreachable = "kind: Connect" in text or "Connect," in text
    return Failure(
        _outcome(error, text, status, code),
        _sentence(text, unreachable=unreachable),
        status,
        code,
        unreachable,
    )


def _outcome(error: Exception, text: str, status: str, code: str) -> Outcome:
    found = Outcome.ERROR
    if isinstance(error, FileNotFoundError):
        found = Outcome.ERROR if code == "NoSuchBucket" else Outcome.ABSENT
    elif type(error).__name__ == "AlreadyExistsError":
        # With a conflict another writer was at it and may have failed.
        found = Outcome.REFUSED if code == _CONFLICT else Outcome.OK
    elif status in _FULL or code in _FULL:
        found = Outcome.REFUSED
    elif "kind: Timeout" in text:
        found = Outcome.TIMEOUT
    elif status.startswith("5") or status == "429" or _broken(text, status):
        found = Outcome.UNAVAILABLE
    return found


def _broken(text: str, status: str) -> bool:
    """Return whether the connection failed, and not the request."""
    return not status and ("HTTP error" in text or "HttpError" in text)


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


_CAUSES = MappingProxyType(
    {
        "Connection refused": "Connection refused",
        "failed to lookup address": "failed to lookup address",
        "InvalidCertificate": "the server's certificate is not accepted",
        "InvalidContentType": "InvalidContentType",
    }
)
"""What the client says of a connection that fails, and what that means."""


def _sentence(text: str, *, unreachable: bool) -> str:
    """Cut the client's message to what a person reads; it holds no secret."""
    # Behind this follows the structure of the error, over many lines.
    brief = " ".join(text.partition("\n\nDebug source")[0].split())
    cause = next((why for word, why in _CAUSES.items() if word in text), "")
    if unreachable:
        return f"no connection ({cause or 'no answer in time'})"
    return _CLIENTS_WORDS.sub("", brief)[:_MAX_CHARS].rstrip(".")
