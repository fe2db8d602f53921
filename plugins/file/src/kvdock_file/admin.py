"""What `kvdock store` does with a directory of segment files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock import segments
from kvdock.config import structure
from kvdock.errors import KvdockError, SettingsError
from kvdock.namespace import RECORD_NAME
from kvdock_file.settings import FileSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvdock.segments import NamespaceSurvey, VerifyReport
    from kvdock.stores import Store


@attrs.frozen
class DirectoryStore:
    """The namespaces below a root directory.

    Args:
        root: The directory.
        shared: Accept one that others own or may write.
    """

    root: Path
    shared: bool = False

    def namespaces(self) -> tuple[str, ...]:
        """Return the digests of the namespaces, sorted.

        Raises:
            SettingsError: If the directory is missing, or holds other things only.
        """
        found = segments.namespaces(self.root) if self.root.is_dir() else ()
        if not found:
            self._check_store()
        return found

    def _check_store(self) -> None:
        """Raise unless a directory without namespaces is an empty store."""
        where = f"{self.root} is not a store"
        if not self.root.is_dir():
            why = "it is not a directory" if self.root.exists() else "it is missing"
            raise SettingsError(f"{where}: {why}", fix="Name the root of a backend.")
        if is_namespace(self.root):
            raise SettingsError(
                f"{where}: it is one namespace of {self.root.parent}",
                fix=f"Name {self.root.parent}, and {self.root.name[:12]} as namespace.",
            )
        try:
            others = [one for one in self.root.iterdir() if one.name[:1] != "."]
        except OSError as error:
            raise SettingsError(
                f"{self.root} cannot be read: {error.strerror or error}",
                fix="Run this as the user of the engine.",
            ) from error
        if others:
            raise SettingsError(
                f"{where}: it holds {len(others)} other files or directories, such as "
                f"{min(others).name}, and no namespace",
                fix="Name the root of a backend.",
            )

    def survey(self, namespace: str) -> NamespaceSurvey:
        """Count what is held of a namespace."""
        return segments.describe_namespace(self.root, namespace)

    def verify(
        self,
        namespace: str,
        progress: Callable[[int], None] | None = None,
        *,
        heal: bool = False,
    ) -> VerifyReport:
        """Read every page of a namespace and compare its checksum."""
        return segments.verify_namespace(
            self.root, namespace, progress, heal=heal, shared=self.shared
        )

    def collect(
        self,
        namespace: str,
        *,
        to_bytes: int | None = None,
        older_s: float | None = None,
        newer: bool = False,
    ) -> int:
        """Delete what crashed writers left, and the coldest pages if asked to.

        Raises:
            KvdockError: If pages are to be deleted by their age.
        """
        if older_s is not None:
            raise KvdockError(
                f"{self.root} deletes by use and not by age",
                fix="Give --to with the bytes that may stay, or set the quota of the "
                "backend.",
            )
        return segments.gc(
            self.root, namespace, to_bytes=to_bytes, newer=newer, shared=self.shared
        )

    def clear(self, namespace: str) -> int:
        """Delete all pages of a namespace; return the bytes that were freed."""
        return segments.clear(self.root, namespace, shared=self.shared)


def is_namespace(folder: Path) -> bool:
    """Return whether a directory is a namespace of a store and not its root."""
    return (folder / RECORD_NAME).is_file()


def open_store(target: str, settings: Mapping[str, object]) -> Store | None:
    """Open a directory; None for a URL.

    Entry point `file` of the group `kvdock.stores`.

    Raises:
        SettingsError: If a setting is unknown or of the wrong kind.
    """
    if "://" in target:
        return None
    given = {**settings, "root": target}
    found = structure(FileSettings, given, where="backend 'file'")
    return DirectoryStore(found.root, shared=found.shared_root)
