"""Names of stored objects: namespace digest, page hash, suffix.

`<namespace digest>/<page hash><suffix>`. The digest covers everything that
must be equal for bytes to be interchangeable, so a difference is a miss and
never somebody else's page. The suffix says what the object holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import KvdockError, NamespaceError

if TYPE_CHECKING:
    from kvdock.pools.spec import (PoolSpec, Shard, StoredObject)

SCHEMA_VERSION = 1
"""Version of the canonical form; a new one makes every key new."""

DIGEST_CHARS = 64
"""Length of the namespace digest in a key: 256 bits in hex."""

MAX_SUFFIX_CHARS = 160
"""A coordinate of the longest names stays below it."""

_SUFFIX = re.compile(rf"[A-Za-z0-9._:@+=-]{{1,{MAX_SUFFIX_CHARS}}}")


def _text(value: str | None) -> str:
    """Take nothing for nothing: an engine's None and "" are one namespace."""
    return "" if value is None else value


def _checked_text(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        # The value itself may be the secret.
        raise NamespaceError(f"{field.name} is text, not {type(value).__name__}")


@attrs.frozen(kw_only=True)
class Namespace:
    """What must be equal, besides the pools, to share stored bytes.

    Args:
        model: Identity of the target model: a name that is never reused for
            other weights, or together with `revision`.
        revision: Which weights, for example a commit or a checksum.
        draft_model: Identity of the draft model, or "".
        lora: Identity of the adapter, or "".
        salt: Secret that keeps tenants apart; recorded only as a digest.
        page_format: Anything else that changes the bytes of a page, such as a
            quantisation recipe or an engine's own format tag.
    """

    model: str = attrs.field(converter=_text, validator=_checked_text)
    revision: str = attrs.field(default="", converter=_text, validator=_checked_text)
    draft_model: str = attrs.field(default="", converter=_text, validator=_checked_text)
    lora: str = attrs.field(default="", converter=_text, validator=_checked_text)
    salt: str = attrs.field(
        default="", repr=False, converter=_text, validator=_checked_text
    )
    page_format: str = attrs.field(default="", converter=_text, validator=_checked_text)

    def __attrs_post_init__(self) -> None:
        """Refuse a namespace that names no model."""
        if not self.model:
            raise NamespaceError("a namespace without a model would mix all models")


def namespace_record(
    namespace: Namespace, pools: Sequence[PoolSpec]
) -> dict[str, object]:
    """Return what a namespace covers, readable and the same on every rank.

    Pools are described over all ranks. How they are divided is in the suffix;
    hit policies and windows do not change bytes and are left out.
    """
    # JSON and the environment may bring half a character.
    secret = namespace.salt.encode("utf-8", "surrogatepass")
    salt = hashlib.sha256(b"kvdock salt\0" + secret).hexdigest()
    return {
        "schema": SCHEMA_VERSION,
        "model": namespace.model,
        "revision": namespace.revision,
        "draft_model": namespace.draft_model,
        "lora": namespace.lora,
        "salt_sha256": salt if namespace.salt else "",
        "page_format": namespace.page_format,
        "pools": {
            pool.name: {
                "kind": str(pool.kind),
                "draft": pool.draft,
                "page_tokens": pool.page_tokens,
                "layers": list(pool.layers),
                "interleave_tokens": pool.interleave_tokens,
                "stored_order": pool.layout.stored_order,
                "parts": [
                    {
                        "name": part.name,
                        "dtype": str(part.dtype),
                        "shape": list(part.shape),
                        "per": str(part.per),
                        "shard_axis": part.shard_axis,
                        "encoding": part.encoding,
                    }
                    for part in pool.parts
                ],
            }
            for pool in pools
        },
    }


def canonical(record: Mapping[str, object]) -> bytes:
    """Encode a record: the same bytes for the same content, everywhere."""
    return json.dumps(
        record, sort_keys=True, separators=(",", ":"), ensure_ascii=True
    ).encode("ascii")


def namespace_digest(record: Mapping[str, object]) -> str:
    """Return the SHA-256 of a record's canonical form, in hex."""
    return hashlib.sha256(canonical(record)).hexdigest()


def key_suffixes(pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
    """Spell what each object of a page holds; most backends' key suffix."""
    return tuple(f".{stored.coordinate}" for stored in pool.objects(shard))


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
                    f"{suffix!r}, which could not be told from a page hash",
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


def check_hashes(hashes: Sequence[str]) -> None:
    """Refuse page hashes that could reach out of their place in a key.

    Raises:
        KvdockError: If they are no row of strings, or one is empty or holds
            anything but letters and digits.
    """
    try:
        # As bytes only ASCII is alphanumeric, and the check is four times as quick.
        joined = "".join(hashes).encode("utf-8", "surrogatepass")
    except TypeError as error:
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


def build_keys(
    digest: str, hashes: Sequence[str], suffixes: Sequence[str]
) -> list[str]:
    """Return the keys of pages, page-major, in suffix order."""
    # One string of three pieces is made at once; a sum makes one in between.
    head = f"{digest}/"
    if len(suffixes) == 1:
        tail = suffixes[0]
        return [f"{head}{page}{tail}" for page in hashes]
    return [f"{head}{page}{tail}" for page in hashes for tail in suffixes]
