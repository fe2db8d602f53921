"""Try a bucket with an object of our own: put, head, get, list, delete.

A server that answers is not yet one that keeps bytes as they are. Some store
the framing of checksums with them, some ignore the conditions of a put.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import attrs

from kvdock import Finding, Outcome
from kvdock_s3.client import ObjectClient, RequestFailed, WrongLength
from kvdock_s3.layout import PROBE_FOLDER, probe_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock_s3.outcomes import Failure
    from kvdock_s3.settings import S3Settings

_SIZES = (1, 4097)
"""Of the two pieces that the object is put from."""

_SKEW_S = 60.0
"""From here on a clock is worth a word."""

_MAX_SKEW_S = 900.0
"""S3 rejects requests of clocks that are further away."""


@attrs.define(eq=False)
class RoundTrip:
    """One trial of a bucket.

    Args:
        deadline_s: When to give up, on `time.monotonic()`'s clock.
    """

    client: ObjectClient
    deadline_s: float
    findings: list[Finding] = attrs.field(factory=list, init=False)
    _name: str = attrs.field(factory=probe_name, init=False)
    _data: bytes = attrs.field(
        factory=lambda: secrets.token_bytes(sum(_SIZES)), init=False
    )
    _stored: bool = attrs.field(default=False, init=False)

    def run(self) -> tuple[Finding, ...]:
        """Make all requests that pages need; what is wrong comes first to last."""
        try:
            self._allowed("put", self._put)
            if self._stored:
                self._allowed("get", self._get)
                self._allowed("head", self._head)
                self._allowed("put", self._put_again)
            self._allowed("list", self._list)
            self._allowed("delete", self._delete)
        except _HopelessError:
            pass
        return tuple(self.findings)

    def _put(self) -> None:
        view = memoryview(self._data)
        pieces = [view[: _SIZES[0]], view[_SIZES[0] :]]
        self.client.put(self._name, pieces, self.deadline_s)
        self._stored = True

    def _get(self) -> None:
        nbytes = len(self._data)
        try:
            found = bytes(self.client.get(self._name, nbytes, self.deadline_s))
        except WrongLength as wrong:
            self._unfaithful(f"{wrong.nbytes} bytes came back of {nbytes}")
            return
        if found != self._data:
            self._unfaithful("other bytes came back than were stored")
            return
        what = "an object of two pieces came back byte for byte"
        self.findings.append(Finding(ok=True, what=what))

    def _unfaithful(self, how: str) -> None:
        self._bad(
            f"the server does not keep objects as they are: {how}",
            "Set checksum to none; a server that stores the framing of checksums "
            "with the bytes cannot be used with them.",
        )

    def _head(self) -> None:
        entry = self.client.head(self._name, self.deadline_s)
        ahead_s = (entry.modified - datetime.now(UTC)).total_seconds()
        if abs(ahead_s) > _SKEW_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            self.findings.append(
                Finding(
                    ok=True,
                    warning=True,
                    what=f"the server's clock is {abs(ahead_s):.0f} s {side} this "
                    "host's",
                    hint=f"Set this host's clock (NTP); beyond {_MAX_SKEW_S:.0f} s "
                    "requests are rejected.",
                )
            )

    def _put_again(self) -> None:
        if not self.client.settings.conditional_put:
            return
        changed = bytes(len(self._data))
        try:
            self.client.put(self._name, [changed], self.deadline_s)
        except RequestFailed as failed:
            if failed.failure.outcome is Outcome.OK:
                return
            raise
        self._bad(
            "the server replaces an object although the put is conditional",
            "Set conditional_put to false: kvdock then looks before it puts.",
        )

    def _list(self) -> None:
        names: set[str] = set()
        for page in self.client.entries(PROBE_FOLDER, lambda: self.deadline_s):
            names.update(one.name for one in page)
        if self._stored and self._name not in names:
            self._bad(
                "an object that was just stored is not in the listing",
                "Use a server whose listings are consistent, or do not clear and "
                "collect garbage with kvdock.",
            )

    def _delete(self) -> None:
        # Also where the put seemed to fail: it may have been stored.
        self.client.delete([self._name], self.deadline_s)

    def _allowed(self, what: str, request: Callable[[], None]) -> None:
        """Make requests and say what their failure means."""
        try:
            request()
        except RequestFailed as failed:
            self._failed(what, failed.failure)

    def _failed(self, what: str, failure: Failure) -> None:
        if failure.is_clock_wrong:
            self._bad(
                "the server rejects this host's clock",
                "Set this host's clock (NTP): requests must be signed within "
                f"{_MAX_SKEW_S / 60:.0f} minutes of the server's time.",
            )
            raise _HopelessError
        if failure.is_forbidden:
            self._bad(
                f"no permission to {what} objects ({failure.code or failure.status})",
                _permission(self.client.settings, what),
            )
            return
        if failure.code == "NoSuchBucket" or failure.outcome is Outcome.ABSENT:
            self._bad(
                f"there is no bucket {self.client.settings.place.bucket!r}",
                "Create it, or correct url, region and endpoint.",
            )
            raise _HopelessError
        self._bad(f"{what} fails: {failure.sentence}", _way_out(failure))
        if failure.unreachable or failure.outcome is Outcome.TIMEOUT:
            raise _HopelessError

    def _bad(self, what: str, hint: str) -> None:
        self.findings.append(Finding(ok=False, what=what, hint=hint))


class _HopelessError(Exception):
    """A failure that further requests would repeat."""


def try_bucket(client: ObjectClient, time_s: float) -> tuple[Finding, ...]:
    """Make a round trip; one finding at least, and any that is not OK is wrong."""
    return RoundTrip(client, time.monotonic() + time_s).run()


def _permission(settings: S3Settings, what: str) -> str:
    actions = {
        "put": "s3:PutObject",
        "get": "s3:GetObject",
        "head": "s3:GetObject",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
    }
    place = settings.place
    return (
        f"Allow {actions[what]} (or what this service calls it) for "
        f"{place.bucket}/{place.prefix + '/' if place.prefix else ''}*, and check "
        "which credentials are used."
    )


def _way_out(failure: Failure) -> str:
    if failure.unreachable:
        return "Check endpoint, proxy and certificates (ca_bundle)."
    if failure.status == "501":
        return "Set bulk_delete to false if the server has no DeleteObjects."
    if "latest/api/token" in failure.sentence or "credential" in failure.sentence:
        return (
            "No credentials were found: give access_key_id and secret_access_key, "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return "See the server's log, and `kvdock doctor` once it answers."
