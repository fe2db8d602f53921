"""What the two processes say to each other, and what each does with pages.

An engine has messages of its own for this: requests with offers, tickets and
completions in them. Here the offers of a model go in one row, and a ticket, a
completion and a few words in messages of their own.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs
import numpy as np

from kvdock import (
    NO_PAGE,
    Attachment,
    Completion,
    ControlChannel,
    Dock,
    Expectation,
    Offer,
    Per,
    PoolSpec,
    RequestState,
    SendFuture,
    Shard,
)
from kvdock.arrays import Int64Array
from kvdock.config import CoreSettings, Deadlines
from kvdock_transformers.backends import completed
from kvdock_transformers.demo.engine import Engine
from kvdock_transformers.demo.send.choice import NEEDS
from kvdock_transformers.demo.send.records import PoolPages, SendJob
from kvdock_transformers.errors import TrialFailed
from kvdock_transformers.paged import PagedModel

SEND_S = 120.0
"""Long: what counts here is the bytes, and a machine may be busy."""

PATIENCE_S = 600.0
"""How long one process waits for a message while the other computes."""

PATIENT = CoreSettings(deadlines=Deadlines(send=SEND_S))


@attrs.frozen(eq=False)
class Link:
    """The control channel to the other process.

    Args:
        channel: kvdock's reference channel.
    """

    channel: ControlChannel

    def send(self, message: bytes) -> None:
        """Send one message."""
        self.channel.send(message, time.monotonic() + PATIENCE_S)

    def receive(self) -> bytes:
        """Return the next message."""
        return self.channel.receive(time.monotonic() + PATIENCE_S)

    def say(self, word: str) -> None:
        """Send a word that the other process waits for."""
        self.send(json.dumps(word).encode())

    def wait_for(self, word: str) -> None:
        """Wait for a word.

        Raises:
            TrialFailed: If another message comes.
        """
        found = self.receive()
        if found != json.dumps(word).encode():
            raise TrialFailed(f"{word!r} was expected, and {found[:80]!r} came")

    def send_offers(self, offers: Mapping[str, Offer]) -> None:
        """Send the offers of all pools."""
        self.send(json.dumps(len(offers)).encode())
        for offer in offers.values():
            self.send(offer.to_bytes())

    def receive_offers(self) -> dict[str, Offer]:
        """Return the offers of all pools of the other process."""
        count = int(json.loads(self.receive()))
        offers = [Offer.from_bytes(self.receive()) for _ in range(count)]
        return {offer.pool: offer for offer in offers}


@contextmanager
def attached(job: SendJob, engine: Engine) -> Iterator[Attachment]:
    """Attach the host memory of all pools to the backend that carries pages."""
    dock = Dock.load(require=(job.backend,))
    own = job.directory / "store" / job.role
    settings = completed(dock, [job.backend], own, {job.backend: job.settings})
    plan = dock.plan(
        [pool for model in engine.models for pool in model.pools.all],
        Shard(),
        (job.backend,),
        strict=True,
        needs=NEEDS,
        settings=settings,
    )
    regions = {
        name: host.region()
        for model in engine.models
        for name, host in model.hosts.items()
    }
    with Attachment.open(
        dock, plan, engine.namespace(job.salt), regions, settings, core=PATIENT
    ) as attachment:
        yield attachment


def pages_of(engine: Engine) -> dict[str, Int64Array]:
    """Return the page of each position that a decode process needs, by pool."""
    return {
        pool.name: _positions(engine, model, pool)
        for model in engine.models
        for pool in model.pools.all
    }


def slots_of(engine: Engine, attachment: Attachment) -> dict[str, Int64Array]:
    """Return the slot of each token, or of each page's state, by pool."""
    slots = {}
    for name, pages in pages_of(engine).items():
        slots[name] = pages
        if attachment.direct.pools[name].grid.per is Per.TOKEN:
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


def pools_of(engine: Engine) -> dict[str, PoolPages]:
    """Return how many pages of each pool a decode process needs."""
    sizes = {
        name: host.page_bytes
        for model in engine.models
        for name, host in model.hosts.items()
    }
    counts = {
        name: int(np.count_nonzero(pages != NO_PAGE))
        for name, pages in pages_of(engine).items()
    }
    return {
        name: PoolPages(pages=count, nbytes=count * sizes[name])
        for name, count in counts.items()
    }


def finish_sending(future: SendFuture, link: Link) -> None:
    """Wait for a request to end, and report to its receiver.

    Raises:
        TrialFailed: If a pool was not sent whole.
    """
    future.wait(SEND_S)
    link.send(future.completion().to_bytes())
    if not future.quiet:
        # A second message frees the slots of a call that was abandoned.
        future.wait_quiet(SEND_S)
        link.send(future.completion().to_bytes())
    if not future.ok:
        found = ", ".join(f"{name} {one.name}" for name, one in future.outcomes.items())
        raise TrialFailed(f"the pages were not sent: {found}")


def take_in(request: Expectation, attachment: Attachment, link: Link) -> None:
    """Take completions until a request has ended and its slots are free.

    Raises:
        ChannelLostError: If the sender is lost.
        TrialFailed: If a required pool has not arrived.
    """
    while True:
        completion = Completion.from_bytes(link.receive())
        attachment.direct.complete(completion)
        if completion.ended:
            break
    # Of a send that failed, bytes may lie in this process's sockets for a while.
    request.wait_free(SEND_S)
    if request.state is not RequestState.ARRIVED:
        raise TrialFailed(f"the pages have not arrived: {request.reason}")
