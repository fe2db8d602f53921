"""How much of one kind may hang, and still be bounded after forgiving.

A call that hangs for ever must not keep out a backend that works again, so a
sign of life makes room although nothing has ended. Its thread remains, so
that can be done so many times only.
"""

from __future__ import annotations

_LIVES = 4
"""So many times its size a room may hold, when what hung was forgiven."""


class Room:
    """How many calls of one kind may run while nobody waits for them.

    Each kind has a room of its own: one that hangs leaves the others theirs.
    Only a crew enters and leaves it, under its lock.

    Args:
        most: Calls at once, besides those that were forgiven.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self._forgiven = 0

    @property
    def full(self) -> bool:
        """Whether no more are started."""
        return self.taken - self._forgiven >= self.most

    @property
    def spent(self) -> bool:
        """Whether it is full until a call ends, whatever else happens."""
        return self.taken >= _LIVES * self.most

    def forgive(self) -> None:
        """Make room although nothing has ended, within limits."""
        self._forgiven = min(self.taken, (_LIVES - 1) * self.most)

    def enter(self) -> None:
        """Count one more."""
        self.taken += 1

    def exit(self) -> None:
        """Count one less."""
        self.taken -= 1
        self._forgiven = min(self._forgiven, self.taken)
