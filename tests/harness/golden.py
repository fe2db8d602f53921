"""Reports beside texts that were read once: a change of one is what people see.

With TESTS_OF_KVDOCK_GOLDEN=write in the environment they are written anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from widths import WIDTHS, check_fits

from kvdock_cli.reports._style import Style

if TYPE_CHECKING:
    from kvdock_cli.reports._report import Report


def check_text(path: Path, shown: str) -> None:
    """Compare a text with the one in a file."""
    if os.environ.get("TESTS_OF_KVDOCK_GOLDEN") == "write":
        path.write_text(shown + "\n")
        pytest.fail(f"wrote {path.name}; read what git says of it")
    assert shown + "\n" == path.read_text()


def check_report(path: Path, report: Report) -> None:
    """Compare a report with the one in a file, and see that it fits terminals."""
    whole = report.text()
    check_text(path, whole)
    for width in WIDTHS:
        check_fits(whole, report.text(Style(width)), width)
