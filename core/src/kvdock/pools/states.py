"""Parts of recurrent states: how their axes divide into heads."""

from __future__ import annotations

from collections.abc import Sequence

from kvdock.errors import PoolError
from kvdock.pools.enums import DType, Per
from kvdock.pools.part import Part

State = tuple[str, DType, tuple[int, ...]]
"""Name, element type and shape over all ranks, divided along the first axis."""


def state_parts(
    pool: str,
    states: Sequence[State],
    heads: int = 0,
    conv_channels: Sequence[Sequence[int]] = (),
) -> list[Part]:
    """Return the parts of a recurrent state.

    Args:
        pool: The pool's name, for messages.
        states: The states; those named `conv_0`, `conv_1` ... are convolutions.
        heads: Into how many equal runs ranks divide the first axis of each
            state; 0 where each rank keeps one state.
        conv_channels: For each convolution the channels of its fused
            projections, in order; a rank holds its run of each.

    Raises:
        PoolError: If heads do not divide a state, or the channels of a
            convolution do not add up.
    """
    if not heads:
        return [Part(*state, Per.PAGE, 0) for state in states]
    fused = {f"conv_{n}": channels for n, channels in enumerate(conv_channels)}
    parts = []
    for name, dtype, (width, *rest) in states:
        channels = fused.get(name, (width,))
        if sum(channels) != width:
            raise PoolError(
                f"pool {pool!r}: channels {list(channels)} of {name} do not add up to "
                f"{width}"
            )
        names = [name]
        if len(channels) > 1:
            names = [f"{name}_{n}" for n in range(len(channels))]
        for part, count in zip(names, channels, strict=True):
            if count % heads:
                raise PoolError(
                    f"pool {pool!r}: {heads} heads do not divide the {count} rows of "
                    f"{part}"
                )
            shape = (heads, count // heads, *rest)
            parts.append(Part(part, dtype, shape, Per.PAGE, 0))
    return parts
