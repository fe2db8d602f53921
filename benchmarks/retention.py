"""Replay sessions of which some are promised to stay while they pause.

Usage: python benchmarks/retention.py [--trace FILE] [--quota 0.1] [--kills 50]

A trace is JSON lines with `timestamp` in milliseconds and `ranges` (see
`eviction_loads`); without one a load of the same form is generated. Requests that
extend one another are a session. One session in five is retained: after each request
its blocks are promised until the next one. The clock is the trace's, so that hours of
pauses pass in minutes. Processes are killed in between, and each next one has another
quota. Reported are:

- promises that were broken: a block that was to be there, and was not;
- what was restored of the blocks that retained sessions were promised;
- what others restored, beside a store of what room the promises leave, which has them
  alone.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from eviction import PAGE_BYTES, RECORD_BYTES, Case

from kvdock.retention import RetentionAnswer

if TYPE_CHECKING:
    from eviction_loads import Blocks

EVERY = 5
"""One session in so many is retained."""
SLACK_S = 2
"""How much longer than its pause a session is promised to stay."""
SHARES = (1.0, 0.75, 0.9, 0.6)
"""Of the quota, for one process after the other."""
_BASE_S = 1_800_000_000


@attrs.frozen
class Request:
    """One request of a session.

    Args:
        at_s: When it comes.
        session: Whose it is.
        blocks: Its prefix.
        pause_s: Until the next one of its session; 0 for none.
    """

    at_s: float
    session: int
    blocks: Blocks
    pause_s: float = 0.0

    @property
    def retained(self) -> bool:
        """Return whether its session is one that is promised to stay."""
        return self.session % EVERY == 0


def read(path: Path, most: int = 0) -> list[Request]:
    """Read a trace, find its sessions and their pauses."""
    found: list[Request] = []
    owner: dict[int, int] = {}
    ends: dict[int, int] = {}
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            runs = [np.arange(first, last + 1) for first, last in row["ranges"]]
            blocks = np.concatenate([np.zeros(0, np.int64), *runs]).astype(np.int64)
            known = next(
                (
                    at
                    for at in range(len(blocks) - 1, -1, -1)
                    if int(blocks[at]) in owner
                ),
                -1,
            )
            session = owner.get(int(blocks[known]), -1) if known >= 0 else -1
            # What shares a head alone with another one is a session of its own.
            if session < 0 or known + 1 < 0.5 * ends[session]:
                session = len(ends)
            owner.update(dict.fromkeys(blocks[known + 1 :].tolist(), session))
            ends[session] = len(blocks)
            found.append(Request(row["timestamp"] / 1000, session, blocks))
            if most and len(found) >= most:
                break
    next_s: dict[int, float] = {}
    for at in range(len(found) - 1, -1, -1):
        one = found[at]
        pause_s = next_s.get(one.session, one.at_s) - one.at_s
        found[at] = attrs.evolve(one, pause_s=pause_s)
        next_s[one.session] = one.at_s
    return found


def generate(path: Path, requests: int, seed: int = 7) -> None:
    """Write a load of the form of recorded coding sessions."""
    rng = np.random.default_rng(seed)
    fresh, now_ms = 0, 0
    live: list[list[list[int]]] = []
    prompts = [[at * 40, at * 40 + 30] for at in range(3)]
    fresh = 200
    with path.open("w") as lines:
        for _ in range(requests):
            if len(live) < 12 or rng.random() < 0.01:
                live.append([prompts[int(rng.integers(3))]])
            at = int(rng.integers(len(live)))
            size = 1 + int(rng.geometric(1 / 8))
            live[at] = [*live[at], [fresh, fresh + size - 1]]
            fresh += size
            now_ms += int(rng.exponential(20_000))
            row = {"timestamp": now_ms, "ranges": live[at]}
            lines.write(json.dumps(row) + "\n")
            if len(live[at]) > 40:
                del live[at]


def _runs(which: np.ndarray[Any, Any]) -> list[list[int]]:
    """Return the runs of true values as [first, end]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], which.astype(np.int8), [0]])))
    found: list[list[int]] = edges.reshape(-1, 2).tolist()
    return found


def _positions(runs: Sequence[Sequence[int]]) -> list[int]:
    return [at for first, end in runs for at in range(first, end)]


