"""A second process with the same plugin and the same settings.

Started with `python -m kvdock.testing.workers`; it takes commands as JSON over
a connection. A failed assertion there is raised here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.pools.shard import Shard
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.loading import load_backend
from kvdock.testing.samples import Sample
from kvdock.testing.scale import Scale

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ANSWER_S = 60.0
"""How long an answer may take before the other process counts as hung."""


class WorkerDied(AssertionError):  # noqa: N818 - says what happened
    """The other process ended, or hung, instead of answering."""


@attrs.define(eq=False)
class Worker:
    """The handle of a worker process."""

    process: subprocess.Popen[bytes]
    link: Connection
    patience_s: float = ANSWER_S

    @classmethod
    def start(cls, harness: Harness, *, hash_seed: int = 0) -> Worker:
        """Start a process with a harness like this one.

        `hash_seed` is Python's, to find keys that depend on the order of a set.
        """
        path = os.pathsep.join(filter(None, sys.path))
        link, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
                [sys.executable, "-m", "kvdock.testing.workers", str(number)],
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path},
            )
        worker = cls(process, link, harness.scale.seconds(ANSWER_S))
        settings = dict(harness.settings)
        worker.ask(
            "load",
            plugin=harness.plugin,
            settings=settings,
            salt=harness.salt,
            scale=harness.scale.factor,
        )
        return worker

    def send(self, do: str, **words: object) -> None:
        """Send a command without waiting for the answer."""
        # Paths and sizes have a spelling; a list or a null is not its own repr.
        message = json.dumps({"do": do, **words}, default=str).encode()
        with contextlib.suppress(BrokenPipeError):
            self.link.send_bytes(message)

    def answer(self) -> Any:  # noqa: ANN401 - whatever the command returns
        """Wait for the next answer."""
        if not self.link.poll(self.patience_s):
            self.kill()
            raise WorkerDied(
                f"no answer from another process in {self.patience_s:.0f} s"
            )
        try:
            found = json.loads(self.link.recv_bytes())
        except (EOFError, ConnectionResetError):
            status = self.process.wait()
            raise WorkerDied(
                f"another process died with exit status {status}"
            ) from None
        if "error" in found:
            raise AssertionError(f"in another process:\n{found['error']}")
        return found["ok"]

    def ask(self, do: str, **words: object) -> Any:  # noqa: ANN401 - as `answer`
        """Send a command and return the answer."""
        self.send(do, **words)
        return self.answer()

    def attach(
        self, sample: Sample, shard: Mapping[str, int] | None = None, model: str = ""
    ) -> None:
        """Attach a sample pool in the other process."""
        self.ask(
            "attach",
            sample=sample.words(),
            shard=dict(shard or {}),
            model=model or "model-a",
        )

    def kill(self) -> None:
        """End it with SIGKILL and collect it."""
        self.process.kill()
        self.process.wait()
        self.link.close()

    def end(self) -> None:
        """Let it release and end by itself; kill it if it does not."""
        self.send("end")
        try:
            self.process.wait(self.patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise WorkerDied(
                f"another process did not end within {self.patience_s:.0f} s"
            ) from None
        self.link.close()


class _Orders:
    """The worker process: runs one command after another."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.harness: Harness | None = None
        self.rigs: list[Setup] = []

    def load(
        self, plugin: str, settings: Mapping[str, object], salt: str, scale: float
    ) -> None:
        backend = load_backend(plugin)
        self.harness = Harness(plugin, settings, backend, salt, scale=Scale(scale))

    def attach(
        self, sample: Mapping[str, Any], shard: Mapping[str, Any], model: str
    ) -> None:
        assert self.harness
        pool = Sample(**sample).pool()
        self.rigs.append(self.harness.rig(pool, Shard(**shard), model=model))

    def suffixes(
        self, samples: Sequence[Mapping[str, Any]], shard: Mapping[str, Any]
    ) -> list[list[str]]:
        assert self.harness
        backend = self.harness.backend
        pools = [Sample(**sample).pool() for sample in samples]
        return [list(backend.key_suffix(pool, Shard(**shard))) for pool in pools]

    def put(self, hashes: Sequence[str]) -> str:
        return spelled(self.rigs[-1].put(hashes))

    def get(self, hashes: Sequence[str]) -> str:
        return spelled(self.rigs[-1].get(hashes))

    def get_soon(self, hashes: Sequence[str]) -> None:
        self.rigs[-1].loaded_soon(hashes)

    def write_for_ever(self, hashes: Sequence[str]) -> None:
        # Answered before the first round: the caller kills it in the middle.
        self.reply(ok=None)
        # The end of the caller, a kill included, ends the connection.
        while not self.link.poll():
            self.rigs[-1].put(hashes)
            self.rigs[-1].delete(hashes)

    def end(self) -> None:
        if self.harness:
            self.harness.close()
        sys.exit(0)

    def reply(self, **answer: object) -> None:
        self.link.send_bytes(json.dumps(answer).encode())


def serve(link: Connection) -> None:
    """Run commands from a connection until it ends."""
    orders = _Orders(link)
    with contextlib.suppress(EOFError, OSError):
        while True:
            words = json.loads(link.recv_bytes())
            order: Callable[..., object] = getattr(orders, words.pop("do"))
            try:
                orders.reply(ok=order(**words))
            except Exception:  # noqa: BLE001 - sent to the caller
                orders.reply(error=traceback.format_exc())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
