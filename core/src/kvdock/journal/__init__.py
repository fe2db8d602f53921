"""A journal of what storage answered, page by page, and why pages were missed.

`kvdock.journal.observer` writes it, in an engine; `read_journal` reads it, and
`explain` says for each pool of a request what was there, what was not, and why.
"""

from kvdock.journal.causes import Cause, PoolAnswer, RequestAnswer, explain, requests
from kvdock.journal.records import JournalRecord, read_journal

__all__ = (
    "Cause",
    "JournalRecord",
    "PoolAnswer",
    "RequestAnswer",
    "explain",
    "read_journal",
    "requests",
)
