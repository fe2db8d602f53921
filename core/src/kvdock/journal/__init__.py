"""A journal of what storage answered, page by page, and why pages were missed.

`kvdock.journal.observer` writes it, in an engine; `read_journal` reads it, and
`explain` says for each pool of a request what was there, what was not, and why.
`explain_stored` says as much as a store shows by itself.
"""

from kvdock.journal.causes import (
    Cause,
    PoolAnswer,
    RequestAnswer,
    explain,
    explain_prompt,
    requests,
)
from kvdock.journal.observer import Journal, JournalSettings
from kvdock.journal.records import JournalRecord, read_journal
from kvdock.journal.stored import explain_stored

__all__ = (
    "Cause",
    "Journal",
    "JournalRecord",
    "JournalSettings",
    "PoolAnswer",
    "RequestAnswer",
    "explain",
    "explain_prompt",
    "explain_stored",
    "read_journal",
    "requests",
)
