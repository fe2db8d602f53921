"""The example over Redis holds the contract, and its server is taken away.

The server is `fakeredis`, a fake that speaks the protocol of Redis to the real client:
what it says about the plugin holds for the plugin, not for how Redis behaves.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from repeated import OF_RANKS

from kvdock.testing import BackendContract, Oracle

pytest.importorskip("redis")
pytest.importorskip("fakeredis")

SERVE = """
import sys
from fakeredis import TcpFakeServer
TcpFakeServer.allow_reuse_address = True
TcpFakeServer.daemon_threads = True
with TcpFakeServer(("127.0.0.1", int(sys.argv[1])), server_type="redis") as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


class Server(Oracle):
    """A server in a process of its own, which can freeze, and end and come back."""

    def __init__(self):
        self.port = 0
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.port = int(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    @contextmanager
    def frozen(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    @contextmanager
    def stopped(self):
        self.end()
        try:
            yield
        finally:
            self.start()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.end()


@pytest.mark.slow
@pytest.mark.repeats(*OF_RANKS)
class TestRedis(BackendContract):
    plugin = "kvdock_redis_example.plugin"
    tidy = True
    # The fake is written in Python.
    scale = 5.0
    large_objects = False

    @pytest.fixture
    def config(self, server):
        return {"url": f"redis://127.0.0.1:{server.port}/0"}

    @pytest.fixture
    def oracle(self, server):
        return server
