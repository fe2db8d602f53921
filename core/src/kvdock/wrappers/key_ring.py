"""Keys of tenants: random data keys in a file, each wrapped by the master key.

    {"version": 1, "keys": [{"tenant": "acme", "id": 1, "wrapped": "..."}]}

The newest key of a tenant seals; all others open what they have sealed. A key that
is destroyed leaves its number behind, so that no number is given twice, and nothing
that it has sealed can ever be read again. Processes read the file again within a
second of a change.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import KvdockError, SettingsError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
PIECE_BYTES = 1 << 20
"""Bytes that the library is given at once: it holds the interpreter's lock."""
MAX_KEY_ID = 0xFFFF
"""A trailer has two bytes for the number of a key."""

_VERSION = 1
_CHECK_S = 1.0
"""How often the file is looked at."""
_SUBKEYS_KEPT = 4096


class KeyProblem(StrEnum):
    """Why nothing can be sealed or opened."""

    MISSING = "no key of that number is in the key file"
    """No key of the tenant has that number, or it has none at all."""
    DESTROYED = "the key was destroyed"
    """It was deleted on purpose."""
    WRONG_MASTER = "the master key does not open the key"
    """Another master key has wrapped it, or the entry was altered."""
    UNREADABLE = "the key file cannot be read"
    """It is gone, or not what such a file is."""


class KeyUnusableError(KvdockError):
    """A key cannot be used; `problem` says why."""

    def __init__(self, problem: KeyProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Subkey:
    """What seals and opens objects: AES-256-GCM with one key.

    Args:
        key: The key, 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        # Not for each object: an import costs as much as 8 KiB of AES.
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        self._key, self._aead, self._wrong = key, _aead(key), InvalidTag

    def seal(
        self,
        nonce: bytes,
        about: bytes,
        room: memoryview,
        pieces: Sequence[memoryview],
    ) -> None:
        """Seal an object.

        Args:
            nonce: 12 bytes, for this object alone.
            about: What is bound to it.
            room: Gets its bytes, and the tag behind them.
            pieces: Its bytes as they lie in memory.
        """
        if len(pieces) == 1 and len(room) <= PIECE_BYTES + TAG_BYTES:
            self._aead.encrypt_into(nonce, pieces[0], about, room)
            return
        work = self._message(nonce).encryptor()
        work.authenticate_additional_data(about)
        for plain, sealed in _side_by_side(pieces, room):
            work.update_into(plain, sealed)
        work.finalize()
        room[-TAG_BYTES:] = work.tag

    def open(
        self,
        nonce: bytes,
        about: bytes,
        room: memoryview,
        pieces: Sequence[memoryview],
    ) -> bool:
        """Open an object; return False, with zeros in its place, if it is another."""
        try:
            if len(pieces) == 1 and len(room) <= PIECE_BYTES + TAG_BYTES:
                self._aead.decrypt_into(nonce, room, about, pieces[0])
                return True
            work = self._message(nonce).decryptor()
            work.authenticate_additional_data(about)
            for plain, sealed in _side_by_side(pieces, room):
                work.update_into(sealed, plain)
            work.finalize_with_tag(bytes(room[-TAG_BYTES:]))
        except self._wrong:
            # Whatever was written there is not what was stored.
            for piece in pieces:
                piece[:] = bytes(len(piece))
            return False
        return True

    def _message(self, nonce: bytes) -> Any:  # noqa: ANN401 - the library's
        from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415
            Cipher,
            algorithms,
            modes,
        )

        return Cipher(algorithms.AES(self._key), modes.GCM(nonce))


def _side_by_side(
    pieces: Sequence[memoryview], room: memoryview
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield what belongs together; other threads run in between."""
    at = 0
    for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            plain = piece[start : start + PIECE_BYTES]
            yield plain, room[at : at + len(plain)]
            at += len(plain)


@attrs.define(eq=False)
class DataKey:
    """One key of one tenant.

    It seals nothing itself. For each namespace and each salt of 32 random bits it
    stands for another key: nonces are random, and AES-GCM bounds how many of them one
    key may see (2^32). With the salt they have 128 bits, so no process has to count
    what others seal.

    Args:
        number: Its number, 1 to 65535.
        secret: Its 32 bytes.
    """

    number: int
    secret: bytes = attrs.field(repr=False)
    _made: dict[tuple[str, int], Subkey] = attrs.field(factory=dict, repr=False)

    def subkey(self, namespace: str, salt: int) -> Subkey:
        """Return the key for objects of one namespace and one salt."""
        found = self._made.get((namespace, salt))
        if found is None:
            if len(self._made) >= _SUBKEYS_KEPT:
                self._made.clear()
            label = f"kvdock seal {salt} {namespace}".encode()
            found = Subkey(hmac.digest(self.secret, label, "sha256"))
            self._made[namespace, salt] = found
        return found


def _aead(key: bytes) -> AESGCM:
    # A listing of wrappers needs no cryptography.
    from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415
        AESGCM,
    )

    return AESGCM(key)


