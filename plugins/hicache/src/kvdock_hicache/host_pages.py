"""Host memory that a storage class is told of: the stand-in for SGLang's host pool.

Pages are framed in it. A frame says of which key and how long its object is, so that
an answer without bytes, with another's, or with some of them is found out.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import struct
from typing import TYPE_CHECKING, Any

from kvdock.batch import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK = b"kvdockH1"
_HEAD = struct.Struct("<8sQ16s")
HEAD_BYTES = _HEAD.size
_NOTHING = bytes(HEAD_BYTES)
_KEPT_HASH_BYTES = 16

Tensor = Any
"""torch comes with the class, and nothing here is typed by it."""


def class_key(key: str) -> str:
    """Return the name of an object for a class: 64 hex digits, as SGLang's own."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def make_head(name: str, nbytes: int) -> bytes:
    """Return the head of a frame.

    Args:
        name: From `class_key`.
        nbytes: Bytes of the object behind it.
    """
    return _HEAD.pack(_MARK, nbytes, bytes.fromhex(name)[:_KEPT_HASH_BYTES])


def judge_head(head: bytes, name: str, nbytes: int) -> Outcome:
    """Compare the head of a frame with what was asked for."""
    mark, found, digest = _HEAD.unpack(head)
    if mark != _MARK or digest != bytes.fromhex(name)[:_KEPT_HASH_BYTES]:
        return Outcome.CORRUPT
    if found != nbytes:
        return Outcome.SHORT if found < nbytes else Outcome.LONG
    return Outcome.OK


class HostPages:
    """A block of memory with pages of one token, as classes see a host pool.

    One half is for reads and one for writes: SGLang's object has a thread for each.
    Every half is laid out anew for each piece of a batch, by its one caller.

    Source: SGLang 0.5.23, `mem_cache.pool_host`, as storage classes use it.

    Args:
        nbytes: Bytes of both halves together.
        most_rows: Most rows of a half.
    """

    page_size = 1
    layout = "page_first"
    device = "cpu"

    def __init__(self, nbytes: int, most_rows: int) -> None:
        self._torch = importlib.import_module("torch")
        self.dtype = self._torch.uint8
        self.kv_buffer: Tensor = self._torch.empty(nbytes // 2 * 2, dtype=self.dtype)
        self.most_rows = most_rows
        self.half_bytes = nbytes // 2
        self._rows: list[Tensor] = [self.kv_buffer[:0].view(0, 1)] * 2

    def lay(self, half: int, rows: int, row_bytes: int) -> Tensor:
        """Return uint8 (rows, row_bytes), a half in its new layout.

        A row that does not fit has memory of its own, which no index leads to.

        Args:
            half: 0 for reads, 1 for writes.
            rows: `most_rows` at most.
            row_bytes: Bytes of a frame.
        """
        total = rows * row_bytes
        if total > self.half_bytes:
            return self._torch.empty((rows, row_bytes), dtype=self.dtype)
        start = half * self.half_bytes
        laid = self.kv_buffer[start : start + total].view(rows, row_bytes)
        self._rows[half] = laid
        return laid

    def indices(self, half: int, rows: int) -> Tensor:
        """Return the host indices of the first rows of a half, int64 (rows,)."""
        start = half * self.most_rows
        return self._torch.arange(start, start + rows, dtype=self._torch.int64)

    # --- What classes call -------------------------------------------------

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Return address and size of each row."""
        rows = [self._row(int(one)) for one in indices]
        return [row.data_ptr() for row in rows], [row.numel() for row in rows]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:  # noqa: FBT001, FBT002 - SGLang's signature
        """Return a row; it is flat in any case."""
        del flat
        return self._row(int(index))

    def get_dummy_flat_data_page(self) -> Tensor:
        """Return memory for one row that is read."""
        return self._torch.empty(self._rows[0].shape[1], dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        """Fill a row."""
        self._row(int(index)).copy_(data_page.reshape(-1).view(self.dtype))

    def get_ksize_per_token(self) -> int:
        """Return the bytes of a page, which has one token."""
        return int(self._rows[0].shape[1])

    def _row(self, index: int) -> Tensor:
        half, row = divmod(index, self.most_rows)
        return self._rows[half][row]


def blank_heads(rows: Tensor) -> None:
    """Let no row pass for a frame that is not written from now on."""
    for row in rows:
        ctypes.memmove(row.data_ptr(), _NOTHING, HEAD_BYTES)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a class's answer as contiguous bytes, without a copy where it is so."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(importlib.import_module("torch").uint8)


def copy_in(frame: Tensor, head: bytes, pieces: Sequence[tuple[int, int]]) -> None:
    """Write an object with its head into a frame.

    Args:
        frame: uint8 (bytes,).
        head: From `make_head`.
        pieces: Address and size of each piece of the object.
    """
    at = frame.data_ptr()
    ctypes.memmove(at, head, HEAD_BYTES)
    at += HEAD_BYTES
    for address, nbytes in pieces:
        ctypes.memmove(at, address, nbytes)
        at += nbytes


def head_of(frame: Tensor) -> bytes:
    """Return the head of a frame that is at least as long."""
    return ctypes.string_at(frame.data_ptr(), HEAD_BYTES)


def copy_out(frame: Tensor, pieces: Sequence[tuple[int, int]]) -> None:
    """Write the object of a frame to its pieces of memory."""
    at = frame.data_ptr() + HEAD_BYTES
    for address, nbytes in pieces:
        ctypes.memmove(address, at, nbytes)
        at += nbytes
