"""Settings of the file backend."""

from __future__ import annotations

from pathlib import Path

import attrs

from kvdock.settings import option


@attrs.frozen
class FileSettings:
    """Where and how the file backend keeps pages."""

    root: Path = option(help="Directory that holds the store; created if missing.")
