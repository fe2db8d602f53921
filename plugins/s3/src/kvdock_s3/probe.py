"""Say whether the backend could work here, and what is missing."""

from __future__ import annotations

from importlib import metadata

from kvdock import Finding, KvdockError
from kvdock.config import structure
from kvdock_s3.settings import S3Settings, Service

_TIME_S = 5.0


def findings(settings: S3Settings | None) -> list[Finding]:
    """Look at the library and make a round trip to the bucket."""
    try:
        settings = settings or structure(S3Settings, {}, where="backend 's3'")
        place = settings.place
    except KvdockError as error:
        return [_bad(error)]
    try:
        from kvdock_s3.client import ObjectClient  # noqa: PLC0415 - may be missing
        from kvdock_s3.round_trip import try_bucket  # noqa: PLC0415 - same
    except ImportError as error:
        return [
            Finding(
                ok=False,
                what=f"obstore cannot be imported: {error}",
                hint="Install it: pip install 'obstore>=0.12,<0.13'.",
            )
        ]
    where = f"{settings.url} at {settings.endpoint or 'the cloud itself'}"
    found = [
        Finding(ok=True, what=f"obstore {metadata.version('obstore')}, {where}"),
    ]
    if place.service is Service.GCS:
        what = "kvdock's tests do not cover GCS: run `kvdock check` on this bucket"
        found.append(Finding(ok=True, what=what))
    try:
        return [*found, *try_bucket(ObjectClient(settings), _TIME_S)]
    except KvdockError as error:
        return [*found, _bad(error)]


def _bad(error: KvdockError) -> Finding:
    return Finding(ok=False, what=error.what, hint=error.fix)
