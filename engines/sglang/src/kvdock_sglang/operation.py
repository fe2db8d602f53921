# ruff: noqa: ANN401 - SGLang's own objects, and arguments that are passed on
"""Which operation of SGLang a storage call belongs to.

SGLang hands a storage backend hashes and slots. Its own objects know more: a prefetch
belongs to a request, and a write to a node of the prefix tree, with the extra key and
the salt that seed the page hashes. The patches here keep that beside the call, for
hints, tenants and decisions. Where SGLang has no place for one of them, no call has an
operation, and everything else works as before.

Source: SGLang 0.5.23, `mem_cache/unified_radix_cache.py:write_backup_storage`,
`managers/cache_controller.py:StorageOperation`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.events import AUDITED, requested_by
from kvdock.strict_enum import StrictEnum
from kvdock_sglang.weight_updates import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CREATE = "sglang.srt.managers.cache_controller.StorageOperation.__init__"
WRITE = (
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.write_backup_storage"
)
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
CALLS = tuple(
    f"{_HYBRID}.HybridCacheController.{name}"
    for name in ("_storage_hit_query", "_page_transfer", "_page_backup")
)
"""Functions under which all storage calls of an operation are made."""

_MARK = "_kvdock_operation"
_WEIGHTS = "_kvdock_weights"


class OperationKind(StrictEnum):
    """What SGLang does for it."""

    PREFETCH = "prefetch"
    """Look up and load a prefix for a request."""
    WRITE = "write"
    """Store pages of a node of the prefix tree; it belongs to no request."""


@attrs.frozen(kw_only=True)
class StorageOperation:
    """The operation of SGLang that a storage call belongs to.

    Args:
        request: The request's id; "" for a write.
        extra_key: The caller's key that keeps prefixes apart, with the adapter's.
        salt: The request's cache salt; a secret of its tenant.
        hashes: The pages of the whole operation, in the order of the prefix.
        slots: Host slots of these pages, which the operation holds: a tensor,
            int64 (pages times slots of a page,).
    """

    kind: OperationKind
    request: str = ""
    extra_key: str = ""
    salt: str = attrs.field(default="", repr=False)
    hashes: Sequence[str] = attrs.field(default=(), repr=False, eq=False)
    slots: Any = attrs.field(default=None, repr=False, eq=False)


_node: ContextVar[tuple[str, str] | None] = ContextVar("kvdock_node", default=None)
_current: ContextVar[StorageOperation | None] = ContextVar(
    "kvdock_operation", default=None
)
_weights: ContextVar[int | None] = ContextVar("kvdock_weights", default=None)


def current() -> StorageOperation | None:
    """Return the operation that this thread's storage call belongs to, if known."""
    return _current.get()


def weights() -> int | None:
    """Return the count of the weights that this thread's operation began under."""
    return _weights.get()


def note_write(original: Callable[..., Any], cache: Any, node_id: Any) -> Any:
    """Keep a node's extra key and salt while SGLang queues its write.

    What an audit has computed anew is not written.
    """
    extra_key, salt = cache.tree_core.prefetch_anchor_info(node_id)
    if (salt or "").startswith(AUDITED):
        return None
    with _set(_node, (extra_key or "", salt or "")):
        return original(cache, node_id)


def note_operation(
    original: Callable[..., Any], operation: Any, *args: Any, **options: Any
) -> None:
    """Write on an operation of SGLang's what its storage calls belong to."""
    original(operation, *args, **options)
    setattr(operation, _WEIGHTS, WEIGHTS.count)
    if (node := _node.get()) is not None:
        found = StorageOperation(
            kind=OperationKind.WRITE, extra_key=node[0], salt=node[1]
        )
    elif (request := getattr(operation, "request_id", None)) is not None:
        key = operation.token_ids
        found = StorageOperation(
            kind=OperationKind.PREFETCH,
            request=str(getattr(request, "rid", request)),
            extra_key=getattr(key, "extra_key", None) or "",
            salt=getattr(key, "cache_salt", None) or "",
        )
    else:
        return
    setattr(operation, _MARK, found)


def run_operation(
    original: Callable[..., Any],
    controller: Any,
    operation: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Make the storage calls of an operation, which can ask what it is."""
    found = getattr(operation, _MARK, None)
    if found is not None:
        found = attrs.evolve(
            found,
            hashes=getattr(operation, "hash_value", None) or (),
            slots=getattr(operation, "host_indices", None),
        )
    request = found.request if found is not None else ""
    began = getattr(operation, _WEIGHTS, None)
    with _set(_current, found), _set(_weights, began), requested_by(request):
        return original(controller, operation, *args, **options)


@contextmanager
def _set(place: ContextVar[Any], value: object) -> Iterator[None]:
    token = place.set(value)
    try:
        yield
    finally:
        place.reset(token)
