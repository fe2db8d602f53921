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
    data = os.urandom(min(nbytes, _CHUNK)) * -(-nbytes // _CHUNK)
    view, target = memoryview(data)[:nbytes], bytearray(nbytes)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            for at, move in enumerate((file.write, file.readinto)):
                file.seek(0)
                done, began_s = 0, time.perf_counter()
                memory = (view, memoryview(target))[at]
                while done < nbytes:
                    done += move(memory[done:]) or 0
                times[at].append(time.perf_counter() - began_s)
    return statistics.median(times[0]), statistics.median(times[1])


def network(nbytes: int) -> tuple[float, float]:
    """Send bytes through TCP on loopback.

    Returns:
        Seconds of sending, twice: either direction is the same here.
    """
    data, times = bytes(min(nbytes, _CHUNK)), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(_ROUNDS):
            sender = threading.Thread(
                target=_send, args=(server.getsockname(), data, nbytes), daemon=True
            )
            began_s = time.perf_counter()
            sender.start()
            peer, _ = server.accept()
            with peer:
                left = nbytes
                while left > 0 and (got := peer.recv(_CHUNK)):
                    left -= len(got)
            times.append(time.perf_counter() - began_s)
            sender.join()
    return statistics.median(times), statistics.median(times)


def _send(address: tuple[str, int], data: bytes, nbytes: int) -> None:
    with socket.create_connection(address) as connection:
        for done in range(0, nbytes, len(data)):
            connection.sendall(data[: nbytes - done])
