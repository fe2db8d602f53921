"""Load each plugin in a process of its own first: what it breaks is its own process.

An extension module that crashes, an import that hangs or one that ends the process
would take a command with it that only wants to name what is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import attrs

from kvdock.plugin.discovery import (
    BACKENDS_GROUP,
    DENY_VARIABLE,
    BrokenPlugin,
    Candidate,
    import_entry_point,
    load_one,
)
from kvdock.plugin.validation import LoadStage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.plugin.discovery import PluginProblem

TRIAL_S = 10.0
"""Time for one plugin to be imported and to say what it declares."""

_CHILD = """
import json, os, sys
answer = os.dup(1)
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
from kvdock.plugin.trial import _answer
os.write(answer, _answer(sys.argv[2]).encode())
os._exit(0)
"""


def try_each(
    candidates: Sequence[Candidate], timeout_s: float = TRIAL_S
) -> dict[Candidate, PluginProblem]:
    """Load each candidate in a process of its own, several at once.

    Args:
        candidates: What to try.
        timeout_s: Time for each.

    Returns:
        What is wrong with those that cannot be loaded.
    """
    if not candidates:
        return {}
    children: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            found = [
                *pool.map(lambda one: _problem(one, timeout_s, children), candidates)
            ]
        except BaseException:
            # The user ends the command, and a trial may take its time.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                _kill(child)
            raise
    return {one: wrong for one, wrong in zip(candidates, found, strict=True) if wrong}


def _problem(
    candidate: Candidate, timeout_s: float, children: list[subprocess.Popen[bytes]]
) -> PluginProblem | None:
    """Return what is wrong with one candidate, as its own process tells."""
    given = json.dumps(attrs.asdict(candidate))
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), given]
    with subprocess.Popen(  # noqa: S603 - this interpreter, and data
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        children.append(child)
        try:
            answer, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill(child)
            child.wait()
            return _crashed(candidate, f"its import took more than {timeout_s:g} s")
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return _crashed(candidate, f"its import crashed the process ({name})")
    if child.returncode or not answer:
        return _crashed(
            candidate, f"its import ended the process (status {child.returncode})"
        )
    told = json.loads(answer)
    if not told:
        return None
    return candidate.problem(LoadStage(told["stage"]), told["cause"], told["fix"])


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with all that it has started, which may hold its pipe."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def _crashed(candidate: Candidate, cause: str) -> PluginProblem:
    return candidate.problem(
        LoadStage.IMPORT,
        cause,
        f"Reinstall {candidate.distribution}, or leave it out with "
        f"{DENY_VARIABLE}={candidate.distribution}.",
    )


def _answer(given: str) -> str:
    """Load one candidate; return what is wrong with it as JSON, or "{}"."""
    candidate = Candidate(**json.loads(given))
    try:
        if candidate.group == BACKENDS_GROUP:
            load_one(candidate)
        else:
            import_entry_point(candidate)
    except BrokenPlugin as broken:
        one = broken.problem
        return json.dumps({"stage": one.stage, "cause": one.cause, "fix": one.fix})
    return "{}"
