"""The limits of this machine without a backend: its disk, or its network stack."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

_ROUNDS = 3
_CHUNK = 1 << 20


def disk(folder: Path, nbytes: int) -> tuple[float, float]:
    """Write a file and read it back, as backends do: through the page cache.

    Returns:
        Seconds of writing and of reading, each the median of three.
    """
    place = next(
        one
        for one in (folder.absolute(), *folder.absolute().parents)
        if os.access(one, os.F_OK)
    )
    data = memoryview(os.urandom(min(nbytes, _CHUNK)) * -(-nbytes // _CHUNK))[:nbytes]
    memory = bytearray(nbytes)
    write_s, read_s = [], []
    for _ in range(_ROUNDS):
        with tempfile.TemporaryFile(dir=place) as file:
            began_s = time.perf_counter()
            file.write(data)
            file.flush()
            write_s.append(time.perf_counter() - began_s)
            file.seek(0)
            began_s = time.perf_counter()
            file.readinto(memory)
            read_s.append(time.perf_counter() - began_s)
    return statistics.median(write_s), statistics.median(read_s)


def network(nbytes: int) -> tuple[float, float]:
    """Send bytes through TCP on loopback.

    Returns:
        Seconds of sending, twice: either direction is the same here.
    """
    data, memory, times = bytes(nbytes), bytearray(nbytes), []
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        for _ in range(_ROUNDS):
            sender = threading.Thread(target=near.sendall, args=(data,), daemon=True)
            began_s = time.perf_counter()
            sender.start()
            far.recv_into(memory, nbytes, socket.MSG_WAITALL)
            times.append(time.perf_counter() - began_s)
            sender.join()
    return statistics.median(times), statistics.median(times)
