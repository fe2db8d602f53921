"""A package's names are those that it imports for type checkers."""

from __future__ import annotations

import importlib
import py_compile
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = '''
"""As many words as a docstring has."""

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from PACKAGE.deep import one as one
    from PACKAGE.deep import (
        another as another,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)
'''


def make(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE.replace("PACKAGE", name))
    (package / "deep.py").write_text("one, another, hidden = 1, 2, 3\n")
    monkeypatch.syspath_prepend(str(folder))
    return package


def test_a_name_is_loaded_with_its_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "lazy_one", monkeypatch)
    package = importlib.import_module("lazy_one")
    assert package.__all__ == dir(package) == ["another", "one"]
    assert "lazy_one.deep" not in sys.modules
    assert (package.one, package.another) == (1, 2)
    assert "lazy_one.deep" in sys.modules
    with pytest.raises(AttributeError, match="'lazy_one' has no attribute 'hidden'"):
        _ = package.hidden


def test_a_package_without_its_source_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make(tmp_path, "lazy_two", monkeypatch)
    source = package / "__init__.py"
    py_compile.compile(str(source), str(package / "__init__.pyc"), doraise=True)
    source.unlink()
    with pytest.raises(ImportError, match="lazy_two is installed without its source"):
        importlib.import_module("lazy_two")
