"""Find the Mooncake library, load it, and see what this release can do.

Three wheels carry the library and overwrite each other's files, so their
metadata is read before anything is imported: `import mooncake` loads native
code and starts threads. What a release can do is read from its signatures and
attributes, never from the text of an error.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.errors import PluginError

WHEELS = MappingProxyType(
    {
        "mooncake-transfer-engine-non-cuda": "cpu",
        "mooncake-transfer-engine": "cuda12",
        "mooncake-transfer-engine-cuda13": "cuda13",
    }
)
"""Distribution to the extra of this plugin that installs it."""

_BROKEN = frozenset(
    ("mooncake-transfer-engine-non-cuda", version)
    for version in ("0.3.12", "0.3.12.post1", "0.3.13")
)
"""Releases without CUDA that were linked against the CUDA runtime."""

NATIVE_FOLDER = Path(sys.prefix) / "lib" / "kvdock-mooncake"
"""Where `python -m kvdock_mooncake.system_libraries` puts system libraries."""

NATIVE_NAMES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
"""System libraries that the wheels need, in the order of their own needs."""

_SOURCES = MappingProxyType(
    {
        "libibverbs.so.1": "apt-get install libibverbs1, or without root: "
        "python -m kvdock_mooncake.system_libraries",
        "libnuma.so.1": "apt-get install libnuma1",
        "libcurl.so.4": "apt-get install libcurl4",
        "libcudart.so.12": "install CUDA 12, or the extra [cpu]",
        "libcudart.so.13": "install CUDA 13, or the extra [cpu]",
        "libcuda.so.1": "install the GPU's driver, or the extra [cpu]",
        "libmlx5.so.1": "apt-get install ibverbs-providers",
    }
)
"""What brings a system library that a wheel needs."""

_NEEDED = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
_NEEDED_BY = MappingProxyType(
    {
        "cuda12": ("libcudart.so.12", "libcuda.so.1", "libmlx5.so.1"),
        "cuda13": ("libcudart.so.13", "libcuda.so.1", "libmlx5.so.1"),
    }
)


@attrs.frozen
class Wheel:
    """One installed distribution of the library."""

    distribution: str
    version: str

    @property
    def extra(self) -> str:
        """The extra of this plugin that names it."""
        return WHEELS[self.distribution]

    def is_since(self, release: str) -> bool:
        """Return whether it is this release, a post-release of it, or a later one.

        >>> Wheel("mooncake-transfer-engine", "0.3.11.post1").is_since("0.3.9")
        True
        """
        return _numbers(self.version) >= _numbers(release)

    def __str__(self) -> str:
        """Render as pip does."""
        return f"{self.distribution} {self.version}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def installed() -> tuple[Wheel, ...]:
    """Return the installed wheels, from metadata alone."""
    found = []
    for name in WHEELS:
        try:
            found.append(Wheel(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def the_wheel(found: Sequence[Wheel]) -> Wheel:
    """Return the one usable wheel."""
    if not found:
        raise PluginError(
            "the Mooncake library is not installed",
            fix="Install one of kvdock-mooncake[cpu], [cuda12] and [cuda13].",
        )
    if len(found) > 1:
        raise PluginError(
            f"{len(found)} wheels share the files of the Mooncake library: "
            f"{', '.join(map(str, found))}",
            fix="Uninstall all of them, then install one: the last one that was "
            "installed has overwritten the others.",
        )
    wheel = found[0]
    if (wheel.distribution, wheel.version) in _BROKEN:
        raise PluginError(
            f"{wheel} needs the CUDA runtime by mistake",
            fix=f"pip install --upgrade 'kvdock-mooncake[{wheel.extra}]'",
        )
    return wheel


@attrs.frozen
class Feature:
    """Something that not every release can do.

    Args:
        since: The first release that does.
    """

    name: str
    present: bool
    since: str


@attrs.frozen(eq=False)
class Library:
    """The loaded client library.

    Args:
        put_config_class: Its record of how to store.
        put_options: Names of the fields of that record.
        soft_pin: The value that asks for a soft pin; None where a flag does.
    """

    wheel: Wheel
    store_class: Any
    put_config_class: Any
    setup_parameters: frozenset[str]
    put_options: frozenset[str]
    methods: frozenset[str]
    soft_pin: Any = None

    def features(self) -> tuple[Feature, ...]:
        """Return what was found by looking at signatures and attributes."""
        rows = (
            ("removal in batches", "batch_remove" in self.methods, "0.3.10.post1"),
            ("SSD offload", self.ssd_offload, "0.3.10.post2"),
            ("tenants", self.tenants, "0.3.12"),
            ("groups of objects", self.groups, "0.3.12"),
            ("lifetimes of soft pins", self.soft_pin_ttl, "0.3.13"),
            ("lookups without a lease", self.probes, "0.3.14"),
        )
        return tuple(Feature(*row) for row in rows)

    @property
    def ssd_offload(self) -> bool:
        """Return whether a client can spill to a disk of its own."""
        return {"enable_ssd_offload", "ssd_offload_path"} <= self.setup_parameters

    @property
    def tenants(self) -> bool:
        """Return whether a client can name its tenant."""
        return "tenant_id" in self.setup_parameters

    @property
    def groups(self) -> bool:
        """Return whether objects can be evicted together."""
        return "group_ids" in self.put_options

    @property
    def soft_pin_ttl(self) -> bool:
        """Return whether a put can say how long its soft pin lasts."""
        return self.soft_pin is not None and "soft_pin_ttl_ms" in self.put_options

    @property
    def probes(self) -> bool:
        """Return whether a lookup can leave no lease behind."""
        return "batch_probe_key" in self.methods


def load() -> Library:
    """Import the library."""
    wheel = the_wheel(installed())
    preload()
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        needed = (*_NEEDED, *_NEEDED_BY.get(wheel.extra, ()))
        ways = "; ".join(_SOURCES[name] for name in needed if not loads(name))
        raise PluginError(
            f"{wheel} cannot be imported: {error}",
            fix=f"Try: {ways}." if ways else "Reinstall it.",
        ) from error
    return inspect_library(wheel, module)


def inspect_library(wheel: Wheel, module: Any) -> Library:  # noqa: ANN401 - a native module
    """Read from signatures and attributes what a release can do."""
    store, config = module.MooncakeDistributedStore, module.ReplicateConfig
    return Library(
        wheel=wheel,
        store_class=store,
        put_config_class=config,
        setup_parameters=parameters(store.setup.__doc__ or ""),
        put_options=frozenset(dir(config)),
        methods=frozenset(dir(store)),
        soft_pin=getattr(getattr(module, "SoftPinAction", None), "ENABLE", None),
    )


def parameters(signatures: str) -> frozenset[str]:
    """Read parameter names from the signatures in a native docstring.

    >>> sorted(parameters("1. setup(self: Store, host: str, size: int = 0) -> int"))
    ['host', 'self', 'size']
    """
    lines = [line for line in signatures.splitlines() if " -> " in line]
    return frozenset(name for line in lines for name in re.findall(r"(\w+): ", line))


def preload() -> None:
    """Load system libraries that lie below the interpreter's prefix.

    The dynamic linker looks for a library by name among those that are loaded
    already, so it finds these without LD_LIBRARY_PATH, which would have to be
    set before the process starts.
    """
    for name in NATIVE_NAMES:
        if loads(name):
            continue
        for path in sorted(NATIVE_FOLDER.rglob(name)):
            ctypes.CDLL(str(path))


def search_path(environment: str = "") -> str:
    """Return LD_LIBRARY_PATH for the library's own programs."""
    found = (path for name in NATIVE_NAMES for path in NATIVE_FOLDER.rglob(name))
    folders = sorted({str(path.parent) for path in found})
    return ":".join([*folders, environment] if environment else folders)


def program(name: str) -> Path:
    """Return the path of a native program of the wheel.

    The console script of the same name is a wrapper: ending it would leave
    the program behind.
    """
    wheel = the_wheel(installed())
    path = Path(str(metadata.distribution(wheel.distribution).locate_file("mooncake")))
    if not (path / name).exists():
        raise PluginError(f"{wheel} brings no {name}", fix="Reinstall it.")
    return path / name


def loads(name: str) -> bool:
    """Return whether this process can load a system library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
