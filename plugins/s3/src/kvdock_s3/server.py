"""A server of this host alone, in memory: for the demo, tests and examples."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.request import Request, urlopen

from kvdock.child_processes import (
    LOOPBACK,
    ServerError,
    free_port,
    start_server,
    stop_server,
)

BUCKET = "kvdock-demo"
_KEYS = {"access_key_id": "kvdock", "secret_access_key": "kvdock-demo"}
_START_S = 30.0
_TRIES = 3


@contextmanager
def local_server(
    given: Mapping[str, object],
) -> Iterator[tuple[Mapping[str, object], str]]:
    """Start what the backend needs, for as long as a demo runs.

    Entry point `s3` of the group `kvdock.servers`.

    Yields:
        Settings to use instead, and a sentence that says what was started,
        "" if the user's own bucket is used.
    """
    if given.get("url"):
        yield given, ""
        return
    with moto_server() as endpoint:
        settings = {"region": "us-east-1", **_KEYS, **given, "endpoint": endpoint}
        settings["url"] = f"s3://{BUCKET}/pages"
        yield settings, f"no url is configured: started moto's S3 server at {endpoint}"


@contextmanager
def moto_server(bucket: str = BUCKET) -> Iterator[str]:
    """Run moto's S3 server with one bucket.

    Yields:
        Its endpoint.
    """
    if not find_spec("moto"):
        raise ServerError(
            "no url is configured, and moto is not installed, which could serve one",
            fix="pip install 'kvdock-s3[demo]', or give a bucket: --set url=s3://...",
        )
    for _ in range(_TRIES):
        port = free_port()
        endpoint = f"http://{LOOPBACK}:{port}"
        process = _start(port, f"{endpoint}/{bucket}")
        if process is None:
            continue
        try:
            yield endpoint
        finally:
            stop_server(process)
        return
    raise ServerError(
        "moto's server does not start", fix="Try `python -m moto.server`."
    )


def _start(port: int, bucket_url: str) -> subprocess.Popen[bytes] | None:
    """Start moto, and make the bucket as soon as it answers."""
    environment = os.environ | {
        # It makes no requests, and shall look for no credentials.
        "AWS_ACCESS_KEY_ID": "kvdock",
        "AWS_SECRET_ACCESS_KEY": "kvdock",
        "AWS_EC2_METADATA_DISABLED": "true",
    }

    def make() -> None:
        request = Request(bucket_url, method="PUT")  # noqa: S310 - http of our own
        with urlopen(request, timeout=5.0):  # noqa: S310 - same
            pass

    command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    return start_server(command, make, environ=environment, within_s=_START_S)
