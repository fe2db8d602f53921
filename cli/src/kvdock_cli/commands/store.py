"""See, check and clean up what is stored in files under a root directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from kvdock import segments
from kvdock.config.convert import as_path
from kvdock.errors import NamespaceError
from kvdock.units import format_bytes, parse_bytes
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import store as report
from kvdock_cli.reports._tables import printable

if TYPE_CHECKING:
    from kvdock.segments import NamespaceSurvey

T = TypeVar("T")


def ls(root: str, /, *, json: bool = False) -> int:
    """List the namespaces of a store with their models and sizes.

    Args:
        root: The store's root directory.
        json: Print one line of JSON.
    """
    home = as_path(root)
    found = [
        done
        for _, done in _each(
            home, "", lambda one: segments.describe_namespace(home, one)
        )
    ]
    return emit(report.listing_text(found), report.listing_data(found), as_json=json)


def stat(root: str, namespace: str, /, *, json: bool = False) -> int:
    """Show what a store holds of one namespace, pool by pool.

    Args:
        root: The store's root directory.
        namespace: The namespace, or enough of its first digits.
        json: Print one line of JSON.
    """
    found = segments.describe_namespace(
        as_path(root), segments.resolve_prefix(as_path(root), namespace)
    )
    return emit(report.survey_text(found), report.survey_data(found), as_json=json)


def verify(
    root: str,
    /,
    *,
    namespace: str = "",
    heal: bool = False,
    shared_root: bool = False,
    json: bool = False,
) -> int:
    """Read every page and compare its checksum; 1 if any is wrong or lost.

    Args:
        root: The store's root directory.
        namespace: Only this one; enough of its first digits.
        heal: Forget what is wrong, so that the next write stores it anew.
        shared_root: Heal under a root that others own or may write.
        json: Print one line of JSON.
    """
    home = as_path(root)
    seen = _each(home, namespace, lambda one: segments.describe_namespace(home, one))
    total = sum(pool.stored_bytes for _, one in seen for pool in one.pools)
    with _progress(total) as tell:
        checked = _each(
            home,
            namespace,
            lambda one: segments.verify_namespace(
                home, one, tell, heal=heal, shared=shared_root
            ),
        )
    found = [done for _, done in checked]
    return emit(report.checked_text(found), report.checked_data(found), as_json=json)


def gc(
    root: str,
    /,
    *,
    namespace: str = "",
    to: str = "",
    newer: bool = False,
    shared_root: bool = False,
    json: bool = False,
) -> int:
    """Give back what nobody can read, and the coldest pages if told to.

    What crashed writers left, torn index files, and segments of an earlier
    version of kvdock can be read by nobody. A namespace without pages that no
    engine has open goes as a whole.

    Args:
        root: The store's root directory.
        namespace: Only this one; enough of its first digits.
        to: Most that the namespace may keep, such as "20 GiB"; segments in
            use by a writer stay.
        newer: Delete what a later version of kvdock has stored as well.
        shared_root: Accept a root that others own or may write.
        json: Print one line of JSON.
    """
    home = as_path(root)
    if to and not namespace:
        raise UsageProblem(
            "--to without a namespace would evict pages of every model",
            fix="Give --namespace as well.",
        )
    most = parse_bytes(to) if to else None
    freed = _each(
        home,
        namespace,
        lambda one: segments.gc(
            home, one, to_bytes=most, newer=newer, shared=shared_root
        ),
    )
    return emit(report.freed_text(freed), report.freed_data("gc", freed), as_json=json)


def clear(
    root: str,
    namespace: str,
    /,
    *,
    yes: bool = False,
    shared_root: bool = False,
    json: bool = False,
) -> int:
    """Delete every page of one namespace, and of no other.

    Args:
        root: The store's root directory.
        namespace: The namespace, or enough of its first digits.
        yes: Do not ask.
        shared_root: Accept a root that others own or may write.
        json: Print one line of JSON.
    """
    home = as_path(root)
    one = segments.resolve_prefix(home, namespace)
    if not yes:
        _confirm(segments.describe_namespace(home, one))
    freed = [(one, segments.clear(home, one, shared=shared_root))]
    return emit(
        report.freed_text(freed), report.freed_data("clear", freed), as_json=json
    )


def _confirm(found: NamespaceSurvey) -> None:
    """Ask before pages are deleted; anything but yes ends the command."""
    if not sys.stdin.isatty():
        raise UsageProblem(
            "nobody can be asked whether to delete", fix="Give --yes to go ahead."
        )
    name = printable(found.model) or found.namespace[:12]
    size = format_bytes(found.file_bytes)
    sys.stderr.write(f"Delete {found.pages} pages of {name}, {size}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageProblem("nothing was deleted", fix="Answer yes, or give --yes.")


def _each(root: Path, prefix: str, do: Callable[[str], T]) -> list[tuple[str, T]]:
    """Do the same for the namespace that is named, or for all that stay."""
    if prefix:
        one = segments.resolve_prefix(root, prefix)
        return [(one, do(one))]
    done = []
    for one in segments.namespaces(root):
        try:
            done.append((one, do(one)))
        except NamespaceError:
            # One that goes while others are looked at was not asked for.
            if one in segments.namespaces(root):
                raise
    return done


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on a terminal; it is on the error stream, as JSON is not."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only for terminals
    from rich.progress import (  # noqa: PLC0415 - same
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("verify", total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)


COMMANDS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"ls": ls, "stat": stat, "verify": verify, "gc": gc, "clear": clear}
)
"""The commands below `kvdock store`."""
