"""Public names that load when they are first used.

`import kvdock` costs next to nothing, and a listing of plugins never imports
numpy: a package lists its names here, and a name's module is imported with it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make what a package needs to load its public names on first use.

    Args:
        package: The package's name.
        homes: Module, relative to the package, to the names that it defines.

    Returns:
        The package's `__getattr__`, `__dir__` and `__all__`.
    """
    home = {name: module for module, names in homes.items() for name in names}
    public = sorted(home)

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: public, public
