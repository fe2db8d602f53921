"""One process's share of a trial: serve a prompt, with a store or without.

The three runs that use a store (into an empty one, from a full one, from a
damaged one) go the same way through the same code: look up, load, compute what
is missing, generate, store what is new. Only what they find differs.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import numpy as np

from kvdock import Dock, Plan
from kvdock_transformers import models
from kvdock_transformers.backends import completed, settings_for
from kvdock_transformers.demo.engine import Engine
from kvdock_transformers.demo.records import Altered, Job, Phase, PoolRecord, Served
from kvdock_transformers.families import Family
from kvdock_transformers.paged import PagedModel
from kvdock_transformers.prefix import page_hashes
from kvdock_transformers.speculation import Generation
from kvdock_transformers.storage import Loaded, PromptPages, plan_for

Emit = Callable[[Mapping[str, object]], None]
"""Called with an event for the orchestrating process."""

_END_BYTES = 48
_ALTERED_TOKENS = 4


def serve(job: Job, family: Family, emit: Emit) -> Served:
    """Do one phase of a trial for one model.

    Args:
        job: The phase and where things lie.
        family: The model.
        emit: Called with the plan and with pages that were moved.
    """
    if job.phase is Phase.OFFLOAD:
        emit({"event": "step", "step": "making the model"})
        models.save(models.build(family, job.scale), job.directory / "models" / family)
    engine = Engine.load(job.directory / "models" / family, job.scale, family)
    if job.phase is Phase.RECOMPUTE:
        return _recompute(job, engine, emit)
    dock = Dock.load(require=(job.backend,) if job.backend else ())
    known = [name for name in job.given if name in dock.backends]
    settings = completed(dock, known, _store(job, engine), job.given)
    plan = plan_for(dock, engine.models, job.backend, settings)
    emit({"event": "plan", "text": plan.explain()})
    return _serve_from_store(job, engine, dock, plan, emit)


def _store(job: Job, engine: Engine) -> Path:
    return job.directory / "store" / engine.family


def _recompute(job: Job, engine: Engine, emit: Emit) -> Served:
    emit({"event": "step", "step": "prefilling the whole prompt"})
    start_s = time.perf_counter()
    made = engine.generate(
        engine.workload.recompute_chunk_tokens, engine.workload.new_tokens, keep=False
    )
    return _served(job, engine, made, start_s, Loaded(), {})


def _serve_from_store(
    job: Job, engine: Engine, dock: Dock, plan: Plan, emit: Emit
) -> Served:
    namespace = engine.namespace(job.salt)
    hashes = page_hashes(engine.target.prompt, engine.workload.page_tokens)
    pages = PromptPages.attach(
        dock,
        plan,
        namespace,
        settings_for(dock, plan, _store(job, engine), job.given),
        hashes,
        engine.models,
    )
    try:
        emit({"event": "step", "step": "looking for the prefix"})
        start_s = time.perf_counter()
        loaded = pages.load()
        engine.rebuild(loaded.pages, loaded.draft_pages)
        emit(
            {
                "event": "progress",
                "action": "load",
                "done": loaded.pages,
                "total": loaded.found,
            }
        )
        made = engine.generate(
            engine.workload.chunk_tokens, engine.workload.new_tokens, keep=True
        )
        stored = pages.store(
            lambda done, total: emit(
                {"event": "progress", "action": "store", "done": done, "total": total}
            )
        )
        served = _served(job, engine, made, start_s, loaded, stored)
        served = attrs.evolve(
            served, found_after=pages.found(), pools=_kept(served.pools, pages)
        )
    finally:
        pages.close()
    if job.phase is Phase.RESTORE:
        emit({"event": "step", "step": "running on altered pages"})
        altered = tuple(
            _run_altered(job, engine, dock, plan, pool.name, made)
            for model in engine.models
            for pool in model.pools.all
            if pool.name in loaded.moved
        )
        served = attrs.evolve(served, altered=altered)
    return served


def _served(
    job: Job,
    engine: Engine,
    made: Generation,
    start_s: float,
    loaded: Loaded,
    stored: Mapping[str, list[int]],
) -> Served:
    path = job.directory / "logits" / f"{engine.family}-{job.phase}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, made.logits.numpy())
    page_tokens = engine.workload.page_tokens
    return Served(
        family=engine.family,
        prompt_tokens=engine.workload.prompt_tokens,
        page_tokens=page_tokens,
        found_pages=loaded.found,
        loaded_pages=loaded.pages,
        draft_loaded_pages=loaded.draft_pages,
        computed_tokens=engine.workload.prompt_tokens - loaded.pages * page_tokens,
        ttft_s=made.first_token_at_s - start_s,
        token_ids=made.token_ids,
        logits_path=str(path),
        proposed=made.proposed,
        accepted=made.accepted,
        found_after=0,
        pools={
            name: record
            for model in engine.models
            for name, record in _pool_records(model, loaded, stored)
        },
    )


def _pool_records(
    model: PagedModel, loaded: Loaded, stored: Mapping[str, list[int]]
) -> list[tuple[str, PoolRecord]]:
    records = []
    for pool in model.pools.all:
        host = model.hosts[pool.name]
        numbers = stored.get(pool.name, [])
        pages = host.buffer[model.slots_of(pool, numbers)].numpy()
        moved = loaded.moved.get(pool.name, 0)
        record = PoolRecord(
            stored=numbers,
            stored_bytes=len(numbers) * host.page_bytes,
            loaded_pages=moved,
            loaded_bytes=moved * host.page_bytes,
            window_pages=pool.window_pages,
            draft=pool.draft,
            page_bytes=host.page_bytes,
            ends=tuple(
                (bytes(page[:_END_BYTES]).hex(), bytes(page[-_END_BYTES:]).hex())
                for page in pages
            ),
        )
        records.append((pool.name, record))
    return records


def _kept(
    records: Mapping[str, PoolRecord], pages: PromptPages
) -> dict[str, PoolRecord]:
    """Add where the pages of each pool are kept."""
    kept = {name: pages.kept(name, record.stored) for name, record in records.items()}
    return {
        name: attrs.evolve(
            record,
            backend=kept[name][0],
            keys=kept[name][1],
            object_bytes=kept[name][2],
        )
        for name, record in records.items()
    }


def _run_altered(
    job: Job, engine: Engine, dock: Dock, plan: Plan, pool: str, true: Generation
) -> Altered:
    """Generate from pages of one pool that were stored with other content.

    The altered pages are stored like any others, so their checksums are
    right. Only the output can show that they are what the model went on from.
    """
    owner = next(model for model in engine.models if pool in model.hosts)
    owner.flip_signs(pool)
    namespace = attrs.evolve(engine.namespace(job.salt), salt=f"{job.salt} {pool}")
    hashes = page_hashes(engine.target.prompt, engine.workload.page_tokens)
    pages = PromptPages.attach(
        dock,
        plan,
        namespace,
        settings_for(dock, plan, job.directory / "altered" / engine.family, job.given),
        hashes,
        engine.models,
    )
    try:
        for model in engine.models:
            model.keep_needed()
        pages.store(lambda _done, _total: None)
        for model in engine.models:
            model.clear_hosts()
        loaded = pages.load()
        engine.rebuild(loaded.pages, loaded.draft_pages)
    finally:
        pages.close()
    draft = owner is engine.draft
    # What the target's pages decide shows in the first tokens; how many
    # proposals are accepted takes the whole run to show.
    tokens = engine.workload.new_tokens if draft else _ALTERED_TOKENS
    made = engine.generate(engine.workload.chunk_tokens, tokens, keep=False)
    # The host memory holds exactly what was loaded: undo the alteration.
    owner.flip_signs(pool)
    return Altered(
        pool=pool,
        draft=draft,
        max_abs_diff=float((made.logits - true.logits[:tokens]).abs().max()),
        tokens_identical=made.token_ids == true.token_ids[:tokens],
        proposed=made.proposed,
        accepted=made.accepted,
    )
