"""Keys that processes share, so that no other one makes messages for them."""

from __future__ import annotations

import hmac
import stat
import threading
from pathlib import Path

from kvdock.errors import KvdockError, SettingsError
from kvdock.throttled_log import ThrottledLog

MAC_BYTES = 32
"""Length of an HMAC-SHA256."""

_LEAST_CHARACTERS = 32
_MOST_KEYS = 16
_OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""A group may read it: that is how a secret is mounted for several users."""


class UnsignedError(KvdockError):
    """A message was not signed with a key of this process."""


class MessageKeys:
    """The keys of a file, a line each: the first signs, all of them verify.

    The file is read again when it has changed, so keys are rotated without a
    restart: add the new key as the second line on every host, then make it the
    first, then remove the old one.

    Args:
        path: The file. Lines that are empty or begin with "#" are left out.

    Raises:
        SettingsError: If the file cannot be read, or has no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read_at: tuple[int, int, int] | None = None
        self._log = ThrottledLog()
        self._keys = self._read()

    def sign(self, body: bytes | memoryview) -> bytes:
        """Return the HMAC of a message, 32 bytes."""
        return hmac.digest(self._current()[0], body, "sha256")

    def check(self, mac: bytes, body: bytes | memoryview) -> None:
        """Raise UnsignedError unless one of the keys has signed a message of a peer."""
        for key in self._current():
            if hmac.compare_digest(hmac.digest(key, body, "sha256"), mac):
                return
        raise UnsignedError(
            "a message of a peer is not signed with any key of this process",
            fix="core.peers.key_file must hold a common key on both sides.",
        )

    def _current(self) -> tuple[bytes, ...]:
        with self._lock:
            try:
                if self._stamp() != self._read_at:
                    self._keys = self._read()
            except (OSError, SettingsError) as error:
                # Until the file is whole again: an engine goes on with what it has.
                what = f"the keys for peers are not read again: {error}"
                self._log.warning("keys", what)
            return self._keys

    def _stamp(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[bytes, ...]:
        try:
            # Before the text: what is written in between is read next time.
            stamp = self._stamp()
            lines = self._path.read_text("ascii").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not ASCII"
            raise SettingsError(
                f"core.peers.key_file is not read: {why}",
                fix="Give a text file with a key in each line.",
            ) from error
        found = [line.strip() for line in lines]
        keys = tuple(one.encode() for one in found if one and not one.startswith("#"))
        if not 0 < len(keys) <= _MOST_KEYS or min(map(len, keys)) < _LEAST_CHARACTERS:
            raise SettingsError(
                f"core.peers.key_file {self._path} must hold 1 to {_MOST_KEYS} keys of "
                f"at least {_LEAST_CHARACTERS} characters each",
                fix="Make one with `openssl rand -hex 32`.",
            )
        if self._path.stat().st_mode & _OPEN_TO_OTHERS:
            self._log.warning(
                "mode",
                f"core.peers.key_file {self._path} can be read or written by others: "
                "other users can read the key and make messages; run chmod 600 on it",
            )
        self._read_at = stamp
        return keys
