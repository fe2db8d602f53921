"""Run a prefill and a decode process beside each other, and compare their work.

This process loads no torch. It connects both by a pair of sockets, which the
reference control channel speaks over, passes their events on, and ends both where
one of them fails or the user interrupts.
"""

import json
import os
import queue
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from kvdock_transformers.demo.process import running
from kvdock_transformers.demo.records import to_json
from kvdock_transformers.demo.send.records import Generated, Role, SendJob
from kvdock_transformers.demo.send.verdicts import SendResult, judge_sending
from kvdock_transformers.errors import TrialFailed
from kvdock_transformers.families import Family, Scale

Event = Mapping[str, Any]
Report = Callable[[Event], None]
"""Called with every event of both processes, with its role."""

_WORKER = "kvdock_transformers.demo.send.worker"
_MAX_THREADS = 8
_STDERR_LINES = 15
_SILENCE_S = 600.0
"""How long neither process may say anything before both are given up."""

_LAST_WORDS_S = 10.0
"""How long the second process may take to say why, once the first has failed."""


@attrs.frozen(kw_only=True)
class SendRequest:
    """What to try.

    Args:
        families: Which models.
        directory: Where everything is kept; must exist.
        backend: The backend that carries the pages.
        scale: Size of the models.
        settings: What was given for the backend.
    """

    families: tuple[Family, ...]
    directory: Path
    backend: str
    scale: Scale = Scale.DEMO
    settings: Mapping[str, object] = attrs.field(factory=dict, repr=False)


def run_sending(
    request: SendRequest, report: Report = lambda _event: None
) -> tuple[SendResult, ...]:
    """Prefill in one process, decode in another, for each model.

    Args:
        request: What to try.
        report: Called with every event as it happens, on this thread.

    Returns:
        One result per model, in the order of the request.

    Raises:
        TrialFailed: If a process ends without its results.
    """
    salt = secrets.token_hex(8)
    directory = request.directory / f"send-{salt}"
    directory.mkdir(mode=0o700)
    trial = _Trial(request, directory, salt, report)
    try:
        made = trial.run()
    finally:
        # Hundreds of megabytes that are made again by every trial.
        shutil.rmtree(directory / "models", ignore_errors=True)
    return tuple(
        judge_sending(made[Role.PREFILL, family], made[Role.DECODE, family])
        for family in request.families
    )


@attrs.frozen
class _Failure:
    """Why a process ended without its results.

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
class _Trial:
    """Both processes, and what they have said so far."""

    request: SendRequest
    directory: Path
    salt: str
    report: Report
    made: dict[tuple[Role, Family], Generated] = attrs.field(factory=dict)
    failures: list[_Failure] = attrs.field(factory=list)
    _events: "queue.SimpleQueue[tuple[Role, Event | None]]" = attrs.field(
        factory=queue.SimpleQueue
    )

    def run(self) -> dict[tuple[Role, Family], Generated]:
        """Start both processes, and listen until both have ended.

        Raises:
            TrialFailed: If one ends without its results, or nothing is heard.
        """
        with ExitStack() as stack:
            processes = self._start(stack)
            left = set(Role)
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
        ends = socket.socketpair()
        with ends[0], ends[1]:
            # Ours are closed after this: each process sees when the other has ended.
            return {
                role: self._start_one(stack, role, end)
                for role, end in zip(Role, ends, strict=True)
            }

    def _start_one(
        self, stack: ExitStack, role: Role, end: socket.socket
    ) -> subprocess.Popen[str]:
        job = SendJob(
            role=role,
            families=self.request.families,
            scale=self.request.scale,
            backend=self.request.backend,
            directory=self.directory,
            salt=self.salt,
            threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))),
            channel=end.fileno(),
            settings=dict(self.request.settings),
        )
        path = self.directory / f"{role}.json"
        path.write_text(json.dumps(to_json(job)))
        log = stack.enter_context(self._log(role).open("wb"))
        process = stack.enter_context(
            running(_WORKER, [str(path)], stderr=log.fileno(), pass_fds=[end.fileno()])
        )
        threading.Thread(target=self._listen, args=(role, process), daemon=True).start()
        return process

    def _log(self, role: Role) -> Path:
        return self.directory / f"{role}.log"

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
                made = Generated(**event["result"])
                self.made[role, made.family] = made
            case "refused" | "lost" as kind:
                about = f"{event['model']}: " if event["model"] else ""
                # That the other one was lost follows from what ended it.
                rank = 0 if kind == "refused" else 2
                self.failures.append(
                    _Failure(role, f"{about}{event['reason']}", "", rank)
                )
        self.report({**event, "role": role})

    def _judge_end(self, role: Role, status: int) -> None:
        done = all((role, family) in self.made for family in self.request.families)
        said = any(failure.role is role for failure in self.failures)
        if said or (done and not status):
            return
        text = self._log(role).read_text(errors="replace")
        words = "\n  ".join(text.splitlines()[-_STDERR_LINES:])
        how = f"signal {-status}" if status < 0 else f"status {status}"
        fix = f"Its last words:\n  {words}" if words else ""
        self.failures.append(_Failure(role, f"it ended with {how}", fix, 1))
