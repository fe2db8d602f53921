"""The order in which a host pool keeps the bytes of a page.

Sizes and addresses say nothing about it: a release of SGLang that exchanges two
axes inside a page would find the pages of another release and restore wrong
values. So the namespace has a digest of the axes of the pool's memory.

Axes that are equally long can be exchanged without a trace in them. That the code
which makes and copies pages does not do so was probed for the classes as they are
in the tested releases: known values were moved through each of them and looked for
in the page as storage sees it (`tests/engine/test_page_probe.py`). Their digests
are in `tested_pools.toml`. Code that is not there counts too, so its pages are kept
apart.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import logging
import math
import textwrap
import tokenize
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from kvdock import Layout
from kvdock.errors import RegionError
from kvdock_sglang.engine_api import TESTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

log = logging.getLogger("kvdock.sglang")

_USE_TESTED = f"Use SGLang {' or '.join(TESTED)}, which kvdock-sglang was tested with."
_ENGINE = "sglang."
PROBED_CODE: Mapping[str, Sequence[str]] = MappingProxyType(
    tomllib.loads(
        Path(__file__).with_name("tested_pools.toml").read_text(encoding="utf-8")
    )
)
"""Class to digests of its code, one for each way in which a release wrote it."""

_DIGEST_CHARS = 32

_NEUTRAL_METHODS = frozenset(
    {
        "alloc",
        "available_size",
        "clear",
        "destroy",
        "free",
        "get_contiguous_buf_infos",
        "get_ksize_per_token",
        "get_size_per_token",
        "is_stride_page_aligned",
        "logical_page_size",
        "logical_size",
        "_merge_release_slots",
    }
)
"""Methods that count slots and bytes, and neither write nor read a page."""


def page_order(
    pool: Any,  # noqa: ANN401 - the engine's object
    memory: Iterable[Any],
    pages: int,
    divided: tuple[int, int] | None = None,
) -> str:
    """Return a digest of how a host pool orders the bytes of a page.

    It is the same for every number of pages and of ranks, for every release whose code
    was probed, and for layouts that differ only in what lies between two pages.
    `divided` is the axis that ranks divide, counted from the innermost as in Python,
    and the extent that it must have; None for no such axis.

    Raises:
        RegionError: If the axes of a tensor are not as described, or the code
            of the class cannot be read.
    """
    # An axis counts pages, or the entries of all pages; both vary with the host.
    sized = {int(pool.size): "entries", pages: "pages"}
    axes = [_axes(tensor, sized, divided) for tensor in memory]
    if str(pool.layout) == Layout.LAYER_FIRST:
        axes = [_page_by_page(one, int(pool.page_size)) for one in axes]
    found: dict[str, object] = {"memory": axes}
    if unprobed := unprobed_code(type(pool)):
        found["code"] = unprobed
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


def _page_by_page(axes: Mapping[str, object], page_slots: int) -> dict[str, object]:
    """Describe layers that each hold all pages as pages that each hold all layers.

    Storage gets the same bytes of both: those of a page, layer after layer.
    """
    words = list(cast("list[object]", axes["shape"]))
    if "entries" in words[1:]:
        layer = words.index("entries") - 1
        words[layer : layer + 2] = ["pages", words[layer], page_slots]
    return {**axes, "shape": words}


def unprobed_code(cls: type) -> str:
    """Return a digest of a host pool's code where it was never probed, else ""."""
    name, found = f"{cls.__module__}.{cls.__qualname__}", code_of(cls)
    if found in PROBED_CODE.get(name, ()):
        return ""
    log.warning(
        "the code of %s is not that of a tested release (%s), so its pages are kept "
        "apart",
        name,
        ", ".join(TESTED),
    )
    return found


def code_of(cls: type) -> str:
    """Return a digest of the code that makes and copies the pages of a class.

    Blanks, comments and docstrings do not count, nor do methods that only count
    slots.
    """
    of_engine = [one for one in cls.__mro__ if one.__module__.startswith(_ENGINE)]
    return _digest("\n".join(_plain_code(_source(one)) for one in of_engine))


def code_of_method(method: Callable[..., Any]) -> str:
    """Return a digest of one method; for reports on another release."""
    return _digest(_plain_code(inspect.getsource(method)))


@cache
def _plain_code(source: str) -> str:
    """Return what a class does, in one line without blanks."""
    source = textwrap.dedent(source)
    lines = source.splitlines()
    hidden = [range(at, end) for at, end in _neutral_lines(source)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [
        line
        for number, line in enumerate(lines, 1)
        if not any(number in one for one in hidden)
    ]
    return "".join("".join(kept).split())


def _neutral_lines(source: str) -> Iterator[tuple[int, int]]:
    """Yield from which line to before which docstrings and neutral methods reach."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        if node.name in _NEUTRAL_METHODS:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield first, (node.end_lineno or first) + 1
        if ast.get_docstring(node) is not None:
            text = node.body[0]
            yield text.lineno, (text.end_lineno or text.lineno) + 1


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
