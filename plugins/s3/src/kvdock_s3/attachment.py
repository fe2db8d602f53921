"""Attach pools to a bucket: the round trip, the record, the shared client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvdock import Outcome
from kvdock.errors import AttachError, NamespaceError
from kvdock.namespace import canonical
from kvdock_s3.client import ObjectClient, RequestFailed, WrongLength
from kvdock_s3.layout import record_name
from kvdock_s3.pool import PoolHandle, SharedClient
from kvdock_s3.round_trip import try_bucket
from kvdock_s3.threads import RequestThreads

if TYPE_CHECKING:
    from kvdock import AttachConfig
    from kvdock_s3.settings import S3Settings

ATTACH_S = 20.0
"""For the round trip, and again for the namespace's record."""

MAX_RECORD_BYTES = 1 << 20
_SHARED = "client"


def attach_pool(config: AttachConfig) -> PoolHandle:
    """Get ready to move pages of a pool.

    The first pool of an attachment tries the bucket and compares the record
    of the namespace with the one that is stored.
    """
    shared = config.shared.get(_SHARED)
    # The last pool may have left, and one come back.
    if shared is None or not shared.users:
        shared = _join(config)
        config.shared[_SHARED] = shared
    shared.users += 1
    return PoolHandle(shared, config.namespace)


def _join(config: AttachConfig) -> SharedClient:
    settings: S3Settings = config.settings
    client = ObjectClient(settings)
    wrong = [one for one in try_bucket(client, ATTACH_S) if not one.ok]
    if wrong:
        raise AttachError(
            f"{settings.url}: {'; '.join(one.what for one in wrong)}", fix=wrong[0].hint
        )
    if config.namespace_record:
        _agree(client, config)
    return SharedClient(client, RequestThreads(settings.threads, "kvdock-s3"))


def _agree(client: ObjectClient, config: AttachConfig) -> None:
    """Compare the namespace's record with the stored one, or store it."""
    record = canonical(config.namespace_record)
    name = record_name(config.namespace)
    deadline_s = time.monotonic() + ATTACH_S
    try:
        found = client.read(name, deadline_s, MAX_RECORD_BYTES)
    except WrongLength:
        found = b""
    except RequestFailed as failed:
        if failed.failure.outcome is not Outcome.ABSENT:
            raise AttachError(
                f"{name} cannot be read: {failed.failure.sentence}",
                fix="See `kvdock doctor s3`.",
            ) from failed
        if not config.trial:
            store_record(client, name, record, deadline_s)
        return
    if found != record:
        raise NamespaceError(
            f"{name} does not fit its name: it was altered or misplaced",
            fix=f"`kvdock store rm {client.settings.url} "
            f"{config.namespace[:12]} --force` drops what is stored there.",
        )


def store_record(
    client: ObjectClient, name: str, record: bytes, deadline_s: float
) -> None:
    """Store the record of a namespace, unless another process does it."""
    try:
        client.put(name, [record], deadline_s)
    except RequestFailed as failed:
        # Another process may store the same record at the same time.
        if failed.failure.outcome in (Outcome.OK, Outcome.REFUSED):
            return
        raise AttachError(
            f"{name} cannot be stored: {failed.failure.sentence}",
            fix="See `kvdock doctor s3`.",
        ) from failed
