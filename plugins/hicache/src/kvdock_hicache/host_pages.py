"""Host memory that a storage class is told of: the stand-in for SGLang's host pool.

Source: SGLang 0.5.23, `mem_cache.pool_host`, as storage classes use it.
"""

from __future__ import annotations

import importlib
import struct
from typing import Any

HEAD_BYTES = 32
"""What stands before each object: see `make_head`."""

Tensor = Any
"""torch comes with the class, and nothing here is typed by it."""


def make_head(name: str, nbytes: int) -> bytes:
    """Return what stands before an object: a mark, its length, part of its name.

    It finds out an answer without bytes, and an object of another name or length,
    which several classes cut to the length that they are asked for.

    Args:
        name: 64 hex digits.
        nbytes: Bytes of the object.
    """
    return struct.pack("<8sQ16s", b"kvdockH1", nbytes, bytes.fromhex(name[:32]))


class HostPages:
    """A block of memory with pages of one token, as classes see a host pool.

    One half is for reads and one for writes. Each is laid out anew for each piece of
    a batch, by its one caller.

    Args:
        nbytes: Bytes of both halves together.
        most_rows: Most rows of a half.
    """

    page_size = 1
    layout = "page_first"
    device = "cpu"

    def __init__(self, nbytes: int, most_rows: int) -> None:
        self.torch = importlib.import_module("torch")
        self.dtype = self.torch.uint8
        self.half_bytes = nbytes // 2
        self.kv_buffer: Tensor = self.torch.empty(nbytes, dtype=self.dtype)
        self._most_rows = most_rows
        self._halves: list[Tensor] = [None, None]

    def lay(self, half: int, rows: int, row_bytes: int) -> tuple[Tensor, Tensor]:
        """Return a half in its new layout, and the host indices of its rows.

        A row that does not fit has memory of its own, which classes know no address
        of. The heads are blank.

        Args:
            half: 0 for reads, 1 for writes.
            rows: `most_rows` at most.
            row_bytes: Bytes of a row, head included.
        """
        start = half * self.half_bytes
        total = rows * row_bytes
        memory = self.kv_buffer[start : start + total]
        if total > self.half_bytes:
            memory = self.torch.empty(total, dtype=self.dtype)
        laid = self._halves[half] = memory.view(rows, row_bytes)
        laid[:, :HEAD_BYTES] = 0
        first = half * self._most_rows
        return laid, self.torch.arange(first, first + rows, dtype=self.torch.int64)

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Return address and size of each row."""
        rows = [self.get_data_page(one) for one in indices]
        return [row.data_ptr() for row in rows], [row.numel() for row in rows]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:  # noqa: ARG002, FBT001, FBT002 - SGLang's signature
        """Return a row; it is flat in any case."""
        half, row = divmod(int(index), self._most_rows)
        return self._halves[half][row]

    def get_dummy_flat_data_page(self) -> Tensor:
        """Return memory for one row that is read."""
        return self.torch.empty_like(self._halves[0][0])

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        """Fill a row."""
        self.get_data_page(index).copy_(data_page)
