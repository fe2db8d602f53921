"""Try an I/O engine with a file of its own: for `kvdock doctor`."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvdock_segments.io import IORequest

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray
    from kvdock_segments.io import IOEngine


def try_engine(
    engine: IOEngine, root: Path, memory: ByteArray, within_s: float
) -> bool:
    """Write a page below a root, read it back, and remove its file.

    Args:
        engine: What moves the bytes.
        root: A store's root. Where it is missing, the folder that it would be made in
            is used, which lies in the same file system.
        memory: uint8 (2, n), registered where the engine needs that: the page, and
            where it is read to.
        within_s: How long each of both moves may take.

    Returns:
        Whether the page came back, through the engine and through the file.

    Raises:
        OSError: If a step fails.
    """
    name = f".trial-{secrets.token_hex(8)}"
    memory[0] = np.frombuffer(secrets.token_bytes(memory.shape[1]), np.uint8)
    memory[1] = 0
    place = next(one for one in (root, *root.absolute().parents) if one.exists())
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        token = engine.open_file(name, folder, create=True)
        try:
            engine.preallocate(token, memory.shape[1])
            _move(engine, token, memory[0], within_s, write=True)
            _move(engine, token, memory[1], within_s, write=False)
            stored = (place / name).read_bytes()
        finally:
            engine.close_file(token)
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        os.close(folder)
    return bool(memory[0].tobytes() == memory[1].tobytes() == stored)


def _move(
    engine: IOEngine, token: int, row: ByteArray, within_s: float, *, write: bool
) -> None:
    result = engine.move(
        IORequest(
            write=write,
            files=(token,),
            file_of=np.zeros(1, np.int64),
            offsets=np.zeros(1, np.int64),
            addresses=np.array([[row.ctypes.data]]),
            sizes=np.array([[row.nbytes]]),
            deadline_s=time.monotonic() + within_s,
        )
    )
    if error := int(result.errors[0]):
        raise OSError(error, os.strerror(error))
