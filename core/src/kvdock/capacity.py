"""The fill level of the place where a backend keeps pages."""

from __future__ import annotations

import attrs


@attrs.frozen
class Capacity:
    """The fill level of the place where a backend keeps pages.

    Args:
        used_bytes: What its pages take, or what is set aside for them.
        limit_bytes: What they may take, by quota or by free space; 0 where
            that is not known.
        failed_bytes: What could not be written and is set aside: a disk may be
            failing.
        promised_bytes: What is promised to be kept.
        promise_limit_bytes: What may be promised; 0 where nothing may.
    """

    used_bytes: int
    limit_bytes: int = 0
    failed_bytes: int = 0
    promised_bytes: int = 0
    promise_limit_bytes: int = 0
