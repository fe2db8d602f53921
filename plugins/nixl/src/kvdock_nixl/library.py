"""Find NIXL, load it, and keep it from changing the engine's process."""

from __future__ import annotations

import importlib
import logging
import logging.config
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.errors import PluginError

OLDEST = (1, 5)
"""First release that reports a write to a full disk, and a read beyond a file's
end, as errors: 1.4.1 answered both with success."""

WHEELS = MappingProxyType({"nixl_cu12": "nixl-cu12", "nixl_cu13": "nixl-cu13"})
"""Package to the distribution that it comes from."""

_LOG_LEVELS = MappingProxyType({"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"})


@attrs.frozen(eq=False)
class Library:
    """The loaded library.

    Args:
        api: Its Python module with agents.
        native: The module below that one.
        errors: What its calls raise; they have no base of their own.
    """

    distribution: str
    version: str
    api: Any = attrs.field(repr=False)
    native: Any = attrs.field(repr=False)
    errors: tuple[type[Exception], ...] = attrs.field(repr=False)


def load() -> Library:
    """Import NIXL's own wheel; `nixl` itself would import torch to choose it."""
    package, version = check_installed()
    distribution = WHEELS[package]
    try:
        with _quiet(package):
            api = importlib.import_module(f"{package}._api")
            native = importlib.import_module(f"{package}._bindings")
    except ImportError as error:
        raise PluginError(
            f"{distribution} {version} cannot be imported: {error}",
            fix=f"Reinstall it: pip install --force-reinstall --no-deps {distribution}",
        ) from error
    raised = tuple(
        one
        for one in vars(native).values()
        if isinstance(one, type) and issubclass(one, Exception)
    )
    # RuntimeError: what fails below its own errors, in the C++ library.
    return Library(distribution, version, api, native, (*raised, RuntimeError))


def check_installed() -> tuple[str, str]:
    """Return the package to import and its version; loads nothing."""
    package = _choose()
    distribution = WHEELS[package]
    version = metadata.version(distribution)
    if _numbers(version) < OLDEST:
        raise PluginError(
            f"{distribution} {version} loses data: it reports writes to a full disk as "
            "done, and reads beyond the end of a file as whole",
            fix=f"pip install --upgrade '{distribution}>=1.5'",
        )
    return package, version


def _choose() -> str:
    """Return the package to import: the one that is loaded, else as torch is built."""
    installed = [name for name, wheel in WHEELS.items() if _installed(wheel)]
    if not installed:
        raise PluginError(
            "NIXL is not installed",
            fix="Install kvdock-nixl[cu12] or kvdock-nixl[cu13]; where torch is not "
            "wanted: pip install --no-deps nixl-cu12.",
        )
    loaded = [name for name in installed if f"{name}._bindings" in sys.modules]
    torch = sys.modules.get("torch")
    cuda = str(getattr(getattr(torch, "version", None), "cuda", None) or "")
    built = [name for name in installed if name == f"nixl_cu{cuda.partition('.')[0]}"]
    return [*loaded, *built, *installed][0]


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    >>> _numbers("1.4.0.post1")
    (1, 4)
    """
    return tuple(int(one) for one in re.findall(r"\d+", version)[:2])


@contextmanager
def _quiet(package: str) -> Iterator[None]:
    """Keep the import of a package from changing how the process logs.

    It would replace the logging configuration of the process, which closes the
    handlers of the engine, and switch off `logging.raiseExceptions` for everyone.
    Its native half reads its level once, from the environment, and would print
    every transfer that fails, which kvdock reports itself. So would UCX below it.
    """
    if package in sys.modules:
        yield
        return
    configure, raising = logging.config.dictConfig, logging.raiseExceptions
    unset = [name for name in _LOG_LEVELS if name not in os.environ]
    logging.config.dictConfig = lambda config: None  # noqa: ARG005 - its name
    os.environ.update({name: _LOG_LEVELS[name] for name in unset})
    try:
        yield
    finally:
        logging.config.dictConfig = configure
        logging.raiseExceptions = raising
        for name in unset:
            del os.environ[name]
        if "NIXL_LOG_LEVEL" in unset:
            logging.getLogger("nixl").setLevel(logging.WARNING)
