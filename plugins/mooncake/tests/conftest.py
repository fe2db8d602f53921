"""A real master on loopback, and one pool's handle to play with."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from waiting import until

from kvdock import (
    AttachConfig,
    Batch,
    BatchResult,
    DType,
    Operation,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.errors import KvdockError
from kvdock.pools import Part, Per
from kvdock_mooncake import plugin
from kvdock_mooncake.library import load
from kvdock_mooncake.server import Server, start_master
from kvdock_mooncake.settings import MooncakeSettings

NAMESPACE = "5e" * 32
SEGMENT_BYTES = 64 << 20
LEASE_S = 0.5
DISCARD = "-put_start_discard_timeout_sec=4"
"""Until then a writer that was killed keeps its keys from all other processes."""
PEER = Path(__file__).with_name("peer.py")

_LIBRARY_LINE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ")
_LIBRARY_LINES = 5
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_WAITS_FOR_LEASES = "test_a_page_that_is_forgotten_while_it_is_read_is_right_or_missing"
"""Of the kit; nearly each of its deletions waits for a lease to end."""

Reporting = Generator[None, pytest.TestReport, pytest.TestReport]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow tests what only waits."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.name.startswith(_WAITS_FOR_LEASES):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Cut the library's log out of reports: one line for every key that missed.

    No variable turns it off below ERROR, in this process or in those it starts.
    """
    report = yield
    report.sections = [(title, brief(text)) for title, text in report.sections]
    return report


def brief(text: str) -> str:
    """Return captured output with the last few lines of the library's log."""
    lines = text.splitlines(keepends=True)
    logged = [at for at, line in enumerate(lines) if _LIBRARY_LINE.match(line)]
    cut = set(logged[:-_LIBRARY_LINES])
    if not cut:
        return text
    note = f"({len(cut)} lines of the library's log are left out)\n"
    return note + "".join(line for at, line in enumerate(lines) if at not in cut)


@pytest.fixture(scope="package")
def own_network() -> Iterator[bool]:
    """Move this thread, and all that it starts, into a network of its own.

    Clients listen on every interface without authentication. Where the machine
    does not allow a network namespace, loopback has to do.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            yield False
            return
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            request = struct.pack("16sH14x", b"lo", 0)
            request = fcntl.ioctl(control, _SIOCGIFFLAGS, request)
            flags = struct.unpack_from("16sH", request)[1] | _IFF_UP
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))
        yield True
        libc.setns(before, _CLONE_NEWNET)
    finally:
        os.close(before)


@pytest.fixture(scope="package")
def library(own_network: bool) -> Any:  # noqa: FBT001 - a fixture, not a flag
    """The loaded client library; tests without one are skipped."""
    del own_network
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return load()
    except KvdockError as error:
        pytest.skip(f"{error}")


@attrs.define(eq=False)
class Rig:
    """Memory of equal rows, attached as one pool to a cluster.

    Row i of the memory is what key i writes or reads.
    """

    handle: Any
    memory: npt.NDArray[np.uint8]
    pool: PoolSpec
    namespace: str = NAMESPACE

    def key(self, name: object) -> str:
        digest = hashlib.sha256(str(name).encode()).hexdigest()
        return f"{self.namespace}/{digest}.kv.L0-4"

    def fill(self, seed: int) -> npt.NDArray[np.uint8]:
        """Fill the memory with bytes of a seed; return a copy of them."""
        rng = np.random.default_rng(seed)
        self.memory[:] = rng.integers(0, 256, self.memory.shape, np.uint8)
        return self.memory.copy()

    def batch(
        self,
        operation: Operation,
        names: Sequence[object],
        *,
        cuts: int = 1,
        row_bytes: int = 0,
        within_s: float = 50.0,
    ) -> Batch:
        keys = [self.key(name) for name in names]
        until = time.monotonic() + within_s
        if operation not in (Operation.PUT, Operation.GET):
            return Batch(operation, keys, deadline_s=until)
        size = row_bytes or self.memory.shape[1]
        edges = np.linspace(0, size, cuts + 1).astype(np.int64)
        starts = self.memory.ctypes.data + np.arange(len(keys)) * self.memory.shape[1]
        addresses = starts[:, None] + edges[:-1]
        sizes = np.broadcast_to(np.diff(edges), addresses.shape)
        return Batch(operation, keys, addresses, sizes, until)

    def run(self, operation: Operation, names: Sequence[object], **how: Any) -> Any:
        result = self.handle.run(self.batch(operation, names, **how))
        assert isinstance(result, BatchResult)
        assert result.outcomes.shape == result.nbytes.shape == (len(names),)
        return result

    def put(self, names: Sequence[object], **how: Any) -> list[int]:
        return list(self.run(Operation.PUT, names, **how).outcomes)

    def get(self, names: Sequence[object], **how: Any) -> list[int]:
        return list(self.run(Operation.GET, names, **how).outcomes)

    def exists(self, names: Sequence[object]) -> list[int]:
        return list(self.run(Operation.EXISTS, names).outcomes)

    def delete(self, names: Sequence[object]) -> list[int]:
        return list(self.run(Operation.DELETE, names).outcomes)

    def clear(self, *prefixes: str) -> list[int]:
        batch = Batch(Operation.CLEAR, list(prefixes))
        return list(self.handle.run(batch).outcomes)

    @property
    def store(self) -> Any:
        """The library's own store, to go behind the plugin's back."""
        return self.handle.client._store

    def release(self) -> None:
        self.handle.close()


def attach(
    settings: MooncakeSettings,
    *,
    rows: int = 8,
    row_bytes: int = 64 << 10,
    namespace: str = NAMESPACE,
    **given: Any,
) -> Rig:
    """Attach rows of memory as a pool; `given` are fields of its config."""
    memory = np.zeros((rows, row_bytes), np.uint8)
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MLA,
        parts=(Part("kv", DType.U8, (row_bytes,), per=Per.PAGE),),
        layers=(0,),
        page_tokens=1,
        anchor=True,
    )
    region = Region.of(pool, Shard(), (memory,), rows)
    config = AttachConfig(settings=settings, namespace=namespace, **given)
    handle = plugin.kvdock_register_pool(pool=pool, region=region, config=config)
    return Rig(handle, memory, pool, namespace)


@pytest.fixture(scope="session")
def discard() -> str:
    """The master's flag for how long an unfinished put keeps its keys."""
    return DISCARD


