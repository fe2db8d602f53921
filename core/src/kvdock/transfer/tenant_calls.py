"""Calls of an attachment for one tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from kvdock.events import stored_for
from kvdock.keys import hashes_of_tenant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kvdock.arrays import OutcomeArray
    from kvdock.hits import Hits
    from kvdock.transfer.result import TransferResult


class _Calls(Protocol):
    """The calls of an attachment; see there."""

    def exists(self, hashes: Sequence[str]) -> Hits: ...

    def put(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        *,
        keep_s: float | None = None,
        expire_s: float | None = None,
    ) -> TransferResult: ...

    def get(
        self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]
    ) -> TransferResult: ...

    def retain(self, hashes: Sequence[str], keep_s: float) -> OutcomeArray: ...

    def expire(self, hashes: Sequence[str], after_s: float) -> OutcomeArray: ...


@attrs.frozen(eq=False)
class TenantCalls:
    """What an attachment stores and finds for one tenant, in its room.

    What is stored for one is found for no other. `Attachment.for_tenant` makes it; its
    calls are those of the attachment.

    Args:
        calls: The attachment.
        number: That of the tenant.
        salt_digest: Mixed into page hashes; "" for pages of the namespace's own salt.
    """

    _calls: _Calls = attrs.field(repr=False)
    number: int
    _salt_digest: str = attrs.field(repr=False)

    def exists(self, hashes: Sequence[str]) -> Hits:
        """Find out which prefixes could be restored; as `Attachment.exists`."""
        return self._calls.exists(self._named(hashes))

    def put(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        *,
        keep_s: float | None = None,
        expire_s: float | None = None,
    ) -> TransferResult:
        """Store pages; as `Attachment.put`."""
        names = self._named(hashes)
        with stored_for(self.number):
            return self._calls.put(names, pages, keep_s=keep_s, expire_s=expire_s)

    def get(
        self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]
    ) -> TransferResult:
        """Load pages; as `Attachment.get`."""
        with stored_for(self.number):  # nearer copies too
            return self._calls.get(self._named(hashes), pages)

    def retain(self, hashes: Sequence[str], keep_s: float) -> OutcomeArray:
        """Promise not to evict stored pages; as `Attachment.retain`."""
        return self._calls.retain(self._named(hashes), keep_s)

    def expire(self, hashes: Sequence[str], after_s: float) -> OutcomeArray:
        """Let stored pages expire; as `Attachment.expire`."""
        return self._calls.expire(self._named(hashes), after_s)

    def _named(self, hashes: Sequence[str]) -> Sequence[str]:
        if not self._salt_digest:
            return hashes
        return hashes_of_tenant(hashes, self._salt_digest)
