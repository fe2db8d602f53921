# ruff: noqa: ANN401 - LMCache's own objects
"""LMCache's objects as pages: what they are, where they lie, what they are called.

An object is one chunk of one object group of one rank. All objects of one model with
the same tensors are a pool, whose memory is LMCache's first level as a whole: a page
begins at each multiple of its alignment, so that no object is copied.

Source: LMCache 0.5.6, `v1/distributed/api.py` and `v1/memory_management.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from importlib.metadata import version
from operator import mul
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock import Block, DType, Layout, Namespace, PoolKind, PoolSpec, Region, Shard
from kvdock.errors import AttachError
from kvdock.pools import Part, Per, RowLayout

if TYPE_CHECKING:
    from kvdock_lmcache.settings import AdapterSettings

POOL = "kv"
LEAST_STRIDE = 64
"""LMCache aligns objects to 4 KiB; with less, a table of pages would be too large."""


@attrs.frozen
class Form:
    """What LMCache knows of the objects of a pool."""

    model: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int

    @classmethod
    def of_object(cls, key: Any, memory: Any) -> Form:
        """Return the form of an object in memory."""
        meta = memory.metadata
        shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
        nbytes = int(memory.get_size())
        return cls(key.model_name, _plain(shapes), tuple(map(str, dtypes)), nbytes)

    @classmethod
    def of_layout(cls, key: Any, layout: Any) -> Form | None:
        """Return the form that a lookup expects; None if LMCache does not say."""
        if layout is None or not layout.shapes:
            return None
        shapes, dtypes = _plain(layout.shapes), layout.dtypes
        nbytes = sum(map(mul, map(math.prod, shapes), (one.itemsize for one in dtypes)))
        return cls(key.model_name, shapes, tuple(map(str, dtypes)), nbytes)

    @property
    def pool(self) -> PoolSpec:
        """The pool: opaque bytes, since LMCache does not say what they are."""
        part = Part("object", DType.U8, (self.nbytes,), Per.PAGE)
        return PoolSpec(
            name=POOL,
            kind=PoolKind.MHA,
            layers=(0,),
            page_tokens=1,
            parts=(part,),
            layout=Layout.PAGE_OBJECT,
            engine_hits=True,
        )

    def namespace(self, own: AdapterSettings) -> Namespace:
        """Return what the bytes belong to: all that is known, and what users add."""
        release = re.match(r"\d+\.\d+", version("lmcache"))
        known = {
            "engine": "lmcache",
            "release": release.group() if release else "",
            "shapes": self.shapes,
            "dtypes": self.dtypes,
            "page_format": own.page_format,
        }
        return Namespace(
            model=self.model,
            revision=own.revision,
            lora=own.lora,
            salt=own.salt,
            page_format=json.dumps(known, sort_keys=True),
        )


@attrs.frozen
class Arena:
    """The memory of LMCache's first level.

    Args:
        stride: Bytes from a page to the next; objects begin at its multiples.
    """

    address: int
    nbytes: int
    stride: int

    @classmethod
    def of(cls, described: Any) -> Arena:
        """Read LMCache's description."""
        if described is None:
            raise AttachError(
                "LMCache's first level has no memory on the host",
                fix="Use its memory in DRAM, and not on a device.",
            )
        stride = max(int(described.align_bytes), LEAST_STRIDE)
        return cls(int(described.ptr), int(described.size), stride)

    def region(self, form: Form) -> Region:
        """Return this memory as overlapping pages of one size."""
        pages = (self.nbytes - form.nbytes) // self.stride + 1
        block = Block(self.address, self.nbytes)
        rows = RowLayout(row_bytes=form.nbytes, pieces=((0, form.nbytes),))
        one = Region.of_rows(form.pool, Shard(), block, 1, rows)
        return attrs.evolve(one, pages=pages, strides=np.array([[self.stride]]))

    def page(self, memory: Any) -> int:
        """Return the page where an object lies; -1 if it lies elsewhere."""
        start = int(memory.data_ptr) - self.address
        inside = 0 <= start <= self.nbytes - int(memory.get_size())
        return -1 if not inside or start % self.stride else start // self.stride


def _plain(shapes: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, shape)) for shape in shapes)


def page_hash(key: Any) -> str:
    """Return the name of an object among those of its form, in hex."""
    parts = (key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
