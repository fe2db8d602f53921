"""A decode engine goes on with pages that a prefill engine sent, token for token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from kvdock import (
    NO_PAGE,
    Attachment,
    Dock,
    Namespace,
    PoolSpec,
    RouteRequirements,
    Shard,
)
from kvdock.config import CoreSettings, Deadlines
from kvdock.peers import PeerTransfers, RequestState
from kvdock.testing.loading import load_backend
from kvdock_transformers.paged import PagedModel
from model_demo import models
from model_demo.families import WORKLOADS, Family, Scale
from model_demo.generation import generate, generate_with_draft

WORK = WORKLOADS[Scale.TINY]
LONG_S = 120.0
BACKEND = "peer_reference:peers"
PATIENT = CoreSettings(deadlines=Deadlines(send=LONG_S))


def engine(family: Family, built: models.Models) -> list[PagedModel]:
    prompt = models.prompt_token_ids(family, WORK.prompt_tokens)
    shape = (prompt, WORK.page_tokens, WORK.chunk_tokens)
    target, draft = built
    found = [PagedModel(target, *shape)]
    if draft is not None:
        found.append(PagedModel(draft, *shape, draft=True))
    return found


@contextmanager
def attached(models_: Sequence[PagedModel]) -> Iterator[Attachment]:
    backend = load_backend(BACKEND)
    dock = Dock({backend.name: backend})
    pools = [pool for model in models_ for pool in model.pools.all]
    needs = RouteRequirements(peers=True)
    plan = dock.plan(pools, Shard(), needs=needs)
    regions = {
        name: host.region() for one in models_ for name, host in one.hosts.items()
    }
    namespace = Namespace(model="a model")
    with Attachment.open(dock, plan, namespace, regions, core=PATIENT) as found:
        yield found


def pages_of(
    model: PagedModel, pool: PoolSpec
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the page of each position that a restore needs; NO_PAGE for others."""
    found = np.full(WORK.prefix_pages, NO_PAGE, np.int64)
    needed = model.needed(pool, WORK.prefix_pages)
    found[needed] = model.slots_of(pool, needed)
    return found


def generated(engine_: Sequence[PagedModel]) -> list[int]:
    """Return the tokens that follow the prompt, from what the caches hold."""
    target, *drafts = engine_
    target.prefill(WORK.prefix_tokens, WORK.chunk_tokens, keep=False)
    if not drafts:
        return list(generate(target.running, target.prompt, WORK.new_tokens).token_ids)
    (draft,) = drafts
    made = generate_with_draft(
        target.running,
        draft.running,
        target.prompt,
        WORK.new_tokens,
        WORK.draft_tokens,
        before_draft=lambda: draft.prefill(
            WORK.prefix_tokens, WORK.chunk_tokens, keep=False
        ),
    )
    return list(made.token_ids)


@pytest.mark.parametrize("family", list(Family))
def test_decode_goes_on_with_the_pages_of_a_prefill(family: Family) -> None:
    built = models.build(family, Scale.TINY)
    prefill, decode = engine(family, built), engine(family, built)
    for model in prefill:
        model.prefill(WORK.prefix_tokens, WORK.chunk_tokens, keep=True)
    with attached(prefill) as near, attached(decode) as far:
        sender, receiver = PeerTransfers(near), PeerTransfers(far)
        offers = [sender.offers(receives=False)]
        slots, pages = {}, {}
        for here, there in zip(decode, prefill, strict=True):
            for pool in here.pools.all:
                own = pages_of(here, pool)
                pages[pool.name] = pages_of(there, pool)
                if receiver.pools[pool.name].grid.per == "token":
                    tokens = np.arange(WORK.page_tokens)
                    wide = own[:, None] * WORK.page_tokens + tokens
                    own = np.where(own[:, None] < 0, -1, wide).ravel()
                slots[pool.name] = own
        request = receiver.expect(slots, offers)
        future = sender.send(receiver.offers(), request.tickets[0], pages)
        assert future.wait_quiet(LONG_S)
        receiver.complete(future.completion())
        assert request.wait(0) is RequestState.ARRIVED, request.reason
        assert request.arrived == set(slots)
    for model in decode:
        model.rebuild(WORK.prefix_pages)
    assert [one.running.tokens for one in decode] == [WORK.prefix_tokens] * len(decode)
    alone = engine(family, built)
    for model in alone:
        model.reset()
    assert generated(decode) == generated(alone)
