"""Choice: the prefix whose loading, with computing the rest, takes the least."""

from __future__ import annotations

import numpy as np

from kvdock.arrays import BoolArray, FloatArray


def costs(
    load_s: FloatArray, compute_s: FloatArray, wait_s: float = 0.0, margin: float = 0.0
) -> FloatArray:
    """Return what each prefix costs until the first token, float64 (n + 1,).

    Args:
        load_s: Seconds to load the first p pages, p = 0 to n.
        compute_s: Seconds to compute from p pages on to the end of the prompt.
        wait_s: Seconds until a load that begins now has its turn.
        margin: Share of a load that is added for what is not known.
    """
    load = load_s + np.where(load_s > 0, wait_s, 0.0)
    total: FloatArray = load * (1 + margin) + compute_s
    return total


def cheapest(restorable: BoolArray, cost_s: FloatArray) -> int:
    """Return the pages of the cheapest restorable prefix; of equals the longest.

    Args:
        restorable: bool (n + 1,), as `Hits` has it; entry 0 is true.
        cost_s: As `costs` returns it.
    """
    allowed = np.where(restorable, cost_s, np.inf)
    return len(allowed) - 1 - int(allowed[::-1].argmin())
