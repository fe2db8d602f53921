"""Entry of one process of a demo: `python -m model_demo.worker JOB`.

Reads a job, does its share for each of its models, and writes events as JSON lines
to standard output. Whatever else is printed goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from kvdock import KvdockError
from model_demo.channel import Channel, ChannelLostError
from model_demo.records import WIRE, Job

_CONNECT_S = 120.0

_LOOPBACK = {"UCX_NET_DEVICES": "lo"}
"""Keeps libraries that can be told so from listening where other hosts reach them."""


def main(arguments: Sequence[str]) -> int:
    """Run a job; return the exit status."""
    job = WIRE.structure(json.loads(Path(arguments[0]).read_text()), Job)
    for name, value in _LOOPBACK.items():
        os.environ.setdefault(name, value)
    # Libraries print to file descriptor 1 as they please; events keep the
    # real one to themselves.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model: str | None = None

    def emit(event: Mapping[str, object]) -> None:
        events.write(json.dumps({"model": model, "pid": os.getpid(), **event}) + "\n")

    emit({"event": "start"})
    try:
        with ExitStack() as stack:
            channel = None
            if job.channel >= 0:
                link = stack.enter_context(Connection(job.channel))
                channel = Channel(link, time.monotonic() + _CONNECT_S)
            # Here and not above: these seconds belong to this process's start, and
            # the waiting process sees that it has begun.
            import torch

            from model_demo.sending import hand_over
            from model_demo.storing import serve

            torch.set_num_threads(job.threads)
            for model in job.families:
                served = (
                    hand_over(job, model, channel, emit)
                    if channel
                    else serve(job, model, emit)
                )
                emit({"event": "result", "result": WIRE.unstructure(served)})
    except ChannelLostError as error:
        emit({"event": "lost", "reason": str(error)})
        return 1
    except KvdockError as error:
        emit({"event": "refused", "reason": str(error)})
        return 1
    emit({"event": "end"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
