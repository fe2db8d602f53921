"""Everything that kvdock-sglang uses of SGLang, from the table beside this file.

SGLang promises nothing about most of the names in `engine_api.toml`. They are checked
when the engine starts: where one of `STORAGE` is missing, storage is rejected by that
name; a patch of which one is missing is left out, and the log says what is lost.

To support another version of SGLang: run `make test-sglang-latest`, correct what
it names, then add the version to `TESTED`.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from collections.abc import Iterable

TESTED = ("0.5.23",)
"""Versions of SGLang that the tests of this package ran with.

Of another version the number is part of the namespace: nothing has shown that
it orders the bytes of a page in the same way.
"""


@attrs.frozen
class Used:
    """Names of one object of SGLang that this package relies on.

    Args:
        members: Fields, methods or enum members that a class must have.
        reads: Names that the code of a function must refer to: a patch that
            hides or replaces one of them would otherwise change nothing.
    """

    path: str
    parameters: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """Return what this SGLang lacks, each as a dotted name or a reason."""
        try:
            found = pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError) as error:
            return (f"{self.path} ({error})",)
        except Exception as error:  # noqa: BLE001 - importing an engine runs its code
            return (f"{self.path} ({type(error).__name__}: {error})",)
        name = self.path.removeprefix("sglang.srt.")
        lacking = [f"{name}.{one}" for one in self.members if not _has(found, one)]
        if self.parameters:
            known = _parameters(found)
            lacking += [f"{name}({one})" for one in self.parameters if one not in known]
        if self.reads:
            referred = _references(found)
            lacking += [f"{one} in {name}" for one in self.reads if one not in referred]
        return tuple(lacking)


def _read(tables: Iterable[Mapping[str, str]]) -> tuple[Used, ...]:
    kinds = ("parameters", "members", "reads")
    return tuple(
        Used(
            f"sglang.srt.{table['path']}",
            **{kind: tuple(table.get(kind, "").split()) for kind in kinds},
        )
        for table in tables
    )


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

USED: Mapping[str, tuple[Used, ...]] = MappingProxyType(
    {group: _read(tables) for group, tables in _LISTED.items()}
)
"""All names, by what needs them."""

STORAGE = USED["storage"]
"""What storage requires; host pools are checked one by one."""

LAUNCH_ARGUMENTS = tuple(
    name
    for used in STORAGE
    if used.path.endswith(".ServerArgs")
    for name in used.members
    if name != "resolved_dict"
)
"""Launch arguments that this package reads by name; all others are read too."""


def missing(used: Iterable[Used]) -> tuple[str, ...]:
    """Return what this SGLang lacks of a table."""
    return tuple(name for one in used for name in one.missing())


def check(used: Iterable[Used] = STORAGE) -> None:
    """Reject an SGLang that lacks names which storage relies on.

    Raises:
        KvdockError: If any is missing; the message names all of them.
    """
    lacking = missing(used)
    if lacking:
        raise KvdockError(
            f"SGLang {installed_version()} lacks what kvdock-sglang uses of it: "
            f"{', '.join(lacking)}",
            fix=f"Use SGLang {' or '.join(TESTED)}, or a kvdock-sglang that was "
            "tested with yours.",
        )


def in_place(target: str) -> bool:
    """Return whether SGLang's plugin mechanism has wrapped a function."""
    owner, _, name = target.rpartition(".")
    try:
        return hasattr(getattr(pkgutil.resolve_name(owner), name), "__wrapped__")
    except (ImportError, AttributeError):
        return False


def installed_version() -> str:
    """Return the version of SGLang, from its distribution."""
    return metadata.version("sglang")


def release(version: str) -> str:
    """Return the release that a version is a build of.

    >>> release("0.5.23.post1+cu128")
    '0.5.23'
    """
    return re.sub(r"\.post\d+$", "", version.partition("+")[0])


def untested_version() -> str:
    """Return the release of SGLang where it is not a tested one, else ""."""
    found = release(installed_version())
    return "" if found in TESTED else found


def _has(found: object, member: str) -> bool:
    if hasattr(found, member):
        return True
    # A field without a default is not an attribute of its class.
    classes = found.__mro__ if isinstance(found, type) else ()
    return any(member in vars(cls).get("__annotations__", {}) for cls in classes)


def _parameters(found: Any) -> frozenset[str]:  # noqa: ANN401 - a function or class
    try:
        return frozenset(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _references(found: Any) -> frozenset[str]:  # noqa: ANN401 - a function
    """Return the names that a function's own code refers to."""
    code = getattr(inspect.unwrap(found), "__code__", None)
    if code is None:
        return frozenset()
    return frozenset((*code.co_names, *code.co_varnames))
