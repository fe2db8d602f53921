"""Read the entry points of what is installed, from the folders on the path.

`importlib.metadata` does the same for every kind of installation, and takes 40 ms to
import, as it parses mails: twice as long as the interpreter takes to start. It is asked
where something else than folders may announce entry points.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class EntryPoint(NamedTuple):
    """A line in a distribution's `entry_points.txt`, and whose it is.

    Args:
        distribution: Its name; "?" where a broken installation has none.
        summary: What the distribution says about itself; may be "".
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    summary: str


def read_entry_points(prefix: str) -> Iterator[EntryPoint]:
    """Yield the entry points of groups whose name begins so.

    Of two installations of one distribution, the first on the path counts.
    """
    return _in_folders(prefix) if _are_folders() else _by_importlib(prefix)


def _are_folders() -> bool:
    """Return whether all that is installed lies in folders on the path."""
    finders = [one for one in sys.meta_path if one is not PathFinder]
    eggs = [entry for entry in sys.path if entry.endswith(".egg")]
    archives = [entry for entry in sys.path if os.path.isfile(entry)]  # noqa: PTH113 - 5 ms to import
    return not (
        eggs or archives or any(hasattr(one, "find_distributions") for one in finders)
    )


def _in_folders(prefix: str) -> Iterator[EntryPoint]:
    for folder in _distributions():
        points = list(_points(_text(folder, "entry_points.txt"), prefix))
        about = _about(folder) if points else {}
        for group, name, value in points:
            yield _entry_point(group, name, value, about)


def _distributions() -> Iterator[str]:
    """Yield the folder of each distribution's metadata."""
    seen = set()
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")  # noqa: PTH208 - 400 names, few of which count
        except OSError:
            continue
        for name in names:
            stem, dot, kind = name.rpartition(".")
            if dot and kind.lower() in {"dist-info", "egg-info"}:
                owner = re.sub(r"[-_.]+", "-", stem.partition("-")[0]).lower()
                if owner not in seen:
                    seen.add(owner)
                    yield f"{entry or '.'}/{name}"


def _points(text: str, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield group, name and value of each entry point."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]")
        elif "=" in line and not line.startswith("#") and group.startswith(prefix):
            name, _, value = line.partition("=")
            yield group, name.strip(), value.strip()


def _about(folder: str) -> dict[str, str]:
    """Return the first of each field that a distribution says about itself."""
    text = _text(folder, "METADATA") or _text(folder, "PKG-INFO")
    about: dict[str, str] = {}
    for line in text.splitlines():
        if not line:
            break  # a description follows
        field, _, value = line.partition(":")
        about.setdefault(field, value.strip())
    return about


def _text(folder: str, name: str) -> str:
    try:
        # Most have none, and a `Path` of each takes as long as to find that out.
        with open(f"{folder}/{name}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""


def _entry_point(
    group: str, name: str, value: str, about: Mapping[str, str]
) -> EntryPoint:
    return EntryPoint(
        group=group,
        name=name,
        value=value,
        distribution=about.get("Name", "?"),
        version=about.get("Version", "?"),
        summary=about.get("Summary", ""),
    )


def _by_importlib(prefix: str) -> Iterator[EntryPoint]:
    from importlib import metadata  # noqa: PLC0415 - see above

    points: Any = metadata.entry_points()
    for group in points.groups:
        for point in points.select(group=group) if group.startswith(prefix) else ():
            # Each access parses the whole file again.
            said = point.dist.metadata if point.dist else {}
            about = {name: str(said[name]).strip() for name in said}
            yield _entry_point(group, point.name, point.value, about)
