"""Names of stored objects: namespace digest, page hash, suffix.

`<namespace digest>/<page hash><suffix>`. The digest covers everything that
must be equal for bytes to be interchangeable, so a difference is a miss and
never another page. The suffix says what the object holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvdock.errors import KvdockError
from kvdock.pools.layout import stored_objects

if TYPE_CHECKING:
    from kvdock.pools.objects import StoredObject
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec


MAX_SUFFIX_CHARS = 160
"""A coordinate of the longest names stays below it."""


_SUFFIX = re.compile(rf"[A-Za-z0-9._:@+=-]{{1,{MAX_SUFFIX_CHARS}}}")


def key_suffixes(pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
    """Spell what each object of a page holds; most backends' key suffix."""
    return tuple(f".{stored.coordinate}" for stored in stored_objects(pool, shard))


def check_suffixes(
    backend: str,
    suffixes: Sequence[tuple[PoolSpec, Sequence[str], Sequence[StoredObject]]],
) -> None:
    """Hold a backend's suffixes against the law of keys.

    Raises:
        KvdockError: If there is not one for each object, one is empty, or two
            objects share one.
    """
    seen: dict[str, str] = {}
    for pool, own, objects in suffixes:
        if len(own) != len(objects):
            raise KvdockError(
                f"backend {backend!r} gives pool {pool.name!r} {len(own)} suffixes "
                f"for {len(objects)} objects"
            )
        for suffix in own:
            if not suffix or suffix[0].isalnum():
                raise KvdockError(
                    f"backend {backend!r} gives pool {pool.name!r} the suffix "
                    f"{suffix!r}, which looks like a page hash",
                    fix="Begin it with a mark such as '.' or '_'.",
                )
            if not _SUFFIX.fullmatch(suffix):
                raise KvdockError(
                    f"backend {backend!r} gives pool {pool.name!r} the suffix "
                    f"{suffix!r}",
                    fix="Use only letters, digits and . _ - : @ + =, "
                    f"{MAX_SUFFIX_CHARS} characters at most.",
                )
            if suffix in seen:
                raise KvdockError(
                    f"backend {backend!r} gives pools {seen[suffix]!r} and "
                    f"{pool.name!r} the same suffix {suffix!r}"
                )
            seen[suffix] = pool.name


_HASHES = "Pass each page's hash in hex."


def hashes_of_tenant(hashes: Sequence[str], salt_digest: str) -> list[str]:
    """Mix the digest of a tenant's salt into page hashes, which keeps them apart.

    Raises:
        KvdockError: As `check_hashes`.
    """
    check_hashes(hashes)
    key = bytes.fromhex(salt_digest)
    return [
        hashlib.blake2b(one.encode(), key=key, digest_size=16).hexdigest()
        for one in hashes
    ]


def check_hashes(hashes: Sequence[str]) -> None:
    """Refuse page hashes that could reach out of their place in a key.

    Raises:
        KvdockError: If they are not a row of strings, or one is empty or holds
            anything but letters and digits.
    """
    try:
        # A generator would be empty for its next reader; an empty slice costs
        # 60 ns, and excludes sets and dicts as well.
        hashes[:0]
        # As bytes only ASCII is alphanumeric, and the check is four times as quick.
        joined = "".join(hashes).encode("utf-8", "surrogatepass")
    except (TypeError, KeyError) as error:
        raise KvdockError(
            f"page hashes are a row of strings: {error}", fix=_HASHES
        ) from error
    if isinstance(hashes, str):
        # Each of its letters would pass for a hash.
        raise KvdockError(f"page hashes are a row, not {hashes!r}", fix=_HASHES)
    if (joined.isalnum() and all(hashes)) or not hashes:
        return
    wrong = next(h for h in hashes if not (h.isalnum() and h.isascii()))
    raise KvdockError(
        f"page hash {wrong!r} is not made of letters and digits",
        fix=_HASHES,
    )


def adapter_hashes(hashes: Sequence[str], adapter: str) -> Sequence[str]:
    """Return page hashes that no other adapter's pages have.

    For engines that choose an adapter (LoRA) for each request, and whose page
    hashes do not cover its weights. An engine with one adapter for all requests
    names it in `Namespace.lora`.

    Args:
        hashes: Page hashes as the engine has them.
        adapter: Identity of the adapter's weights, such as a checksum of its
            files: its name may stand for other weights tomorrow. "" for the model
            alone, whose hashes stay as they are.

    Raises:
        KvdockError: If the hashes are not a row of letters and digits.
    """
    check_hashes(hashes)
    if not adapter:
        return hashes
    identity = hashlib.sha256(adapter.encode("utf-8", "surrogatepass")).digest()
    head = hashlib.sha256(b"kvdock adapter\0" + identity)
    found = []
    for page in hashes:
        digest = head.copy()
        digest.update(page.encode())
        found.append(digest.hexdigest())
    return found


def key_builder(
    digest: str, suffixes: Sequence[str]
) -> Callable[[Sequence[str]], list[str]]:
    """Return what builds the keys of pages by their hashes, page-major."""
    # One string of three pieces is made at once; a sum makes one in between.
    head = f"{digest}/"
    if len(suffixes) != 1:
        return lambda hashes: [
            f"{head}{page}{tail}" for page in hashes for tail in suffixes
        ]
    tail = suffixes[0]
    return lambda hashes: [f"{head}{page}{tail}" for page in hashes]


def build_keys(
    digest: str, hashes: Sequence[str], suffixes: Sequence[str]
) -> list[str]:
    """Return the keys of pages, page-major, in suffix order."""
    return key_builder(digest, suffixes)(hashes)
