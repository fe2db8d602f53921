"""Disk usage of a namespace, and the segments of its folders."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import attrs
import numpy as np

from kvdock.arrays import Int64Array
from kvdock.units import format_bytes
from kvdock_segments.cleanup import delete_if_unowned
from kvdock_segments.format import CLOCK_SLACK_NS, credible_uses, slots_of
from kvdock_segments.index_file import open_index, read_records, read_uses
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import SETTLED_NS, closing_fd, open_folder
from kvdock_segments.walk import list_segments, pools

_SAMPLE = 1024  # pages that show when a segment was used
_SHORT = 12  # digits of a namespace that are enough to name it


def cleanup_hint(root: Path, taken: dict[str, int]) -> str:
    """Name the command that frees the space of a namespace; "" for none."""
    if not any(taken.values()):
        return ""
    largest = max(taken, key=lambda namespace: taken[namespace])
    return (
        f"{_namespaces(len(taken))} {format_bytes(sum(taken.values()))}; "
        f"`kvdock store rm {root} {largest[:_SHORT]}` deletes the largest, "
        f"`kvdock store gc {root} --namespace {largest[:_SHORT]} --to SIZE` its "
        "coldest pages"
    )


def _namespaces(count: int) -> str:
    return f"{count} namespaces take" if count > 1 else "one namespace takes"


@attrs.frozen
class _Listed:
    """The last listing of a folder of segments.

    Args:
        changed_ns: The folder's time of change; -1 if a later change may have the
            same one.
        nbytes: Of all of its files.
        slots: Of all of its segments.
        full: Time of change and slots of full segments, by name of the index file.
    """

    changed_ns: int
    nbytes: int
    slots: int
    full: dict[str, tuple[int, int]]


class NamespaceUsage:
    """Disk usage of all pools of a namespace; folders are listed when they change.

    The descriptor is not closed here.
    """

    def __init__(
        self, namespace_fd: int, kept_by: WriterLiveness = WriterLiveness.LOCKS
    ) -> None:
        self._kept_by = kept_by
        self._namespace_fd = namespace_fd
        self._listed: dict[str, _Listed] = {}

    def usage_bytes(self, *, but: str = "") -> int:
        """Return the bytes that all pools take, or all but one.

        The folder `but` is left out, and not listed.
        """
        return sum(one.nbytes for one in self._look(but).values())

    def full_segments(
        self, *, but: str, least_slots: int = 0
    ) -> dict[tuple[str, str], int]:
        """Return the segments of the folders but `but` that are not being filled.

        Segments without which their folder would have fewer than `least_slots` are
        skipped.

        Returns:
            Folder and name of each index file, and when it was last written, in
            nanoseconds, as it was listed.
        """
        return {
            (pool, name): changed_ns
            for pool, listed in self._look(but).items()
            for name, (changed_ns, slots) in listed.full.items()
            if listed.slots - slots >= least_slots
        }

    def uses_of(self, pool: str, name: str) -> Int64Array:
        """Return when the first pages of a full segment were last used.

        When they were stored, or used until ten seconds ago; of at most 1024 pages,
        since an index file may have megabytes.
        """
        with (
            suppress(OSError),
            closing_fd(open_folder(self._namespace_fd, pool)) as folder,
            closing_fd(open_index(folder, name)) as fd,
        ):
            slots = slots_of(os.fstat(fd).st_size)
            uses = read_uses(fd, slots, most=_SAMPLE)
            records = read_records(fd, np.arange(len(uses)))
            stored_ns = credible_uses(records["stored_ns"].astype(np.int64))
            return np.where(records["check"], np.maximum(uses, stored_ns), 0)
        return np.zeros(0, np.int64)

    def delete(self, pool: str, name: str) -> bool:
        """Delete a segment, unless it has a writer or is pinned."""
        return delete_if_unowned(self._namespace_fd, pool, name, self._kept_by)

    def _look(self, but: str) -> dict[str, _Listed]:
        known = self._listed
        self._listed = {
            pool: _list(fd, known.get(pool))
            for pool, fd in pools(self._namespace_fd, OSError)
            if pool != but
        }
        return self._listed


def _list(fd: int, before: _Listed | None) -> _Listed:
    now_ns, folder_ns = time.time_ns(), os.fstat(fd).st_mtime_ns
    if before and before.changed_ns == folder_ns:
        return before
    every = list_segments(fd)
    return _Listed(
        changed_ns=folder_ns if now_ns - folder_ns > SETTLED_NS else -1,
        nbytes=sum(one.nbytes for one in every),
        slots=sum(one.slots for one in every),
        full={
            str(one.name): (_credible(one.changed_ns), one.slots)
            for one in every
            if one.name and one.name.state == "idx"
        },
    )


def _credible(stamp_ns: int) -> int:
    """Return a time of change, 0 if it lies in the future (see `credible_uses`)."""
    return 0 if stamp_ns > time.time_ns() + CLOCK_SLACK_NS else stamp_ns