@attrs.frozen
class _Entry:
    """One entry of the file."""

    tenant: str
    number: int
    wrapped: bytes

    @property
    def about(self) -> bytes:
        """What the wrapped key is bound to."""
        return f"kvdock data key\0{self.tenant}\0{self.number}".encode()

    def opened(self, master: bytes) -> DataKey:
        """Unwrap the key."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        if not self.wrapped:
            raise KeyUnusableError(KeyProblem.DESTROYED)
        nonce, sealed = self.wrapped[:NONCE_BYTES], self.wrapped[NONCE_BYTES:]
        try:
            secret = _aead(master).decrypt(nonce, sealed, self.about)
        except (InvalidTag, ValueError):
            # Not as its cause: nothing of a key is for a log.
            raise KeyUnusableError(KeyProblem.WRONG_MASTER) from None
        return DataKey(self.number, secret)

    @classmethod
    def wrapping(cls, tenant: str, number: int, secret: bytes, master: bytes) -> _Entry:
        """Wrap a key."""
        bare, nonce = cls(tenant, number, b""), os.urandom(NONCE_BYTES)
        sealed = _aead(master).encrypt(nonce, secret, bare.about)
        return cls(tenant, number, nonce + sealed)


class KeyRing:
    """The keys of a file, for one process.

    Args:
        path: The file.
        master: The master key, 32 bytes.
    """

    def __init__(self, path: Path, master: bytes) -> None:
        self._path, self._master = path, master
        self._looked_s = float("-inf")
        self._seen: object = None
        # Together: a key of entries that are old by now must not be kept for new ones.
        self._state: tuple[Mapping[int, _Entry], dict[int, DataKey]] | None = None

    def sealing(self, tenant: str) -> DataKey:
        """Return the key with which new objects of a tenant are sealed.

        Raises:
            KeyUnusableError: If there is none.
        """
        return self.opening(max(self._mine(tenant), default=0))

    def reading(self, tenant: str) -> None:
        """Check that some object of a tenant can be opened.

        Raises:
            KeyUnusableError: If none can, with what is wrong with the newest key.
        """
        first: KeyUnusableError | None = None
        for number in sorted(self._mine(tenant), reverse=True):
            try:
                self.opening(number)
            except KeyUnusableError as error:
                first = first or error
            else:
                return
        raise first or KeyUnusableError(KeyProblem.MISSING)

    def opens(self, number: int) -> bool:
        """Return whether the key of a number can be used, or that is not known now."""
        try:
            self.opening(number)
        except KeyUnusableError as error:
            return error.problem is KeyProblem.UNREADABLE
        return True

    def has_lost(self, tenant: str) -> bool:
        """Return whether a tenant has a key in the file that cannot be used.

        Raises:
            KeyUnusableError: If the file cannot be read.
        """
        return not all(map(self.opens, self._mine(tenant)))

    def opening(self, number: int) -> DataKey:
        """Return the key that has sealed an object, whosever it is.

        Raises:
            KeyUnusableError: If it is not there or cannot be used.
        """
        entries, opened = self._current()
        found = opened.get(number)
        if found is None:
            entry = entries.get(number)
            if entry is None:
                raise KeyUnusableError(KeyProblem.MISSING)
            # Of threads that come here at once the last one's stays; all are right.
            found = opened[number] = entry.opened(self._master)
        return found

    def _mine(self, tenant: str) -> list[int]:
        """Return the numbers of a tenant's keys."""
        entries, _ = self._current()
        return [one.number for one in entries.values() if one.tenant == tenant]

    def _current(self) -> tuple[Mapping[int, _Entry], dict[int, DataKey]]:
        """Return the entries, as the file has them now, and those that are opened."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _CHECK_S:
            self._look()
            self._looked_s = now_s
        state = self._state
        if state is None:
            raise KeyUnusableError(KeyProblem.UNREADABLE)
        return state

    def _look(self) -> None:
        """Read the file again if it is another one."""
        try:
            about = self._path.stat()
            seen = about.st_mtime_ns, about.st_size, about.st_ino
            if seen == self._seen:
                return
            entries = {one.number: one for one in _read(self._path)}
        except (OSError, KvdockError):
            # What cannot be read may say that a key is destroyed.
            self._seen, self._state = None, None
            return
        self._seen, self._state = seen, (entries, {})


def _read(path: Path) -> list[_Entry]:
    """Read a key file."""
    try:
        found = json.loads(path.read_bytes())
        known = found["version"] == _VERSION
        entries = [
            _Entry(str(one["tenant"]), int(one["id"]), bytes.fromhex(one["wrapped"]))
            for one in found["keys"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        known, entries = False, []
    if not known:
        raise KvdockError(
            f"{path} is not a key file of this version",
            fix="Restore it from a backup: without it nothing sealed can be read.",
        )
    return entries


@contextmanager
def _changed(path: Path) -> Iterator[list[_Entry]]:
    """Yield the entries to be changed; write them when that is done.

    The file is replaced as a whole, so that a reader sees one state or the other. It
    keeps its owner, group and mode; a symbolic link to it stays one.
    """
    path = path.resolve()
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = _read(path) if path.exists() else []
        yield entries
        text = json.dumps(
            {
                "version": _VERSION,
                "keys": [
                    {"tenant": e.tenant, "id": e.number, "wrapped": e.wrapped.hex()}
                    for e in entries
                ],
            },
            indent=1,
        )
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                if path.exists():
                    _belong(fd, path)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        os.close(lock)


def _belong(fd: int, path: Path) -> None:
    """Give an open file the owner, group and mode of another one."""
    mine, theirs = os.fstat(fd), path.stat()
    try:
        if (mine.st_uid, mine.st_gid) != (theirs.st_uid, theirs.st_gid):
            os.fchown(fd, theirs.st_uid, theirs.st_gid)
    except PermissionError as error:
        raise KvdockError(
            f"{path} would get another owner or group, and stays as it is",
            fix="Run this as its owner, with its group, or as root.",
        ) from error
    os.fchmod(fd, stat.S_IMODE(theirs.st_mode))


def add_key(path: Path, master: bytes, tenant: str) -> int:
    """Give a tenant a new random key, which seals from now on; return its number.

    Raises:
        KvdockError: If its numbers are used up, or the file is not a key file.
    """
    with _changed(path) as entries:
        number = max((one.number for one in entries), default=0) + 1
        if number > MAX_KEY_ID:
            raise KvdockError(
                f"{path} has had {MAX_KEY_ID} keys, and no number is left"
            )
        secret = os.urandom(KEY_BYTES)
        entries.append(_Entry.wrapping(tenant, number, secret, master))
    return number


def destroy_keys(path: Path, tenant: str, number: int = 0) -> int:
    """Destroy one key of a tenant, or all; return how many there were.

    What they have sealed cannot be read again, wherever there are copies of it. A
    backup of the file undoes this, and so may the blocks of a disk that the old
    file lay on: wrap the other keys with a new master key as well where that counts.
    """
    gone = 0
    with _changed(path) as entries:
        for at, one in enumerate(entries):
            if one.tenant == tenant and one.wrapped and number in (0, one.number):
                entries[at], gone = attrs.evolve(one, wrapped=b""), gone + 1
    return gone


def list_keys(path: Path) -> list[tuple[str, int, bool]]:
    """Return tenant and number of each key, and whether it was destroyed.

    Raises:
        KvdockError: If there is no such file, or it is not a key file.
    """
    try:
        entries = _read(path)
    except OSError as error:
        raise KvdockError(f"{path} cannot be read: {error.strerror}") from error
    return [(one.tenant, one.number, not one.wrapped) for one in entries]


def wrap_again(path: Path, master: bytes, new_master: bytes) -> None:
    """Wrap all keys with a new master key; what is sealed stays as it is.

    Raises:
        KeyUnusableError: If the old master key does not open one; nothing changes.
    """
    with _changed(path) as entries:
        for at, one in enumerate(entries):
            if one.wrapped:
                secret = one.opened(master).secret
                entries[at] = _Entry.wrapping(
                    one.tenant, one.number, secret, new_master
                )


def read_master_key(path: Path | None, variable: str) -> bytes:
    """Return the master key from a file or, without one, from a variable.

    Args:
        path: A file of 32 bytes, or of their 64 hexadecimal digits.
        variable: A variable with these digits.

    Raises:
        SettingsError: If there is no such key; no message shows what was found.
    """
    where = str(path) if path else f"the variable {variable}"
    try:
        data = path.read_bytes() if path else os.environ.get(variable, "").encode()
    except OSError as error:
        raise SettingsError(f"{where} cannot be read: {error.strerror}") from error
    if len(data) != KEY_BYTES:
        try:
            data = bytes.fromhex(data.decode("ascii"))
        except ValueError:
            data = b""
    if len(data) != KEY_BYTES:
        # Not with a cause, whose text would show it.
        raise SettingsError(
            f"{where} has no master key",
            fix="Write 64 random hexadecimal digits, as `openssl rand -hex 32` does.",
        ) from None
    return data
