"""Namespace records: kept beside the data, verified when it is met again.

A digest in a key says that two namespaces differ; the record says in what. A
store that has a folder for each namespace keeps `canonical(record)` in it as
`RECORD_NAME`: the file's SHA-256 is then the namespace's digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.config.tenants import salt_digest
from kvdock.errors import NamespaceError

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec


RECORD_NAME = "namespace.json"
"""File name of the record in a namespace's folder."""


MAX_RECORD_BYTES = 1 << 20
"""A record is a few kilobytes; a larger file is something else."""


_DIGEST = re.compile(r"[0-9a-f]{64}")


Record = Mapping[str, object]


SCHEMA_VERSION = 1
"""Version of the canonical form; a new one makes every key new."""


SEALED_FORMAT = "AES-256-GCM"
"""The value of `sealed` in the record of pages that are stored encrypted."""


@attrs.frozen
class Difference:
    """One field in which two records differ; "-" stands for no such field."""

    field: str
    left: str
    right: str


def decode_record(data: bytes, *, where: str = "the record") -> dict[str, object]:
    """Read a record.

    `data` is its canonical form, or any other JSON of the same content.

    Raises:
        NamespaceError: If it is not a record, or one of another schema.
    """
    try:
        record = json.loads(data)
    except ValueError as error:
        raise NamespaceError(f"{where} is not JSON: {error}") from error
    except RecursionError as error:
        raise NamespaceError(f"{where} is nested too deeply for a record") from error
    if not isinstance(record, dict) or "schema" not in record:
        raise NamespaceError(f"{where} is not a namespace record")
    if record["schema"] != SCHEMA_VERSION:
        raise NamespaceError(
            f"{where} has schema {record['schema']!r}, this kvdock knows "
            f"{SCHEMA_VERSION}",
            fix="Read it with the version that wrote it, or delete its namespace.",
        )
    return record


def verify_record(record: Record, digest: str, *, where: str = "the record") -> None:
    """Check that a record is the one that a digest stands for.

    Raises:
        NamespaceError: If it is not.
    """
    found = namespace_digest(record)
    if found != digest:
        raise NamespaceError(
            f"{where} has digest {found[:16]}, not {digest[:16]}",
            fix="The record was altered or misplaced: its data must not be used.",
        )


def _open_file(path: Path) -> int:
    """Open a record; a pipe of its name would block until another process writes."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.ENXIO, "it is not a file")


def load_record(folder: Path) -> dict[str, object]:
    """Read the record of a namespace's folder.

    A folder that is named by a digest must hold the record of that digest. `folder` may
    also be the path of a record itself.

    Raises:
        NamespaceError: If there is none, or it is not the right one.
    """
    path = folder / RECORD_NAME if folder.is_dir() else folder
    try:
        with os.fdopen(_open_file(path), "rb") as file:
            data = file.read(MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise NamespaceError(
            f"no namespace record can be read at {path}: {error.strerror}",
            fix="Pass the folder of one namespace; a store's root holds several.",
        ) from error
    if len(data) > MAX_RECORD_BYTES:
        raise NamespaceError(f"{path} is too large for a namespace record")
    record = decode_record(data, where=str(path))
    # "." has no name, and a link may have the digest as its own or lead to it.
    for place in (path.absolute(), path.resolve()):
        if _DIGEST.fullmatch(place.parent.name):
            verify_record(record, place.parent.name, where=str(path))
    return record


def flatten_record(record: Record) -> dict[str, str]:
    """Turn a record into one line of text for each field, in its order.

    Pools and parts are found by name: `pools.kv.parts.k.dtype`.
    """
    flat: dict[str, str] = {}
    for name, value in record.items():
        _flatten(name, value, flat)
    return flat


def _flatten(path: str, value: object, flat: dict[str, str]) -> None:
    inside = _sorted_json(value)
    if inside:
        _flatten(path, inside, flat)
    elif isinstance(value, Mapping):
        for name, below in value.items():
            _flatten(f"{path}.{name}", below, flat)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        flat[f"{path}.order"] = ", ".join(str(one.get("name")) for one in value)
        for one in value:
            below = {key: field for key, field in one.items() if key != "name"}
            _flatten(f"{path}.{one.get('name')}", below, flat)
    elif isinstance(value, list):
        whole = path.endswith(".layers") and all(isinstance(n, int) for n in value)
        flat[path] = format_layers(value) if whole else json.dumps(value)
    else:
        flat[path] = _format_value(value)


def _sorted_json(value: object) -> Mapping[str, object] | None:
    """Return what a text holds that an engine wrote as JSON; None for other text.

    Only where the text is the one spelling of what it holds, so that equal lines
    still mean equal text.
    """
    if not isinstance(value, str) or not value.startswith("{"):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    same = isinstance(found, dict) and json.dumps(found, sort_keys=True) == value
    return found if same else None


def _format_value(value: object) -> str:
    """Write a value so that the text 1 and the number 1 look different."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        json.loads(value)
    except ValueError:
        return value or '""'
    return json.dumps(value)


def format_layers(layers: list[int] | tuple[int, ...]) -> str:
    """Write layer numbers as ranges.

    >>> format_layers([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def diff_records(left: Record, right: Record) -> tuple[Difference, ...]:
    """Return the fields in which two records differ.

    Nothing differs exactly where the digests are equal.
    """
    mine, other = flatten_record(left), flatten_record(right)
    names = [*mine, *(name for name in other if name not in mine)]
    found = tuple(
        Difference(name, mine.get(name, "-"), other.get(name, "-"))
        for name in names
        if mine.get(name) != other.get(name)
    )
    before, after = namespace_digest(left), namespace_digest(right)
    if not found and before != after:
        # What an engine has written may have names of any form.
        return (Difference("record", before, after),)
    return found


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
        generation: Which weights an engine computes with that were replaced while it
            runs, or "" for those it was started with: see `kvdock.generations`.
    """

    model: str = attrs.field(converter=_text, validator=_checked_text)
    revision: str = attrs.field(default="", converter=_text, validator=_checked_text)
    draft_model: str = attrs.field(default="", converter=_text, validator=_checked_text)
    lora: str = attrs.field(default="", converter=_text, validator=_checked_text)
    salt: str = attrs.field(
        default="", repr=False, converter=_text, validator=_checked_text
    )
    page_format: str = attrs.field(default="", converter=_text, validator=_checked_text)
    generation: str = attrs.field(default="", converter=_text, validator=_checked_text)

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
    # Without one, the digest is that of an engine that knows of no generations.
    generation = {"generation": namespace.generation} if namespace.generation else {}
    return {
        "schema": SCHEMA_VERSION,
        "model": namespace.model,
        "revision": namespace.revision,
        "draft_model": namespace.draft_model,
        "lora": namespace.lora,
        "salt_sha256": salt_digest(namespace.salt),
        "page_format": namespace.page_format,
        **generation,
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


def configuration_digest(record: Mapping[str, object]) -> str:
    """Return the digest of a record without its generation.

    Engines that are configured alike have the same, whatever weights they have now.
    """
    return namespace_digest({k: v for k, v in record.items() if k != "generation"})
