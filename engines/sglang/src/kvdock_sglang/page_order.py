"""In which order a host pool keeps the bytes of a page.

Sizes and addresses say nothing about it: a release of SGLang that exchanges two
axes inside a page would find the pages of another release and restore wrong
values. So the namespace has a digest of the axes of the pool's memory and of the
code that makes and copies its pages. Another order is a miss.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from typing import TYPE_CHECKING, Any

from kvdock.errors import RegionError
from kvdock_sglang.engine_api import TESTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_USE_TESTED = f"Use SGLang {' or '.join(TESTED)}, which kvdock-sglang was tested with."
_ENGINE = "sglang."
_DIGEST_CHARS = 32


def page_order(
    pool: Any,  # noqa: ANN401 - the engine's object
    memory: Iterable[Any],
    pages: int,
    divided: tuple[int, int] | None = None,
) -> str:
    """Return a digest of how a host pool orders the bytes of a page.

    It is the same for every number of pages and of ranks.

    Args:
        pool: The engine's object, for its size and the code of its class.
        memory: Its tensors.
        pages: Pages that the memory holds.
        divided: The axis that ranks divide, counted from the innermost as in
            Python, and the extent that it must have; None for no such axis.

    Raises:
        RegionError: If the axes of a tensor are not as described, or the code
            of the class cannot be read.
    """
    # An axis counts pages, or the entries of all pages; both vary with the host.
    sized = {int(pool.size): "entries", pages: "pages"}
    found = {
        "memory": [_axes(tensor, sized, divided) for tensor in memory],
        "code": code_of(type(pool)),
    }
    return _digest(json.dumps(found, sort_keys=True))


def _axes(
    tensor: Any,  # noqa: ANN401 - a tensor
    sized: Mapping[int, str],
    divided: tuple[int, int] | None,
) -> dict[str, object]:
    """Describe a tensor's axes, however many pages and ranks there are."""
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    # A dense tensor of another order of axes has strides that do not descend.
    dense = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for extent, stride, expected in zip(shape, strides, dense, strict=True):
        if extent > 1 and stride != expected:
            raise RegionError(
                f"host memory of shape {shape} has strides {strides}, not {dense}",
                fix=_USE_TESTED,
            )
    words: list[object] = [sized.get(extent, extent) for extent in shape]
    if divided is not None:
        axis, extent = divided
        if len(shape) < -axis or shape[axis] != extent:
            raise RegionError(
                f"axis {axis} of host memory of shape {shape} has not the {extent} "
                "heads of this rank",
                fix=_USE_TESTED,
            )
        words[axis] = "divided"
    return {"dtype": str(tensor.dtype), "shape": words}


def code_of(cls: type) -> str:
    """Return a digest of the code of a host pool's class and of its bases.

    Raises:
        RegionError: If a class has no source text.
    """
    of_engine = [one for one in cls.__mro__ if one.__module__.startswith(_ENGINE)]
    return _digest("\n".join(map(_source, of_engine)))


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError) as error:
        raise RegionError(
            f"the code of {cls.__module__}.{cls.__qualname__} cannot be read "
            f"({error}), so the order of bytes in its pages is not known",
            fix="Install SGLang with its source files.",
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
