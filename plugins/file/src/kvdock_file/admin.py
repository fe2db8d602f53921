"""What `kvdock store` does with a directory of segment files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock import segments
from kvdock.config import structure
from kvdock.errors import KvdockError
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
        """Return the digests of the namespaces, sorted."""
        return segments.namespaces(self.root)

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
