"""The two processes of the demo, model by model."""

import time
from collections.abc import Callable, Mapping

import numpy as np

from kvdock import ChannelLostError
from kvdock_transformers import models
from kvdock_transformers.demo.engine import Engine
from kvdock_transformers.demo.send.handover import (
    Link,
    attached,
    finish_sending,
    pages_of,
    pools_of,
    slots_of,
    take_in,
)
from kvdock_transformers.demo.send.records import Generated, Role, SendJob
from kvdock_transformers.families import Family
from kvdock_transformers.speculation import Generation

Emit = Callable[[Mapping[str, object]], None]
"""Called with an event for the orchestrating process."""


def run_role(job: SendJob, family: Family, link: Link, emit: Emit) -> Generated:
    """Do this process's share for one model."""
    role = _prefill if job.role is Role.PREFILL else _decode
    return role(job, family, link, emit)


def _prefill(job: SendJob, family: Family, link: Link, emit: Emit) -> Generated:
    """Prefill, send the pages, then generate from this process's own caches."""
    directory = job.directory / "models" / family
    emit({"event": "step", "step": "making the model"})
    models.save(models.build(family, job.scale), directory)
    link.say("models are there")
    engine = Engine.load(directory, job.scale, family)
    with attached(job, engine) as attachment:
        emit({"event": "step", "step": "prefilling"})
        start_s = time.perf_counter()
        engine.prefill()
        prefill_s = time.perf_counter() - start_s
        offers = link.receive_offers()
        link.send_offers(attachment.direct.offers(receives=False))
        ticket = link.receive()
        emit({"event": "step", "step": "sending"})
        future = attachment.send(offers, ticket, pages_of(engine))
        finish_sending(future, link)
        # The machine belongs to the other process until it has generated.
        link.wait_for("generated")
    emit({"event": "step", "step": "generating in one process"})
    start_s = time.perf_counter()
    made = _generate(engine)
    return _generated(
        job,
        engine,
        made,
        computed_tokens=engine.workload.prompt_tokens,
        prefill_s=prefill_s,
        first_token_s=made.first_token_at_s - start_s,
    )


def _decode(job: SendJob, family: Family, link: Link, emit: Emit) -> Generated:
    """Offer empty host memory, take the pages, and generate from them."""
    link.wait_for("models are there")
    directory = job.directory / "models" / family
    engine = Engine.load(directory, job.scale, family)
    with attached(job, engine) as attachment:
        link.send_offers(attachment.direct.offers())
        senders = [link.receive_offers()]
        start_s = time.perf_counter()
        request = attachment.expect(slots_of(engine, attachment), senders)
        link.send(request.tickets[0])
        try:
            take_in(request, attachment, link)
        except ChannelLostError:
            request.sender_lost(0, link.channel.peer_state)
            raise
        arrived_s = time.perf_counter()
        arrived, nbytes = request.arrived, request.nbytes
        prefix = engine.workload.prefix_pages
        draft = engine.draft is not None and arrived.issuperset(engine.draft.hosts)
        engine.rebuild(prefix, prefix if draft else 0)
        restored_tokens = engine.target.running.tokens
        emit({"event": "step", "step": "generating"})
        made = _generate(engine)
    link.say("generated")
    return _generated(
        job,
        engine,
        made,
        computed_tokens=engine.workload.prompt_tokens - restored_tokens,
        send_s=arrived_s - start_s,
        first_token_s=made.first_token_at_s - arrived_s,
        arrived=sorted(arrived),
        arrived_bytes=nbytes,
    )


def _generate(engine: Engine) -> Generation:
    work = engine.workload
    return engine.generate(work.chunk_tokens, work.new_tokens, keep=False)


def _generated(
    job: SendJob, engine: Engine, made: Generation, **figures: object
) -> Generated:
    path = job.directory / "logits" / f"{engine.family}-{job.role}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, made.logits.numpy())
    return Generated(
        family=engine.family,
        role=job.role,
        prompt_tokens=engine.workload.prompt_tokens,
        prefix_tokens=engine.workload.prefix_tokens,
        token_ids=made.token_ids,
        logits_path=str(path),
        proposed=made.proposed,
        accepted=made.accepted,
        pools=pools_of(engine),
        **figures,  # type: ignore[arg-type]  # fields of the record
    )
