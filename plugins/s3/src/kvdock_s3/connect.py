"""Clients of the library, made from settings and an amount of time."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from kvdock_s3.settings import Checksum, Service

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from kvdock_s3.settings import S3Settings

_REQUEST_SHARE = 0.75
"""Of the time, for one request; the rest is for those that failed before it.

The library repeats a request only until a time has passed, so the last one
begins within the rest and ends in time. A request that took its whole share
is not repeated.
"""

_IDLE_PER_THREAD = 4
"""Connections that are kept open, for each thread.

A connection becomes idle a moment after its answer was returned. On a busy
machine the next request of that thread finds none and opens one more. With one
idle connection per thread the surplus was closed each time: 1 to 8 connections
were opened for 256 gets of 64 KiB, where none was needed.
"""

_FIRST_BACKOFF = timedelta(milliseconds=20)
_LONGEST_BACKOFF = timedelta(milliseconds=500)


def open_store(settings: S3Settings, time_s: float, connect_s: float) -> ObjectStore:
    """Make a client of the library.

    A request may take `time_s`, repetitions included, and a connection `connect_s`.
    """
    place = settings.place
    request_s = time_s * _REQUEST_SHARE
    endpoint = settings.endpoint
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=request_s),
        "connect_timeout": timedelta(seconds=connect_s),
        "pool_max_idle_per_host": str(settings.threads * _IDLE_PER_THREAD),
        "allow_http": _is_plain_http(settings),
    }
    if settings.ca_bundle:
        bundle = Path(settings.ca_bundle).expanduser()
        options["root_certificate"] = bundle.read_bytes()
    common: dict[str, Any] = {
        "prefix": place.prefix or None,
        "client_options": options,
        "retry_config": {
            "max_retries": settings.retries,
            "retry_timeout": timedelta(seconds=time_s - request_s),
            "backoff": {
                "init_backoff": _FIRST_BACKOFF,
                "max_backoff": _LONGEST_BACKOFF,
                "base": 2,
            },
        },
    }
    if settings.anonymous:
        common["skip_signature"] = True
    if place.service is Service.GCS:
        if endpoint:
            common["base_url"] = endpoint
        return GCSStore(place.bucket, **common)
    if place.service is Service.AZURE:
        if endpoint:
            common["endpoint"] = endpoint
        return AzureStore(place.bucket, **common)
    return S3Store(place.bucket, **common, **_s3_options(settings))


def _s3_options(settings: S3Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "virtual_hosted_style_request": settings.virtual_addressing,
        "unsigned_payload": not settings.sign_payload,
        "disable_bulk_delete": not settings.bulk_delete,
    }
    if settings.endpoint:
        # The library's name for what wins over every variable.
        found["aws_endpoint_url_s3"] = _s3_endpoint(settings)
    if settings.checksum is not Checksum.NONE:
        found["checksum_algorithm"] = str(settings.checksum)
    for name in ("region", "access_key_id", "secret_access_key", "session_token"):
        if value := getattr(settings, name):
            found[name] = value
    return found


def _s3_endpoint(settings: S3Settings) -> str:
    """Return the endpoint as the library wants it: the bucket in it, or not."""
    endpoint = settings.endpoint.rstrip("/")
    if not settings.virtual_addressing:
        return endpoint
    parts = urlsplit(endpoint)
    host = f"{settings.place.bucket}.{parts.netloc}"
    return parts._replace(netloc=host).geturl()


def _is_plain_http(settings: S3Settings) -> bool:
    endpoint = settings.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3", "")
    return endpoint.lower().startswith("http:")
