"""Public names that load when they are first used.

`import kvdock` costs next to nothing, and a listing of plugins never imports
numpy: a package lists its names for type checkers alone, and a name's module is
imported with its first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make what a package needs to load its public names on first use.

    They are the imports `from MODULE import NAME as NAME` in the package's own source,
    under `if TYPE_CHECKING:`. A second list of them would have to be kept equal.

    Returns:
        The package's `__getattr__`, `__dir__` and `__all__`.
    """
    home = _homes(package)
    public = sorted(home)

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: public, public


def _homes(package: str) -> dict[str, str]:
    """Return the modules of a package's names, by name."""
    loader: Any = sys.modules[package].__loader__
    source: str | None = loader.get_source(package)
    if source is None:
        raise ImportError(f"{package} is installed without its source, which it reads")
    # A long import stands in brackets. Without `re`, which takes 5 ms to import.
    words = source.replace("(", " ").split()
    return {
        words[at - 1]: words[at - 3]
        for at, word in enumerate(words)
        if word == "as" and words[at - 4] == "from"
    }
