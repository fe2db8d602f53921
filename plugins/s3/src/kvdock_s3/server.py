"""A server of this host alone, in memory: for the demo, tests and examples."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.error import URLError
from urllib.request import Request, urlopen

from kvdock import KvdockError
from kvdock.child_processes import ended_with_parent

LOOPBACK = "127.0.0.1"
BUCKET = "kvdock-demo"
_KEYS = {"access_key_id": "kvdock", "secret_access_key": "kvdock-demo"}
_START_S = 30.0
_STOP_S = 5.0
_TRIES = 3


class ServerError(KvdockError):
    """A local server did not start."""


@contextmanager
def local_server(
    given: Mapping[str, object],
) -> Iterator[tuple[Mapping[str, object], str]]:
    """Start what the backend needs, for as long as a demo runs.

    Entry point `s3` of the group `kvdock.servers`.

    Args:
        given: The user's settings for this backend.

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

    Raises:
        ServerError: If moto is not installed, or does not start.
    """
    if not find_spec("moto"):
        raise ServerError(
            "no url is configured, and moto is not installed, which could serve one",
            fix="pip install 'kvdock-s3[demo]', or give a bucket: --set url=s3://...",
        )
    for _ in range(_TRIES):
        port = _free_port()
        endpoint = f"http://{LOOPBACK}:{port}"
        process = _start(port)
        try:
            if _answers(process, f"{endpoint}/{bucket}"):
                yield endpoint
                return
        finally:
            _stop(process)
    raise ServerError(
        "moto's server does not start", fix="Try `python -m moto.server`."
    )


def _start(port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        # It makes no requests, and shall look for no credentials.
        "AWS_ACCESS_KEY_ID": "kvdock",
        "AWS_SECRET_ACCESS_KEY": "kvdock",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return subprocess.Popen(  # noqa: S603 - this interpreter
        # A demo that is killed must not leave it behind.
        ended_with_parent(
            [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def _answers(process: subprocess.Popen[bytes], bucket_url: str) -> bool:
    """Make the bucket as soon as the server answers; false if it ended."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            request = Request(bucket_url, method="PUT")  # noqa: S310 - http of our own
            with urlopen(request, timeout=5.0):  # noqa: S310 - same
                return True
        except (URLError, OSError):
            time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
