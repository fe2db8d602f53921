"""Names of objects in a bucket.

    <prefix>/<namespace digest>/<page hash><suffix>     one object of a page
    <prefix>/<namespace digest>/_namespace.json         what the digest covers
    <prefix>/_kvdock_probe/...                          of a round trip

A page hash has letters and digits alone, so no key begins like the others.
"""

from __future__ import annotations

import re
import uuid

MAX_KEY_BYTES = 290
"""Longest key; the core's have 289 bytes at most.

S3 takes 1024 with the prefix. Servers that keep objects as files take no more
than 255 behind the last slash, with what they add to a name: s3rver adds 22, and
the digest and its slash are 65 of the key.
"""

RECORD_NAME = "_namespace.json"
PROBE_FOLDER = "_kvdock_probe"

_NAMESPACE = re.compile(r"[0-9a-f]{64}")


def is_namespace(name: str) -> bool:
    """Return whether a folder is one of a namespace."""
    return _NAMESPACE.fullmatch(name) is not None


def is_page(name: str) -> bool:
    """Return whether an object holds bytes of a page."""
    namespace, _, rest = name.partition("/")
    return is_namespace(namespace) and rest[:1].isalnum() and "/" not in rest


def record_name(namespace: str) -> str:
    """Return the name of a namespace's record."""
    return f"{namespace}/{RECORD_NAME}"


def probe_name() -> str:
    """Return a name that no other process uses."""
    return f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
