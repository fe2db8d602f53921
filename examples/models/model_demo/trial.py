"""Run the processes of a demo, and hand over what they report.

This process loads no torch. It starts the processes of a round beside each other,
connected by a pipe where there are two, passes their events on, and ends all where
one of them fails or the user interrupts.
"""

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from kvdock.child_processes import ended_with_parent
from model_demo.families import Family, Scale
from model_demo.records import WIRE, Job, Role, Served, TrialFailed

Event = Mapping[str, Any]
Report = Callable[[Event], None]
"""Called with every event of every process, with its role."""

_WORKER = "model_demo.worker"
_FOLDER = Path(__file__).parents[1]
"""Where this package is found: it is not installed."""

_MAX_THREADS = 8
_STDERR_LINES = 15
_SILENCE_S = 600.0
"""How long no process may say anything before all are given up."""

_LAST_WORDS_S = 10.0
"""How long a second process may take to say why, once the first has failed."""

_ENVIRONMENT = {
    # Models are made here; nothing may be looked for anywhere else.
    "HF_HUB_OFFLINE": "1",
    # Hints at faster kernels and progress bars are noise here.
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def new_job(
    families: tuple[Family, ...],
    scale: Scale,
    backend: str,
    settings: Mapping[str, object],
    directory: Path,
) -> Job:
    """Return the orders of a trial's processes, but for their roles.

    Each trial has a directory and a namespace of its own, so it never finds pages of
    another one.
    """
    salt = secrets.token_hex(8)
    own = directory / f"trial-{salt}"
    own.mkdir(mode=0o700)
    return Job(
        role=Role.OFFLOAD,
        families=families,
        scale=scale,
        backend=backend,
        directory=own,
        salt=salt,
        threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))),
        settings=dict(settings),
    )


def run_round(
    job: Job, roles: Sequence[Role], report: Report = lambda _event: None
) -> dict[Role, dict[Family, Served]]:
    """Run a process for each role, beside each other.

    Args:
        job: The orders of all of them.
        roles: One, or two that are connected.
        report: Called with every event as it happens, on this thread.

    Raises:
        TrialFailed: If a process ends without its results, or nothing is heard.
    """
    return _Round(job, tuple(roles), report).run()


@attrs.frozen
class _Failure:
    """The reason why a process ended without its results.

    Args:
        role: Which process.
        what: What it said, or how it ended.
        fix: Its last words, or "".
        rank: The lowest is the cause, where both have failed.
    """

    role: Role
    what: str
    fix: str
    rank: int


@attrs.define(eq=False)
class _Round:
    """Processes beside each other, and what they have said so far."""

    job: Job
    roles: tuple[Role, ...]
    report: Report
    made: dict[Role, dict[Family, Served]] = attrs.field(
        default=attrs.Factory(
            lambda self: {role: {} for role in self.roles}, takes_self=True
        )
    )
    failures: list[_Failure] = attrs.field(factory=list)
    _events: "queue.SimpleQueue[tuple[Role, Event | None]]" = attrs.field(
        factory=queue.SimpleQueue
    )

    def run(self) -> dict[Role, dict[Family, Served]]:
        """Start all processes, and listen until they have ended."""
        with ExitStack() as stack:
            processes = self._start(stack)
            left = set(self.roles)
            until_s = time.monotonic() + _SILENCE_S
            while left:
                try:
                    role, event = self._events.get(
                        timeout=max(0.0, until_s - time.monotonic())
                    )
                except queue.Empty:
                    break
                if event is None:
                    left.discard(role)
                    self._judge_end(role, processes[role].wait())
                else:
                    self._take(role, event)
                if not self.failures:
                    until_s = time.monotonic() + _SILENCE_S
                elif until_s > time.monotonic() + _LAST_WORDS_S:
                    until_s = time.monotonic() + _LAST_WORDS_S
            if self.failures:
                cause = min(self.failures, key=lambda one: one.rank)
                raise TrialFailed(
                    f"the {cause.role} process failed: {cause.what}", fix=cause.fix
                )
            if left:
                raise TrialFailed(f"nothing was heard for {_SILENCE_S:.0f} s")
        return self.made

    def _start(self, stack: ExitStack) -> dict[Role, subprocess.Popen[str]]:
        with ExitStack() as ours:
            # Closed after this: each process sees when the other one has ended.
            ends: list[Connection | None] = [None]
            if len(self.roles) > 1:
                ends = [ours.enter_context(end) for end in Pipe()]
            return {
                role: self._start_one(stack, role, end)
                for role, end in zip(self.roles, ends, strict=True)
            }

    def _start_one(
        self, stack: ExitStack, role: Role, end: Connection | None
    ) -> subprocess.Popen[str]:
        channel = end.fileno() if end else -1
        job = attrs.evolve(self.job, role=role, channel=channel)
        path = self.job.directory / f"{role}.json"
        path.write_text(json.dumps(WIRE.unstructure(job)))
        log = stack.enter_context(path.with_suffix(".log").open("wb"))
        process = stack.enter_context(
            _running(str(path), log.fileno(), [channel] if end else [])
        )
        threading.Thread(target=self._listen, args=(role, process), daemon=True).start()
        return process

    def _listen(self, role: Role, process: subprocess.Popen[str]) -> None:
        try:
            for line in process.stdout or ():
                self._events.put((role, json.loads(line)))
        except ValueError:
            # The pipe was closed, or a process was killed within a line.
            pass
        finally:
            self._events.put((role, None))

    def _take(self, role: Role, event: Event) -> None:
        match event["event"]:
            case "result":
                made = WIRE.structure(event["result"], Served)
                self.made[role][made.family] = made
                event = {**event, "result": made}
            case "refused" | "lost" as kind:
                about = f"{event['model']}: " if event["model"] else ""
                # That the other one was lost follows from what ended it.
                rank = 0 if kind == "refused" else 2
                self.failures.append(
                    _Failure(role, f"{about}{event['reason']}", "", rank)
                )
        self.report({**event, "role": role})

    def _judge_end(self, role: Role, status: int) -> None:
        done = set(self.made[role]) == set(self.job.families)
        said = any(failure.role is role for failure in self.failures)
        if said or (done and not status):
            return
        text = (self.job.directory / f"{role}.log").read_text(errors="replace")
        words = "\n  ".join(text.splitlines()[-_STDERR_LINES:])
        how = f"signal {-status}" if status < 0 else f"status {status}"
        fix = f"Its last words:\n  {words}" if words else ""
        self.failures.append(_Failure(role, f"it ended with {how}", fix, 1))


def _python_path() -> str:
    """Return the environment's own, with this package's folder before it."""
    return os.pathsep.join(
        filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH", "")))
    )


@contextmanager
def _running(
    job: str, stderr: int, pass_fds: Sequence[int]
) -> Iterator[subprocess.Popen[str]]:
    """Run a worker, which is killed if the block raises."""
    process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
        ended_with_parent([sys.executable, "-m", _WORKER, job]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": _python_path()},
        pass_fds=pass_fds,
    )
    with process:
        try:
            yield process
        except BaseException:
            # Leaving the block would otherwise wait for its whole job.
            process.kill()
            raise
