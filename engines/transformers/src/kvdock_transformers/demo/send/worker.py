"""Entry of one of the two processes: `python -m kvdock_transformers.demo.send.worker`.

Reads a job, does its share for each of its models, and writes events as JSON lines
to standard output. All else that is printed goes to standard error.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvdock import ChannelLostError, ControlChannel, KvdockError
from kvdock_transformers.demo.process import end_with_parent
from kvdock_transformers.demo.records import to_json
from kvdock_transformers.demo.send.records import SendJob

_CONNECT_S = 120.0


def main(arguments: Sequence[str]) -> int:
    """Run a job; return the exit status."""
    job = SendJob(**json.loads(Path(arguments[0]).read_text()))
    # Libraries print to file descriptor 1 as they please.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model: str | None = None

    def emit(event: Mapping[str, object]) -> None:
        events.write(json.dumps({"model": model, "pid": os.getpid(), **event}) + "\n")

    emit({"event": "start"})
    try:
        deadline_s = time.monotonic() + _CONNECT_S
        with ControlChannel(socket.socket(fileno=job.channel), deadline_s) as channel:
            # Here and not above: the waiting process sees that it has begun.
            import torch  # noqa: PLC0415

            from kvdock_transformers.demo.send.handover import Link  # noqa: PLC0415
            from kvdock_transformers.demo.send.roles import run_role  # noqa: PLC0415

            torch.set_num_threads(job.threads)
            for model in job.families:
                made = run_role(job, model, Link(channel), emit)
                emit({"event": "result", "result": to_json(made)})
    except ChannelLostError as error:
        emit({"event": "lost", "reason": str(error)})
        return 1
    except KvdockError as error:
        emit({"event": "refused", "reason": str(error)})
        return 1
    emit({"event": "end"})
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
