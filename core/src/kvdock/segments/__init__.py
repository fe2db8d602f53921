"""Pages in segment files: one index and layout, exchangeable I/O engines.

For backends that keep bytes in files. Loaded only by plugins that ask for it
(`pip install kvdock[segments]`); nothing else of the core imports it.
"""

from kvdock.segments.io import IOEngine, IORequest, IOResult
from kvdock.segments.limits import StoreLimits, StoreLocation
from kvdock.segments.ownership import WriterLiveness
from kvdock.segments.posix_io import PosixIOEngine
from kvdock.segments.store import SegmentStore, Usage

__all__ = [
    "IOEngine",
    "IORequest",
    "IOResult",
    "PosixIOEngine",
    "SegmentStore",
    "StoreLimits",
    "StoreLocation",
    "Usage",
    "WriterLiveness",
]
