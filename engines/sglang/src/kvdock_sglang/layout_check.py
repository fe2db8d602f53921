"""Compare a described pool with the addresses that the engine reports.

A description that is wrong by one stride would store other bytes than it
promises. So before a pool is used, the addresses of its first and last page are
read from the engine too, and must cover the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdock.errors import RegionError
from kvdock_sglang.engine_api import TESTED
from kvdock_sglang.host_pools import HostPool, class_name

if TYPE_CHECKING:
    from collections.abc import Iterable

Span = tuple[int, int]
"""First byte and the byte past the last, as addresses."""


def check(described: HostPool, pool: Any) -> None:  # noqa: ANN401 - the engine's object
    """Compare two pages of a description with the engine's own account.

    Raises:
        RegionError: If they do not cover the same memory.
    """
    if not described.spec.physical:
        return
    last = int(pool.size) // int(pool.page_size) - 1
    for page in sorted({0, last}):
        addresses, sizes = described.region.addresses([page])
        mine = _joined(
            zip(
                addresses.ravel().tolist(),
                (addresses + sizes).ravel().tolist(),
                strict=True,
            )
        )
        theirs = _joined(_reported(described, pool, page))
        if mine != theirs:
            raise RegionError(
                f"host pool {described.name!r} ({class_name(pool)}): page {page} lies "
                f"at {_shown(theirs)} according to SGLang, at {_shown(mine)} "
                "according to kvdock",
                fix="This SGLang lays the pool out in another way than "
                f"{' or '.join(TESTED)}, which kvdock-sglang was tested with.",
            )


def _reported(described: HostPool, pool: Any, page: int) -> Iterable[Span]:  # noqa: ANN401 - the engine's object
    import torch  # noqa: PLC0415 - where there is an engine, there is torch

    slots = described.page_slots
    indices = torch.arange(page * slots, (page + 1) * slots, dtype=torch.int64)
    try:
        pointers, sizes = pool.get_page_buffer_meta(indices)
    except (ValueError, NotImplementedError):
        # Some classes report addresses of some layouts only; all can show a
        # page as a view of their memory.
        return _view_spans(pool.get_data_page(page * slots, flat=False))
    return [(int(at), int(at) + int(n)) for at, n in zip(pointers, sizes, strict=True)]


def _view_spans(view: Any) -> list[Span]:  # noqa: ANN401 - a tensor
    """Return the runs of memory that a strided view covers."""
    run = view.element_size()
    axes = list(zip(view.shape, view.stride(), strict=True))
    while axes and (axes[-1][0] == 1 or axes[-1][1] * view.element_size() == run):
        run *= axes.pop()[0]
    offsets = [0]
    for extent, stride in axes:
        step = stride * view.element_size()
        offsets = [at + n * step for at in offsets for n in range(extent)]
    return [(view.data_ptr() + at, view.data_ptr() + at + run) for at in offsets]


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _shown(spans: list[Span]) -> str:
    first = ", ".join(f"{start:#x}+{stop - start}" for start, stop in spans[:2])
    return first + (f" and {len(spans) - 2} more" if len(spans) > 2 else "")  # noqa: PLR2004 - as shown
