"""Pages in segment files: one index and layout, exchangeable I/O engines.

For backends that keep bytes in files. Loaded only by plugins that ask for it
(`pip install kvdock[segments]`); nothing else of the core imports it.
"""

from kvdock.segments.engine import Engine, Moved, Transfer
from kvdock.segments.limits import Limits
from kvdock.segments.place import Place
from kvdock.segments.store import SegmentStore, Usage
from kvdock.segments.tenure import Tenure
from kvdock.segments.threads import ThreadEngine

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
