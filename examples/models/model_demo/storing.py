"""The demo of stored pages, one process of it: serve a prompt, perhaps from a store.

The three runs that use a store (into an empty one, from a full one, from a
damaged one) go the same way through the same code: look up, load, compute what
is missing, generate, store what is new. Only what they find differs.
"""

import time
from collections.abc import Mapping, Sequence

import attrs

from kvdock import Dock, Plan
from kvdock_transformers.prefix import page_hashes
from model_demo.backends import completed
from model_demo.engine import Emit, Engine, flip_signs
from model_demo.families import Family
from model_demo.generation import Generation
from model_demo.records import Altered, Job, PoolRecord, Role, Served
from model_demo.storage import Loaded, PromptPages, attach, plan_for

_ALTERED_TOKENS = 4


def serve(job: Job, family: Family, emit: Emit) -> Served:
    """Do one part of a trial for one model.

    Args:
        job: The part and where things lie.
        family: The model.
        emit: Called with the plan and with pages that were moved.
    """
    offload = job.role is Role.OFFLOAD
    engine = Engine.make(job, family, emit) if offload else Engine.load(job, family)
    if job.role is Role.RECOMPUTE:
        emit({"event": "step", "step": "prefilling the whole prompt"})
        start_s = time.perf_counter()
        made = engine.generate(chunk_tokens=engine.workload.recompute_chunk_tokens)
        return engine.served(job, made, start_s, _pools(engine, Loaded(), {}))
    dock = Dock.load(require=(job.backend,))
    store = job.directory / "store" / family
    settings = completed(dock, [job.backend], store, job.given)
    plan = plan_for(dock, engine.models, job.backend, settings)
    emit({"event": "plan", "text": plan.explain()})
    hashes = page_hashes(engine.target.prompt, engine.workload.page_tokens)

    def moved(action: str, done: int, total: int) -> None:
        about = {"action": action, "done": done, "total": total}
        emit({"event": "progress", **about})

    with attach(
        dock, plan, engine.namespace(job.salt), settings, engine.models
    ) as attachment:
        pages = PromptPages(attachment, hashes, engine.models)
        emit({"event": "step", "step": "looking for the prefix"})
        start_s = time.perf_counter()
        loaded = pages.load()
        engine.rebuild(loaded.pages, loaded.draft_pages)
        moved("load", loaded.pages, loaded.found)
        made = engine.generate(keep=True)
        stored = pages.store(lambda done, total: moved("store", done, total))
        found_after = pages.found()
        pools = _pools(engine, loaded, stored, pages)
    altered: tuple[Altered, ...] = ()
    if job.role is Role.RESTORE:
        emit({"event": "step", "step": "running on altered pages"})
        altered = tuple(
            _run_altered(job, engine, dock, plan, name, made)
            for name in pools
            if name in loaded.moved
        )
    restored_tokens = loaded.pages * engine.workload.page_tokens
    return engine.served(
        job,
        made,
        start_s,
        pools,
        found_pages=loaded.found,
        loaded_pages=loaded.pages,
        draft_loaded_pages=loaded.draft_pages,
        computed_tokens=engine.workload.prompt_tokens - restored_tokens,
        found_after=found_after,
        altered=altered,
    )


def _pools(
    engine: Engine,
    loaded: Loaded,
    stored: Mapping[str, list[int]],
    pages: PromptPages | None = None,
) -> dict[str, PoolRecord]:
    """Describe what became of each pool, and where its pages are kept."""
    records = {}
    for model in engine.models:
        for pool in model.pools.all:
            numbers = stored.get(pool.name, [])
            backend, keys, nbytes = "", list[str](), 0
            if pages:
                backend, keys, nbytes = _kept(pages, pool.name, numbers)
            records[pool.name] = PoolRecord(
                stored=tuple(numbers),
                loaded_pages=loaded.moved.get(pool.name, 0),
                window_pages=pool.window_pages,
                draft=pool.draft,
                page_bytes=model.hosts[pool.name].page_bytes,
                backend=backend,
                keys=tuple(keys),
                object_bytes=nbytes,
            )
    return records


def _kept(
    pages: PromptPages, pool: str, numbers: Sequence[int]
) -> tuple[str, list[str], int]:
    """Return where pages are kept: backend, key of each first object, its bytes."""
    if pool not in {one.name for one in pages.attachment.pools}:
        return "", [], 0
    attached = pages.attachment[pool]
    keys = attached.keys([pages.hashes[number] for number in numbers])
    object_bytes = attached.object_bytes
    return attached.backend, keys[:: len(object_bytes)], int(object_bytes[0])


def _run_altered(
    job: Job, engine: Engine, dock: Dock, plan: Plan, pool: str, true: Generation
) -> Altered:
    """Generate from pages of one pool that were stored with other content.

    The altered pages are stored like any others, so their checksums are
    right. Only the output can show that they are what the model went on from.
    """
    owner = next(model for model in engine.models if pool in model.hosts)
    flip_signs(owner, pool)
    namespace = attrs.evolve(engine.namespace(job.salt), salt=f"{job.salt} {pool}")
    hashes = page_hashes(engine.target.prompt, engine.workload.page_tokens)
    store = job.directory / "altered" / engine.family
    settings = completed(dock, plan.backends, store, job.given)
    with attach(dock, plan, namespace, settings, engine.models) as attachment:
        pages = PromptPages(attachment, hashes, engine.models)
        for model in engine.models:
            model.keep_needed()
        pages.store(lambda _done, _total: None)
        for model in engine.models:
            model.clear_hosts()
        loaded = pages.load()
        engine.rebuild(loaded.pages, loaded.draft_pages)
    draft = owner is engine.draft
    # What the target's pages decide shows in the first tokens; how many
    # proposals are accepted takes the whole run to show.
    tokens = engine.workload.new_tokens if draft else _ALTERED_TOKENS
    made = engine.generate(new_tokens=tokens)
    # The host memory holds exactly what was loaded: undo the alteration.
    flip_signs(owner, pool)
    return Altered(
        pool=pool,
        draft=draft,
        max_abs_diff=float((made.logits - true.logits[:tokens]).abs().max()),
        tokens_identical=made.token_ids == true.token_ids[:tokens],
        proposed=made.proposed,
        accepted=made.accepted,
    )
