"""Pages in segment files: one index and layout, exchangeable I/O engines.

For backends that keep bytes in files. Loaded only by plugins that ask for it
(`pip install kvdock[segments]`); nothing else of the core imports it.
"""

from kvdock.segments.io import Engine, Moved, Transfer
from kvdock.segments.limits import Limits, Place
from kvdock.segments.ownership import Tenure
from kvdock.segments.posix_io import ThreadEngine
from kvdock.segments.store import SegmentStore, Usage

__all__ = [
    "Engine",
    "Limits",
    "Moved",
    "Place",
    "SegmentStore",
    "Tenure",
    "ThreadEngine",
    "Transfer",
    "Usage",
]
