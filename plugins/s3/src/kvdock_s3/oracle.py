"""What lies in the bucket, seen and damaged past the backend: for the kit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvdock import Outcome
from kvdock.testing import Oracle
from kvdock_s3.client import ObjectClient, RequestFailed

if TYPE_CHECKING:
    from kvdock_s3.settings import S3Settings

_TIME_S = 20.0
_MAX_BYTES = 1 << 30


class BucketOracle(Oracle):
    """Reads and replaces objects."""

    def __init__(self, settings: S3Settings) -> None:
        self.client = ObjectClient(settings)

    def peek(self, key: str) -> bytes | None:
        """Read an object."""
        try:
            return self.client.read(key, self._deadline_s(), _MAX_BYTES)
        except RequestFailed as failed:
            if failed.failure.outcome is Outcome.ABSENT:
                return None
            raise

    def poke(self, key: str, offset: int, data: bytes) -> None:
        """Replace an object by one with other bytes in it."""
        stored = bytearray(self.peek(key) or b"")
        stored[offset : offset + len(data)] = data
        self._replace(key, bytes(stored))

    def resize(self, key: str, nbytes: int) -> None:
        """Replace an object by a shorter or a longer one."""
        self._replace(key, (self.peek(key) or b"")[:nbytes].ljust(nbytes, b"?"))

    def swap(self, key: str, other: str) -> None:
        """Exchange the bytes of two objects."""
        one, two = self.peek(key) or b"", self.peek(other) or b""
        self._replace(key, two)
        self._replace(other, one)

    def remove(self, key: str) -> None:
        """Delete an object."""
        self.client.delete_one(key, self._deadline_s())

    def _replace(self, key: str, data: bytes) -> None:
        self.client.put(key, [data], self._deadline_s(), replace=True)

    def _deadline_s(self) -> float:
        return time.monotonic() + _TIME_S


def oracle(settings: S3Settings) -> BucketOracle:
    """Return the oracle of a bucket."""
    return BucketOracle(settings)
