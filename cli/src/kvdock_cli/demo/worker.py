"""One process of the demo: `python -m kvdock_cli.demo.worker JOB`.

JOB is a JSON object with `phase` (`store`, `restore` or `clear`), `backend`,
`settings` and `prompt`. The last line of standard output is the result as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvdock import NO_PAGE, Attachment, Dock, KvdockError, Outcome
from kvdock.config import CoreSettings, Deadlines
from kvdock_cli.demo import pages
from kvdock_cli.rig import attached

PATIENT = CoreSettings(
    deadlines=Deadlines(exists=20.0, get=60.0, put=60.0, delete=20.0, clear=20.0)
)
"""A server in Python on a busy machine is slow, and what counts here is the bytes."""


def run(job: Mapping[str, Any]) -> dict[str, object]:
    """Store or restore the pages of a prompt; return what became of them."""
    backend = Dock.load(require=[job["backend"]]).backends[job["backend"]]
    with attached(
        backend,
        job["settings"],
        pages.NAMESPACE,
        pages.pools(),
        pages.PAGES,
        core=PATIENT,
    ) as (cache, memory):
        if job["phase"] == "store":
            return _store(cache, memory, job["prompt"])
        if job["phase"] == "clear":
            cache.clear()
            return {"pages": 0, "pools": {}, "wrong": 0}
        return _restore(cache, memory, job["prompt"])


def _store(
    cache: Attachment, memory: Mapping[str, Any], prompt: str
) -> dict[str, object]:
    names = pages.hashes(prompt)
    where = {route.pool.name: route.pool for route in cache.plan.accepted}
    indices = {name: pages.positions(pool, len(names)) for name, pool in where.items()}
    for pool, rows in memory.items():
        for page in indices[pool][indices[pool] != NO_PAGE]:
            rows[page] = pages.content(pool, names[page], rows.shape[1])
    # An engine looks pages up before it stores them.
    cache.exists(names)
    began_s = time.monotonic()
    done = cache.put(names, indices)
    keys = {name: cache[name].keys(names) for name in where}
    return _result(cache, done, time.monotonic() - began_s) | {"wrong": 0, "keys": keys}


def _restore(
    cache: Attachment, memory: Mapping[str, Any], prompt: str
) -> dict[str, object]:
    names = pages.hashes(prompt)
    seconds, wrong = 0.0, 0
    while True:
        began_s = time.monotonic()
        best = cache.exists(names).best
        names = names[:best]
        indices = {}
        for route in cache.plan.accepted:
            where = pages.positions(route.pool, best)
            if not (route.pool.anchor or route.pool.indices_from):
                # Only the state behind the last page is needed.
                where[: max(0, best - 1)] = NO_PAGE
            indices[route.pool.name] = where
        done = cache.get(names, indices)
        seconds += time.monotonic() - began_s
        for pool, outcomes in done.outcomes.items():
            rows = memory[pool]
            for page in np.flatnonzero(outcomes == Outcome.OK):
                expected = pages.content(pool, names[page], rows.shape[1])
                wrong += not np.array_equal(rows[indices[pool][page]], expected)
        # A page that turns out to be damaged shortens the prefix: ask again.
        if done.pages == best or not best:
            return _result(cache, done, seconds) | {"wrong": wrong}


def _result(cache: Attachment, done: Any, seconds: float) -> dict[str, object]:  # noqa: ANN401 - a result of the core
    return {
        "pages": done.pages,
        "pools": {
            name: int((outcomes == Outcome.OK).sum())
            for name, outcomes in done.outcomes.items()
        },
        "bytes": sum(done.nbytes.values()),
        "seconds": seconds,
        "routes": [
            {
                "pool": route.pool.name,
                "kind": str(route.pool.kind),
                "backend": route.backend,
                "page_bytes": route.pool.page_bytes(cache.plan.shard),
            }
            for route in cache.plan.accepted
        ],
    }


def main(arguments: list[str]) -> int:
    """Run one job; return the exit code."""
    try:
        found: dict[str, object] = run(json.loads(arguments[0]))
    except KvdockError as error:
        found = {"error": error.what, "fix": error.fix}
    sys.stdout.write(json.dumps(found | {"pid": os.getpid()}) + "\n")
    return int("error" in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
