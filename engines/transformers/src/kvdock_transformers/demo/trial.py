"""A trial: four processes, one after another, and what they showed.

This process loads no torch. It starts each worker, passes its events on, harms
the store in between, and compares what the workers left behind.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvdock import Dock
from kvdock_transformers.backends import path_setting
from kvdock_transformers.demo.damage import Damage, Harm, StoredPages, inflict
from kvdock_transformers.demo.process import running
from kvdock_transformers.demo.records import Job, Phase, PoolRecord, Served, to_json
from kvdock_transformers.demo.tamper import tamper
from kvdock_transformers.demo.verdicts import ModelResult, judge
from kvdock_transformers.errors import TrialFailed
from kvdock_transformers.families import Family, Scale

Event = Mapping[str, Any]
Report = Callable[[Event], None]
"""Called with every event of every worker, with its phase."""

_KV_HARMS = (
    (0.97, Harm.DELETE),
    (0.92, Harm.TRUNCATE),
    (0.86, Harm.EXTEND),
    (0.78, Harm.FLIP),
)
"""Where in the prefix the target's attention pages are harmed, and how."""

_NO_LONGER_NEEDED = {Phase.RESTORE: ("altered",), Phase.REPAIR: ("models",)}
"""Hundreds of megabytes that are made again by every trial."""

_WORKER = "kvdock_transformers.demo.worker"
_MAX_THREADS = 8
_STDERR_LINES = 15


@attrs.frozen(kw_only=True)
class Request:
    """What to try.

    Args:
        families: Which models.
        directory: Where everything is kept; must exist.
        backend: The preferred backend, or "" for the router's own choice.
        scale: Size of the models.
        settings: What was given for the backend.
    """

    families: tuple[Family, ...]
    directory: Path
    backend: str = ""
    scale: Scale = Scale.DEMO
    settings: Mapping[str, object] = attrs.field(factory=dict, repr=False)


def run_trial(
    request: Request, report: Report = lambda _event: None
) -> tuple[ModelResult, ...]:
    """Offload, restore, recompute, damage and repair, for each model.

    Takes tens of seconds. Each trial has a directory and a namespace of its
    own below `request.directory`, so it never finds pages of another one.

    Args:
        request: What to try.
        report: Called with every event as it happens, on this thread.

    Returns:
        One result per model, in the order of the request.

    Raises:
        TrialFailed: If a process ends without its results.
    """
    salt = secrets.token_hex(8)
    directory = request.directory / f"trial-{salt}"
    directory.mkdir(mode=0o700)
    job = Job(
        phase=Phase.OFFLOAD,
        families=request.families,
        scale=request.scale,
        backend=request.backend,
        directory=directory,
        salt=salt,
        threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))),
        settings=dict(request.settings),
    )
    runs: dict[Phase, dict[Family, Served]] = {}
    damages: dict[Family, Damage] = {}
    for phase in Phase:
        if phase is Phase.REPAIR:
            for family, served in runs[Phase.OFFLOAD].items():
                damages[family] = damage_store(job, served)
                report({"event": "damage", "model": family, "damage": damages[family]})
        runs[phase] = _run_worker(attrs.evolve(job, phase=phase), report)
        for bulky in _NO_LONGER_NEEDED.get(phase, ()):
            shutil.rmtree(directory / bulky, ignore_errors=True)
    results = []
    for family in request.families:
        result = judge(
            family, {phase: runs[phase][family] for phase in Phase}, damages[family]
        )
        report({"event": "judged", "model": family, "result": result})
        results.append(result)
    return tuple(results)


def damage_store(job: Job, served: Served) -> Damage:
    """Harm stored pages of every pool: four ways for the anchor, one for others.

    In the files of the store, and what lies in no file through the hooks of
    the backend that keeps it.

    Args:
        job: Where the store is.
        served: The run that stored the pages.
    """
    pages = (served.prompt_tokens - 1) // served.page_tokens
    targets = []
    for name, record in served.pools.items():
        if record.draft:
            targets.append((name, pages // 2, Harm.FLIP))
        elif record.window_pages:
            targets.append((name, _last_stored(record, pages * 3 // 4), Harm.DELETE))
        else:
            targets += [(name, int(pages * share), harm) for share, harm in _KV_HARMS]
    stored = {
        name: StoredPages(
            record.page_bytes,
            {
                page: (bytes.fromhex(head), bytes.fromhex(tail))
                for page, (head, tail) in zip(record.stored, record.ends, strict=True)
            },
        )
        for name, record in served.pools.items()
    }
    known = [target for target in targets if target[1] in stored[target[0]].ends]
    damage, rest = Damage((), frozenset(), frozenset()), known
    for folder in _store_folders(job, served):
        damage = damage.joined(inflict(folder, stored, rest))
        rest = [target for target in known if target not in damage.done]
    return damage.joined(tamper(served.pools, rest, job.given)) if rest else damage


def _store_folders(job: Job, served: Served) -> tuple[Path, ...]:
    """Return where a run's pages lie: the trial's own folder, or one of a server.

    A backend that brings a server, such as a mount, may say where its root is. There
    lie the pages of other runs too, altered ones among them, which are the same but
    for one pool: only folders that have the name of this run's namespace are taken.
    """
    own = job.directory / "store" / served.family
    if not job.backend:
        return (own,)
    dock = Dock.load(require=(job.backend,))
    setting = path_setting(dock.backends[job.backend].manifest.settings)
    given = job.settings.get(setting) if setting else None
    if not given:
        return (own,)
    names = {
        key.partition("/")[0] for record in served.pools.values() for key in record.keys
    }
    found = [one for name in sorted(names) for one in Path(str(given)).rglob(name)]
    return (own, *found)


def _last_stored(record: PoolRecord, limit: int) -> int:
    return max((page for page in record.stored if page < limit), default=-1)


def _run_worker(job: Job, report: Report) -> dict[Family, Served]:
    job_path = job.directory / f"{job.phase}.json"
    job_path.write_text(json.dumps(to_json(job)))
    log_path = job.directory / f"{job.phase}.log"
    results: dict[Family, Served] = {}
    with (
        log_path.open("wb") as log,
        running(_WORKER, [str(job_path)], stderr=log.fileno()) as worker,
    ):
        for line in worker.stdout or ():
            event = json.loads(line)
            if event["event"] == "result":
                served = Served(**event["result"])
                results[served.family] = served
            elif event["event"] == "refused":
                raise TrialFailed(
                    f"{job.phase!s} of {event['model']}: {event['reason']}"
                )
            report({**event, "phase": job.phase})
        status = worker.wait()
    if status or set(results) != set(job.families):
        last = log_path.read_text(errors="replace").splitlines()[-_STDERR_LINES:]
        raise TrialFailed(
            f"the process of phase {job.phase!s} ended with status {status}",
            fix="Its last words:\n  " + "\n  ".join(last),
        )
    return results
