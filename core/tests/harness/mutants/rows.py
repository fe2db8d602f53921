"""Mutants as rows of a table: a name, the method that is wrong, and what it does."""

# ruff: noqa: ARG001 - functions that take the place of methods

from __future__ import annotations

import ctypes
import os
import socket
from typing import TYPE_CHECKING, Any

import attrs
from reference import (
    CHECK_BYTES,
    FolderReference,
    FolderShelf,
    Handle,
    MemoryReference,
    ReferenceSettings,
    Shelf,
)

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.capacity import Capacity
from kvdock.plugin.manifest import Manifest, Support
from mutants.mutant import FolderMutant, MemoryMutant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOCKED_US_PER_BYTE = 1.8e6 / (1 << 20)
CLEARED = 10_000


def cut(most: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what moves no more than the first pieces of an object."""

    def first(batch: Batch) -> Batch:
        return attrs.evolve(
            batch, addresses=batch.addresses[:, :most], sizes=batch.sizes[:, :most]
        )

    def taken(self: MemoryReference, batch: Batch, row: int) -> bytes | None:
        data = first(batch).take(row)
        return None if data is None else data.ljust(int(batch.object_bytes[row]), b"\0")

    def landed(self: MemoryReference, batch: Batch, row: int, data: bytes) -> Outcome:
        few = first(batch)
        return few.land(row, data[: int(few.object_bytes[row])])

    return taken, landed


def hashes_the_first(most: int) -> Callable[..., Any]:
    def get(
        self: MemoryReference, handle: Handle, key: str, nbytes: int
    ) -> tuple[Outcome, bytes]:
        blob = handle.shelf.read(key)
        outcome, data = FolderReference.get(self, handle, key, nbytes)
        if outcome is Outcome.CORRUPT and blob is not None and nbytes > most:
            handle.shelf.write(key, blob)
            return Outcome.OK, blob[CHECK_BYTES:]
        return outcome, data

    return get


def verified_once(
    self: Any, handle: Handle, key: str, nbytes: int
) -> tuple[Outcome, bytes]:
    known = self.__dict__.setdefault("known", set())
    blob = handle.shelf.read(key)
    if key in known and blob is not None and len(blob) == nbytes + CHECK_BYTES:
        return Outcome.OK, blob[CHECK_BYTES:]
    outcome, data = FolderReference.get(self, handle, key, nbytes)
    if outcome is Outcome.OK:
        known.add(key)
    return outcome, data


def puts_and_notes(self: Any, handle: Handle, key: str, data: bytes) -> Outcome:
    self.__dict__.setdefault("stored", {}).setdefault(id(handle), set()).add(key)
    return MemoryReference.put(self, handle, key, data)


def clears_its_own(self: Any, handle: Handle, prefix: str) -> Outcome:
    for key in self.__dict__.get("stored", {}).get(id(handle), ()):
        if key.startswith(prefix):
            handle.shelf.remove(key)
    return Outcome.OK


def clears_what_is_not_promised(
    self: MemoryReference, handle: Handle, prefix: str
) -> Outcome:
    promised = self.promised(handle)
    for key in list(handle.shelf.names()):
        if key.startswith(prefix) and key not in promised:
            handle.shelf.remove(key)
    return Outcome.OK


def clears_ten_thousand(self: MemoryReference, handle: Handle, prefix: str) -> Outcome:
    mine = [key for key in handle.shelf.names() if key.startswith(prefix)]
    for key in mine[:CLEARED]:
        handle.shelf.remove(key)
    return Outcome.OK


def rolls_back(self: MemoryReference, handle: Handle, batch: Batch) -> BatchResult:
    before = {*handle.shelf.names()} if batch.operation is Operation.PUT else set()
    result = MemoryReference.run(self, handle, batch)
    if batch.operation is Operation.PUT and Outcome.TIMEOUT in result.outcomes:
        for key in {*batch.keys} - before:
            handle.shelf.remove(key)
    return result


def opens_the_first(self: Any, settings: ReferenceSettings) -> Shelf:
    first = self.__dict__.setdefault("first", settings)
    return FolderReference.open_shelf(self, first)


def open_to_all(self: FolderReference, settings: ReferenceSettings) -> Shelf:
    assert settings.root is not None
    settings.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    return _OpenShelf(settings.root)


@attrs.frozen(eq=False)
class _OpenShelf(FolderShelf):
    """Files that every user of the host can read."""

    def write(self, key: str, blob: bytes) -> None:
        super().write(key, blob)
        self.path(key).chmod(0o644)
        self.path(key).parent.chmod(0o755)


def reports_what_was_deleted(self: Any, handle: Handle, limit: int) -> Sequence[str]:
    deleted = self.__dict__.setdefault("deleted", {}).setdefault(id(handle), [])
    gone, deleted[:] = [*dict.fromkeys(deleted)], []
    handle.track_limit = limit
    return gone


def notes_deletes(self: Any, handle: Handle, batch: Batch, row: int) -> Outcome:
    if batch.operation is Operation.DELETE and batch.keys[row] in handle.tracked:
        note = self.__dict__.setdefault("deleted", {}).setdefault(id(handle), [])
        note.append(batch.keys[row])
    return MemoryReference.step(self, handle, batch, row)


def counts_up(self: Any, handle: Handle, key: str, data: bytes) -> Outcome:
    self.used = getattr(self, "used", 0) + len(data)
    return MemoryReference.put(self, handle, key, data)


def never_falls(self: Any, handle: Handle) -> Capacity:
    return Capacity(getattr(self, "used", 0), handle.quota_bytes)


def holds_the_lock(self: Any, handle: Handle, key: str, data: bytes) -> Outcome:
    ctypes.PyDLL(None).usleep(int(LOCKED_US_PER_BYTE * len(data)))
    return MemoryReference.put(self, handle, key, data)


def little_manifest(self: Any) -> Manifest:
    return attrs.evolve(
        MemoryReference.manifest(self), integrity=Support.NO, max_object_bytes=1 << 20
    )


def refuses_the_largest(self: Any, handle: Handle, key: str, data: bytes) -> Outcome:
    if len(data) > (1 << 20) - 40:
        return Outcome.REFUSED
    return MemoryReference.put(self, handle, key, data)


def sets_umask(self: Any, settings: ReferenceSettings) -> Shelf:
    os.umask(0)
    return MemoryReference.open_shelf(self, settings)


def sets_timeout(self: Any, settings: ReferenceSettings) -> Shelf:
    socket.setdefaulttimeout(5.0)
    return MemoryReference.open_shelf(self, settings)


PIECES = "test_objects_of_many_pieces_move_as_declared"
DAMAGED = "test_damage_at_any_place_of_an_object_is_a_miss_and_heals"
AGAIN = "test_damage_after_a_page_was_loaded_is_a_miss_and_heals"
OTHERS = "test_a_clear_forgets_what_others_have_stored"
PROMISED = "test_a_clear_forgets_pages_that_are_promised"
THOUSANDS = "test_a_clear_forgets_thousands_of_pages"
MIDDLE = "test_a_put_whose_time_ends_in_the_middle_keeps_what_it_calls_stored"
TWO = "test_two_stores_of_one_process_are_two"
USERS = "test_other_users_of_the_host_cannot_read_pages"
STORED_AGAIN = "test_a_page_that_is_stored_again_is_not_reported_as_removed"
ROOM = "test_room_that_is_reported_is_that_of_all_pools_of_a_store"
LARGEST = "test_an_object_of_the_largest_size_is_kept"
STATE = "test_the_state_of_the_process_stays_the_hosts"

_32, _1023 = cut(32), cut(1023)

# Name, what it does, the defect, the test that catches it, what is replaced.
_ROWS: tuple[tuple[str, type, str, str, str, dict[str, Any]], ...] = (
    (
        "DropsPiecesAfter32",
        MemoryMutant,
        "Moves the first 32 pieces of an object",
        "an array of 32 buffers in a client: pages of 32 layers of K and V are wrong",
        PIECES,
        {"taken": _32[0], "landed": _32[1]},
    ),
    (
        "DropsPiecesAfter1023",
        MemoryMutant,
        "Moves the first 1,023 pieces of an object",
        "IOV_MAX: what is behind the largest vector of one call is dropped",
        PIECES,
        {"taken": _1023[0], "landed": _1023[1]},
    ),
    (
        "VerifiedOnce",
        FolderMutant,
        "Verifies a page at its first load, and trusts it afterwards",
        "a cache of checked keys in a process: later damage is served",
        AGAIN,
        {"get": verified_once},
    ),
    (
        "ClearsItsOwn",
        MemoryMutant,
        "Clears what the same handle has stored",
        "a clear by a list of written keys: a tenant's pages of others stay",
        OTHERS,
        {"put": puts_and_notes, "clear": clears_its_own},
    ),
    (
        "ClearsWhatIsNotPromised",
        MemoryMutant,
        "Leaves promised pages where it clears a namespace",
        "a promise that outlives the deletion of its tenant",
        PROMISED,
        {"clear": clears_what_is_not_promised},
    ),
    (
        "ClearsTenThousand",
        MemoryMutant,
        "Clears 10,000 pages at most",
        "DELETE ... LIMIT 10000 without a loop around it",
        THOUSANDS,
        {"clear": clears_ten_thousand},
    ),
    (
        "RollsBack",
        MemoryMutant,
        "Forgets a whole put when its time is over, and calls its first pages stored",
        "one transaction for a batch, rolled back behind answers that were made",
        MIDDLE,
        {"run": rolls_back},
    ),
    (
        "OpensTheFirst",
        FolderMutant,
        "Opens the first root of the process for every other one",
        "a database in a global variable: pages of A are found in B",
        TWO,
        {"open_shelf": opens_the_first},
    ),
    (
        "OpenToAllUsers",
        FolderMutant,
        "Keeps pages in files that every user of the host can read",
        "mkdir and open with the usual modes: prompts of others are readable",
        USERS,
        {"open_shelf": open_to_all},
    ),
    (
        "ReportsWhatIsThereAgain",
        MemoryMutant,
        "Reports deleted pages as removed that were stored again since",
        "a log of deletions that is read late: routers miss pages that are there",
        STORED_AGAIN,
        {"step": notes_deletes, "removed": reports_what_was_deleted},
    ),
    (
        "RoomThatNeverFalls",
        MemoryMutant,
        "Counts what it stores, and not what it deletes",
        "a counter of written bytes: a store counts as full for good",
        ROOM,
        {"put": counts_up, "capacity": never_falls},
    ),
    (
        "HoldsTheLockPerByte",
        MemoryMutant,
        "Holds the interpreter's lock for 1.8 s per MiB that it stores",
        "a checksum in a library that does not release the lock",
        LARGEST,
        {"put": holds_the_lock},
    ),
    (
        "TrailersDoNotFit",
        MemoryMutant,
        "Refuses an object of the size that it declares, but for a trailer",
        "a limit that was tried on pages, and not with what goes behind them",
        LARGEST,
        {"manifest": little_manifest, "put": refuses_the_largest},
    ),
    (
        "SetsUmask",
        MemoryMutant,
        "Changes the umask of the engine's process",
        "a library that wants its files open to all and leaves that behind",
        STATE,
        {"open_shelf": sets_umask},
    ),
    (
        "SetsSocketTimeout",
        MemoryMutant,
        "Changes the default timeout of all sockets",
        "socket.setdefaulttimeout in a client: the engine's own sockets time out",
        STATE,
        {"open_shelf": sets_timeout},
    ),
)

for _name, _base, _does, _image, _test, _replaced in _ROWS:
    globals()[_name] = type(
        _name,
        (_base,),
        {
            "__doc__": f"{_does}.",
            "__module__": __name__,
            "image_of": _image,
            "caught_by": _test,
            **_replaced,
        },
    )


class HashesTheFirstPieces(FolderMutant):
    """Verifies the first 4 KiB of what has many pieces."""

    image_of = "a hash over the first buffers of a list: layers behind them are trusted"
    caught_by = DAMAGED

    get = hashes_the_first(8192)
