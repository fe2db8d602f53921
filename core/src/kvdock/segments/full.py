"""Saying why nothing more can be stored, and what frees space."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvdock.segments import paths
from kvdock.segments.usage import Neighbours

_SHORT = 12  # digits that tell namespaces apart for people


def bytes_by_namespace(root: int) -> dict[str, int]:
    """Return what each namespace of a store takes, bytes.

    Args:
        root: Descriptor of the store's root.
    """
    found = {}
    for namespace in paths.namespaces_in(root):
        with suppress(OSError):  # it may go meanwhile
            fd = paths.open_folder(root, namespace)
            try:
                found[namespace] = Neighbours(fd).usage_bytes()
            finally:
                os.close(fd)
    return found


def is_told(count: int) -> bool:
    """Return whether the log hears of it: the 1st, 2nd, 4th, 8th ... time.

    Every put of a full or broken disk comes here.
    """
    return count.bit_count() == 1


def mebibytes(nbytes: int) -> str:
    """Write a size for people."""
    return f"{nbytes / (1 << 20):.1f} MiB"


def way_out(root: Path, taken: dict[str, int]) -> str:
    """Name the command that frees the space of a namespace; "" for none.

    Args:
        root: The store's root directory.
        taken: Bytes by namespace, of those that may make way.
    """
    if not any(taken.values()):
        return ""
    largest = max(taken, key=lambda namespace: taken[namespace])
    return (
        f"{_namespaces(len(taken))} {mebibytes(sum(taken.values()))}; "
        f"`kvdock store clear {root} {largest[:_SHORT]}` deletes the largest, "
        f"`kvdock store gc {root} --namespace {largest[:_SHORT]} --to SIZE` its "
        "coldest pages"
    )


def _namespaces(count: int) -> str:
    return f"{count} namespaces take" if count > 1 else "one namespace takes"


def why_full(root: Path, namespace: str, bound: str) -> str:
    """Say why a namespace takes no more pages.

    Args:
        root: The store's root directory.
        namespace: Whose pages are refused.
        bound: What leaves no room.
    """
    taken: dict[str, int] = {}
    with suppress(OSError):
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            taken = bytes_by_namespace(fd)
        finally:
            os.close(fd)
    own = taken.pop(namespace, 0)
    said = (
        f"store {str(root)!r} has no room for pages of namespace "
        f"{namespace[:_SHORT]}, which takes {mebibytes(own)}: {bound}"
    )
    more = way_out(root, taken)
    return f"{said}. Besides it, {more}" if more else said
