"""Entry of one process of a trial: `python -m kvdock_transformers.demo.worker JOB`.

Reads a job, does one phase for each of its models, and writes events as JSON
lines to standard output. Whatever else is printed goes to standard error.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvdock import KvdockError
from kvdock_transformers.demo.process import end_with_parent
from kvdock_transformers.demo.records import Job, to_json


def main(arguments: Sequence[str]) -> int:
    """Run a job; return the exit status."""
    job = Job(**json.loads(Path(arguments[0]).read_text()))
    # Libraries print to file descriptor 1 as they please; events keep the
    # real one to themselves.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model: str | None = None

    def emit(event: Mapping[str, object]) -> None:
        events.write(json.dumps({"model": model, "pid": os.getpid(), **event}) + "\n")

    emit({"event": "start"})
    # Here and not above: these seconds belong to this process's start, and
    # the waiting process sees that it has begun.
    import torch  # noqa: PLC0415

    from kvdock_transformers.demo.serving import serve  # noqa: PLC0415

    torch.set_num_threads(job.threads)
    for model in job.families:
        try:
            served = serve(job, model, emit)
        except KvdockError as error:
            emit({"event": "refused", "reason": str(error)})
            return 1
        emit({"event": "result", "result": to_json(served)})
    emit({"event": "end"})
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
