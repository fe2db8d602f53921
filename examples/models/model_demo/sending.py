"""The demo that sends: one process prefills, another one decodes.

An engine has messages of its own for this: requests with offers, tickets and
completions in them. Here the offers of a model go in one row, and a ticket, a
completion and two words in messages of their own.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from kvdock import NO_PAGE, Dock, PoolSpec
from kvdock.arrays import Int64Array
from kvdock.peers import (
    Completion,
    Expectation,
    PeerTransfers,
    RequestState,
    SendFuture,
)
from kvdock.pools import Per
from kvdock_transformers.paged import PagedModel
from model_demo.backends import TO_PEERS, completed
from model_demo.channel import Channel, ChannelLostError
from model_demo.engine import Emit, Engine
from model_demo.families import Family
from model_demo.records import Job, PoolRecord, Role, Served, TrialFailed
from model_demo.storage import SEND_S, attach, plan_for

_MADE, _GENERATED = b"models are there", b"generated"
"""Words that the other process waits for."""


def hand_over(job: Job, family: Family, channel: Channel, emit: Emit) -> Served:
    """Do this process's share for one model."""
    role: Callable[..., Served] = _prefill if job.role is Role.PREFILL else _decode
    return role(job, family, channel, emit)


def _prefill(job: Job, family: Family, channel: Channel, emit: Emit) -> Served:
    """Prefill, send the pages, then generate from this process's own caches."""
    engine = Engine.make(job, family, emit)
    channel.send(_MADE)
    with _attached(job, engine) as peers:
        emit({"event": "step", "step": "prefilling"})
        start_s = time.perf_counter()
        engine.prefill()
        prefill_s = time.perf_counter() - start_s
        offers = channel.receive_offers()
        channel.send_offers(peers.offers(receives=False))
        ticket = channel.receive()
        emit({"event": "step", "step": "sending"})
        _finish_sending(peers.send(offers, ticket, _pages_of(engine)), channel)
        # The machine belongs to the other process until it has generated.
        _wait_for(_GENERATED, channel)
    emit({"event": "step", "step": "generating in one process"})
    start_s = time.perf_counter()
    return engine.served(
        job, engine.generate(), start_s, _pools_of(engine), prefill_s=prefill_s
    )


def _decode(job: Job, family: Family, channel: Channel, emit: Emit) -> Served:
    """Offer empty host memory, take the pages, and generate from them."""
    _wait_for(_MADE, channel)
    engine = Engine.load(job, family)
    with _attached(job, engine) as peers:
        channel.send_offers(peers.offers())
        senders = [channel.receive_offers()]
        start_s = time.perf_counter()
        request = peers.expect(_slots_of(engine, peers), senders)
        channel.send(request.tickets[0])
        try:
            _take_in(request, peers, channel)
        except ChannelLostError:
            request.sender_lost(0, channel.peer_state)
            raise
        arrived_s = time.perf_counter()
        arrived, nbytes = request.arrived, request.nbytes
        prefix = engine.workload.prefix_pages
        draft = engine.draft is not None and arrived.issuperset(engine.draft.hosts)
        engine.rebuild(prefix, prefix if draft else 0)
        restored_tokens = engine.target.running.tokens
        emit({"event": "step", "step": "generating"})
        made = engine.generate()
    channel.send(_GENERATED)
    return engine.served(
        job,
        made,
        arrived_s,
        _pools_of(engine),
        computed_tokens=engine.workload.prompt_tokens - restored_tokens,
        send_s=arrived_s - start_s,
        arrived=tuple(sorted(arrived)),
        arrived_bytes=nbytes,
    )


@contextmanager
def _attached(job: Job, engine: Engine) -> Iterator[PeerTransfers]:
    """Attach the host memory of all pools to the backend that carries pages."""
    dock = Dock.load(require=(job.backend,))
    own = job.directory / "store" / job.role
    settings = completed(dock, [job.backend], own, job.given)
    plan = plan_for(dock, engine.models, job.backend, settings, needs=TO_PEERS)
    with attach(
        dock, plan, engine.namespace(job.salt), settings, engine.models
    ) as attachment:
        yield PeerTransfers(attachment)


def _pages_of(engine: Engine) -> dict[str, Int64Array]:
    """Return the page of each position that a decode process needs, by pool."""
    return {
        pool.name: _positions(engine, model, pool)
        for model in engine.models
        for pool in model.pools.all
    }


def _slots_of(engine: Engine, peers: PeerTransfers) -> dict[str, Int64Array]:
    """Return the slot of each token, or of each page's state, by pool."""
    slots = {}
    for name, pages in _pages_of(engine).items():
        slots[name] = pages
        if peers.pools[name].grid.per is Per.TOKEN:
            tokens = np.arange(engine.workload.page_tokens)
            wide = pages[:, None] * engine.workload.page_tokens + tokens
            slots[name] = np.where(pages[:, None] < 0, NO_PAGE, wide).ravel()
    return slots


def _positions(engine: Engine, model: PagedModel, pool: PoolSpec) -> Int64Array:
    prefix = engine.workload.prefix_pages
    found = np.full(prefix, NO_PAGE, np.int64)
    needed = model.needed(pool, prefix)
    found[needed] = model.slots_of(pool, needed)
    return found


def _pools_of(engine: Engine) -> Mapping[str, PoolRecord]:
    """Return how many pages of each pool a decode process needs."""
    pages = _pages_of(engine)
    return {
        name: PoolRecord(
            loaded_pages=int(np.count_nonzero(pages[name] != NO_PAGE)),
            page_bytes=host.page_bytes,
        )
        for model in engine.models
        for name, host in model.hosts.items()
    }


def _finish_sending(future: SendFuture, channel: Channel) -> None:
    """Wait for a request to end, and report to its receiver.

    Raises:
        TrialFailed: If a pool was not sent whole.
    """
    future.wait(SEND_S)
    channel.send(future.completion().to_bytes())
    if not future.quiet:
        # A second message frees the slots of a call that was abandoned.
        future.wait_quiet(SEND_S)
        channel.send(future.completion().to_bytes())
    if not future.ok:
        found = ", ".join(f"{name} {one.name}" for name, one in future.outcomes.items())
        raise TrialFailed(f"the pages were not sent: {found}")


def _take_in(request: Expectation, peers: PeerTransfers, channel: Channel) -> None:
    """Take completions until a request has ended and its slots are free.

    Raises:
        ChannelLostError: If the sender is lost.
        TrialFailed: If a required pool has not arrived.
    """
    while True:
        completion = Completion.from_bytes(channel.receive())
        peers.complete(completion)
        if completion.ended:
            break
    # Of a send that failed, bytes may lie in this process's sockets for a while.
    request.wait_free(SEND_S)
    if request.state is not RequestState.ARRIVED:
        raise TrialFailed(f"the pages have not arrived: {request.reason}")


def _wait_for(word: bytes, channel: Channel) -> None:
    found = channel.receive()
    if found != word:
        raise TrialFailed(f"{word!r} was expected, and {found[:80]!r} came")
