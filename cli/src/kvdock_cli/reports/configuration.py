"""What `kvdock config show` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock_cli.reports.plain import columns, plain

if TYPE_CHECKING:
    from kvdock.configuration import Setting

SCHEMA = "kvdock.config/1"


def as_text(settings: Sequence[Setting], *, origin: bool) -> str:
    """Render the settings as a table."""
    rows = [("SETTING", "VALUE", "ORIGIN", "WHAT")]
    rows += [(one.path, one.value or "-", one.origin, one.help) for one in settings]
    if not origin:
        rows = [(path, value, what, "") for path, value, _, what in rows]
    return "\n".join(columns(rows))


def as_data(settings: Sequence[Setting]) -> dict[str, object]:
    """Describe the settings as data; what is missing is no failure here."""
    return {"schema": SCHEMA, "ok": True, "settings": plain(settings)}