@pytest.fixture(scope="package")
def attached() -> Any:
    """The function that attaches memory, for tests that need their own."""
    return attach


@pytest.fixture(scope="package")
def serve(library: Any) -> Iterator[Callable[..., Server]]:
    """Start masters; what still runs is ended with the package."""
    del library
    started: list[Server] = []

    def start(*options: str, **how: Any) -> Server:
        lease = f"-default_kv_lease_ttl={int(LEASE_S * 1000)}"
        started.append(start_master(lease, DISCARD, *options, **how))
        return started[-1]

    yield start
    for server in started:
        server.process.terminate()
    for server in started:
        server.stop()


@pytest.fixture(scope="package")
def master(serve: Callable[..., Server]) -> Server:
    """A master that the tests of the package share."""
    return serve()


@pytest.fixture(scope="package")
def settings(master: Server) -> MooncakeSettings:
    """Settings of a process that lends a segment to the shared master."""
    return MooncakeSettings(
        master=master.address, segment_bytes=SEGMENT_BYTES, lease_s=LEASE_S
    )


@pytest.fixture
def alone(settings: MooncakeSettings) -> MooncakeSettings:
    """Settings that no other attachment has, for a client of one's own."""
    return attrs.evolve(settings, setup_timeout_s=20 + next(_NUMBERS) / 1024)


_NUMBERS = itertools.count(1)


@pytest.fixture(scope="package")
def rig(settings: MooncakeSettings) -> Iterator[Rig]:
    """A pool of 512 KiB that the tests of the package share."""
    one = attach(settings)
    yield one
    one.release()


@attrs.define(eq=False)
class Peer:
    """Another process of the cluster, with a line for each command."""

    process: subprocess.Popen[str]

    def ask(self, **what: Any) -> Any:
        self.send(**what)
        return self.hear()

    def send(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the peer ended with {self.process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


@pytest.fixture
def start_peer(library: Any) -> Iterator[Callable[..., Peer]]:
    """Start other processes; what still runs is killed with the test."""
    del library
    peers: list[Peer] = []

    def start(environ: dict[str, str] | None = None, **settings: Any) -> Peer:
        process = subprocess.Popen(
            [sys.executable, str(PEER), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | (environ or {}),
        )
        peers.append(Peer(process))
        assert peers[-1].ask(do="ready") == "ready"
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
        for pipe in (peer.process.stdin, peer.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """Poll until something is true, and fail when a time has passed."""
    return until


@pytest.fixture(scope="session")
def freeze(eventually: Callable[..., Any]) -> Callable[[int], None]:
    """Stop a process as if it hung; it goes on with SIGCONT.

    A signal is only a request: threads that run go on for a moment.
    """

    def halted(task: Path) -> bool:
        try:
            return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:  # it has ended meanwhile
            return True

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{pid}/task")
        eventually(lambda: all(map(halted, tasks.iterdir())))

    return stop
