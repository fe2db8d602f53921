"""The one tree of errors that kvdock raises.

A message says what is wrong, where, why, and what to do next. Storage that
fails while an engine runs raises nothing: that is a miss with an outcome.
"""

from __future__ import annotations

from collections.abc import Iterable


class KvdockError(Exception):
    """Root of every error that kvdock raises on purpose.

    Args:
        what: What is wrong and where, as one sentence without a full stop.
        fix: What the reader can do about it; shown after the sentence.
    """

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        """Render the sentence and the way out."""
        return f"{self.what}. {self.fix}" if self.fix else self.what


class PoolError(KvdockError):
    """A pool description contradicts itself or the shard it is used with."""


class UnknownValueError(PoolError, ValueError):
    """A word is not in a closed list; a ValueError too, as enums promise."""


class RegionError(KvdockError):
    """Host memory does not fit a pool, or a page index lies outside of it."""


class BatchError(KvdockError):
    """A batch, or a plugin's answer to one, breaks the contract."""


class ManifestError(KvdockError):
    """A plugin declares something impossible."""


class SettingsError(KvdockError):
    """A setting is unknown, missing or of the wrong kind."""


class NamespaceError(KvdockError):
    """A stored namespace is not the one that its name promises."""


class PluginError(KvdockError):
    """A plugin that was asked for cannot be used."""


class NoRoute(KvdockError):  # noqa: N818 - the field's word, not "NoRouteError"
    """Raised where no installed backend takes a required pool.

    What is wrong is a table, so the way out has a line of its own.

    Args:
        plan: The plan with every backend's answer, for another rendering.
    """

    def __init__(self, what: str, *, fix: str = "", plan: object = None) -> None:
        super().__init__(what, fix=fix)
        self.plan = plan

    def __str__(self) -> str:
        """Render the table and the way out."""
        return f"{self.what.rstrip()}\n{self.fix}".rstrip()


class AttachError(KvdockError):
    """A backend refused a pool when memory was to be attached."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a "did you mean" sentence for a misspelled word, or ""."""
    import difflib  # noqa: PLC0415 - only a misspelled word needs it

    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
