"""With which of UCX's transports a receiver can end what a sender does."""

from __future__ import annotations

COPIED_BY_THE_SENDER = frozenset(
    ("all", "cma", "knem", "posix", "shm", "sm", "sysv", "xpmem")
)
"""UCX's names of transports with which a sender on the same host writes into this
process without its doing, for as long as it lives."""

FENCED_TRANSPORTS = "^cma,knem,posix,sysv,xpmem"
"""All others: their bytes pass through the receiver's own connections, which end
with its agent. Measured with UCX 1.23: after a receiver had destroyed its agent, 57
MB of a sender that was stopped meanwhile landed with cma, and none with tcp."""


def is_fenced(transports: str) -> bool:
    """Return whether bytes reach this process through its own connections alone.

    >>> is_fenced("tcp,self"), is_fenced("cma,tcp"), is_fenced("^cma")
    (True, False, False)

    Args:
        transports: As in UCX_TLS.
    """
    names = {name.strip() for name in transports.lstrip("^").split(",")}
    if transports.startswith("^"):
        excluded = {name.strip() for name in FENCED_TRANSPORTS[1:].split(",")}
        return excluded <= names
    return bool(transports) and not names & COPIED_BY_THE_SENDER