def work(requests: Sequence[Request], case: Case, first: int) -> None:
    """Replay requests from one on; print a line for each, until killed."""
    now_s = [0.0]
    time.time = lambda: _BASE_S + now_s[0]
    pages = np.arange(case.longest)
    with case.attach() as cache:
        pool = cache["kv"]
        for number in range(first, len(requests)):
            one = requests[number]
            now_s[0] = one.at_s
            hashes = [f"{block:016x}" for block in one.blocks.tolist()]
            size = len(hashes)
            there = pool.exists(hashes)
            whole = int(np.argmin(np.append(there, False)))
            wanted = np.flatnonzero(there) if one.retained else np.arange(whole)
            loaded = np.zeros(size, np.bool_)
            names = [hashes[at] for at in wanted.tolist()]
            if names:
                loaded[wanted] = pool.get(names, pages[wanted]) == 0
            done = int(np.argmin(np.append(loaded, False)))
            accepted = np.zeros(size, np.bool_)
            keep_s = one.pause_s + SLACK_S if one.retained and one.pause_s else None
            if keep_s and done:
                answers = cache.retain(hashes[:done], keep_s)
                accepted[:done] = answers == RetentionAnswer.ACCEPTED
            if done < size:
                rest = {"kv": pages[done:size]}
                stored = cache.put(hashes[done:], rest, keep_s=keep_s)
                if stored.retained is not None:
                    accepted[done:] = stored.retained == RetentionAnswer.ACCEPTED
            line = [number, done, _runs(loaded), _runs(accepted)]
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


def _lives(
    trace: Path, most: int, case: Case, kills: Sequence[int], *, others: bool = False
) -> Iterator[list[Any]]:
    """Yield the lines of processes that replay a trace, each killed at a request."""
    first = 0
    for life, last in enumerate((*kills, -1)):
        share = SHARES[life % len(SHARES)] if kills else 1.0
        given = [trace, most, case.capacity, case.longest, case.root, share]
        command = [sys.executable, __file__, "--work", *map(str, given)]
        command += [str(first), str(int(others))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for line in process.stdout or ():
                if not line.endswith(b"\n"):
                    break  # it was killed while it wrote
                found = json.loads(line)
                first = found[0] + 1
                yield found
                if last >= 0 and found[0] >= last and process.returncode is None:
                    process.send_signal(signal.SIGKILL)
        if last < 0 and process.returncode != 0:
            raise SystemExit(f"the replay ended with {process.returncode}")


def replay(trace: Path, quota: float, kills: int, *, most: int = 0) -> dict[str, Any]:
    """Replay a trace with promises and kills; return what became of them."""
    requests = read(trace, most)
    every = np.unique(np.concatenate([one.blocks for one in requests]))
    longest = max(len(one.blocks) for one in requests)
    capacity = max(200, int(quota * len(every)))
    at = sorted(random.Random(5).sample(range(1, len(requests)), kills))  # noqa: S311 - a choice
    home = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108, PTH112 - a folder of our own in it
    folder = Path(tempfile.mkdtemp(prefix="kvdock-retention-", dir=home))
    folder.chmod(0o700)
    until: dict[int, float] = {}
    broken = due = back = asked = promised = 0
    others = [0, 0]
    held: list[int] = []
    try:
        case = Case(capacity, longest, folder / "store")
        for number, done, loaded, accepted in _lives(trace, most, case, at):
            one = requests[number]
            blocks = one.blocks.tolist()
            if one.retained:
                got = {blocks[place] for place in _positions(loaded)}
                wanted = [b for b in blocks if until.get(b, 0) > one.at_s]
                due += len(wanted)
                back += sum(block in got for block in wanted)
                broken += sum(block not in got for block in wanted)
                asked += len(blocks) if one.pause_s else 0
                mine = [blocks[place] for place in _positions(accepted)]
                promised += len(mine)
                end_s = one.at_s + one.pause_s + SLACK_S
                for block in mine:
                    until[block] = max(until.get(block, 0), end_s)
            else:
                others[0] += done
                others[1] += len(blocks)
            if number % 20 == 0:
                held.append(sum(end_s > one.at_s for end_s in until.values()))
        rest = capacity - int(np.mean(held))
        alone = [0, 0]
        case = Case(rest, longest, folder / "alone")
        for number, done, *_ in _lives(trace, most, case, [], others=True):
            one = requests[number]
            alone[0] += done
            alone[1] += len(one.blocks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "requests": len(requests),
        "sessions": len({one.session for one in requests}),
        "pages": capacity,
        "kills": kills,
        "asked": asked,
        "promised": promised,
        "held_mean": int(np.mean(held)),
        "held_most": max(held),
        "due": due,
        "broken": broken,
        "restored_of_promised": back / due if due else 1.0,
        "others": others[0] / max(1, others[1]),
        "others_alone": alone[0] / max(1, alone[1]),
        "page_bytes": PAGE_BYTES + RECORD_BYTES,
    }


def _worker(words: Sequence[str]) -> None:
    trace, most, capacity, longest, root, share, first, others = words
    requests = read(Path(trace), int(most))
    if others == "1":
        requests = [
            attrs.evolve(one, blocks=one.blocks[:0]) if one.retained else one
            for one in requests
        ]
    pages = int(int(capacity) * float(share))
    work(requests, Case(pages, int(longest), Path(root)), int(first))


def main() -> None:
    """Replay and print."""
    if sys.argv[1:2] == ["--work"]:
        _worker(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--quota", type=float, default=0.1)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--requests", type=int, default=0, help="only so many")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace
        if trace is None:
            trace = Path(folder) / "sessions.jsonl"
            generate(trace, args.requests or 2000)
        found = replay(trace, args.quota, args.kills, most=args.requests)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
