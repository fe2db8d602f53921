from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from peer_reference import PeerReference
from peers import LONG_S, Content, Peer, pages_for, settings, slots_for
from request_pools import HEADS, attention, draft, latent, peers, states, window
from shelf import Engine

from kvdock.batch import Outcome
from kvdock.errors import KvdockError
from kvdock.namespace import Namespace
from kvdock.peers.expectation import (
    Expectation,
    ExpectedPart,
    PeerState,
    RequestState,
)
from kvdock.peers.messages import Completion, Epoch, Ticket
from kvdock.peers.send_future import RunningSend
from kvdock.peers.transfers import BusyError, PeerTransfers
from kvdock.pools.enums import DType, Layout
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard, every_shard

if TYPE_CHECKING:
    from kvdock.plugin.manifest import Manifest
    from kvdock.transfer.leases import Lease


def deliver(
    sender: Peer,
    receiver: Peer,
    request: Expectation,
    pages: Mapping[str, npt.ArrayLike],
    number: int = 0,
) -> None:
    """Send one ticket of a request, and complete it."""
    offers = receiver.transfers.offers()
    future = sender.transfers.send(offers, request.tickets[number], pages)
    assert future.wait_quiet(LONG_S)
    receiver.transfers.complete(future.completion().to_bytes())


def transferred(
    sender: Peer,
    receiver: Peer,
    content: Content,
    pages: Mapping[str, npt.ArrayLike],
    slots: Mapping[str, npt.ArrayLike],
) -> Expectation:
    sender.fill(content, pages)
    offers = [sender.transfers.offers(receives=False)]
    request = receiver.transfers.expect(slots, offers)
    deliver(sender, receiver, request, pages)
    return request


@pytest.mark.parametrize("kind", ["contiguous", "runs", "scattered"])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 1), (1, 8), (8, 4)])
@pytest.mark.parametrize("build", [attention, latent])
def test_tokens_arrive_in_their_slots(
    kind: str, sizes: tuple[int, int], build: Any
) -> None:
    rng = np.random.default_rng(3)
    layouts = list(Layout)
    for tokens in (1, 13, 29):
        mine, theirs = (
            [build(size, layouts[int(rng.integers(len(layouts)))])] for size in sizes
        )
        content = Content(mine, tokens, seed=tokens)
        with peers(
            Peer(mine, pages=64 // sizes[0]), Peer(theirs, pages=64 // sizes[1])
        ) as two:
            sender, receiver = two
            pages = {"kv": pages_for(tokens, sizes[0], rng, sender.pages)}
            slots = {"kv": slots_for(kind, tokens, 64, rng)}
            request = transferred(sender, receiver, content, pages, slots)
            assert request.state is RequestState.ARRIVED, request.reason
            assert request.free
            assert receiver.read(content, slots).equals(content)


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("verify", ["yes", "no"])
def test_ranks_take_their_heads_from_whichever_ranks_have_them(
    tp: tuple[int, int], verify: str
) -> None:
    rng = np.random.default_rng(5)
    tokens = 22
    pools = [attention(layout=Layout.PAGE_FIRST), draft(layout=Layout.LAYER_FIRST)]
    core = settings(peers={"verify": verify})
    content = Content(pools, tokens)
    pages = {"kv": pages_for(tokens, 4, rng, 16)}
    everywhere = {**pages, "draft": pages["kv"]}
    prefill = [Peer(pools, shard=one, core=core) for one in every_shard(tp_size=tp[0])]
    decode = [
        Peer([attention(1), draft(1)], 64, shard=one, core=core)
        for one in every_shard(tp_size=tp[1])
    ]
    with peers(*prefill, *decode):
        for one in prefill:
            one.fill(content, everywhere)
        found = content.blank()
        for receiver in decode:
            slots = {"kv": slots_for("scattered", tokens, 64, rng)}
            offers = [one.transfers.offers(receives=False) for one in prefill]
            span = receiver.grid("kv").parts[0].heads
            chosen = [
                n
                for n, one in enumerate(prefill)
                if max(span[0], one.grid("kv").parts[0].heads[0])
                < min(span[1], one.grid("kv").parts[0].heads[1])
            ]
            request = receiver.transfers.expect(slots, [offers[n] for n in chosen])
            for number, rank in enumerate(chosen):
                assert request.state is RequestState.PENDING
                deliver(prefill[rank], receiver, request, dict(pages), number)
            assert request.state is RequestState.ARRIVED, request.reason
            assert request.arrived == {"kv", "draft"}
            part = receiver.read(content, {**slots, "draft": slots["kv"]})
            for name in found.memory:
                found.memory[name] |= part.memory[name]
        assert found.equals(content)


def test_a_rank_whose_heads_no_sender_has_is_rejected_by_name() -> None:
    pools = [attention()]
    half = Peer(pools, shard=Shard(tp_rank=0, tp_size=2))
    with peers(half, Peer(pools)) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        with pytest.raises(
            KvdockError, match="none of the 1 senders has k of layer 0, head 2"
        ):
            receiver.transfers.expect({"kv": [0]}, offers)
        assert not receiver.attachment.leases("kv").leased_pages


def test_a_hybrid_model_sends_its_last_state_and_its_window() -> None:
    rng = np.random.default_rng(7)
    tokens = 26
    pools = [attention(), draft(), states(), window()]
    theirs = [attention(1), draft(1), states(1), window(1)]
    content = Content(pools, tokens)
    with peers(Peer(pools), Peer(theirs, 64)) as (sender, receiver):
        kv = pages_for(tokens, 4, rng, 16)
        swa = pages_for(tokens, 4, rng, 16)
        swa[: (tokens - 8) // 4] = -1
        pages: dict[str, npt.ArrayLike] = {
            "kv": kv,
            "draft": kv,
            "mamba": [3],
            "swa": swa,
        }
        slots: dict[str, Any] = {
            "kv": slots_for("scattered", tokens, 64, rng),
            "mamba": [9],
            "swa": slots_for("scattered", tokens, 64, rng),
        }
        slots["swa"][: tokens - 8] = -1
        request = transferred(sender, receiver, content, pages, slots)
        assert request.state is RequestState.ARRIVED, request.reason
        assert request.arrived == {"kv", "draft", "mamba", "swa"}
        found = receiver.read(content, {**slots, "draft": slots["kv"]})
        assert found.equals(content, "kv", "draft", "mamba")
        row = content.pools[3].page_bytes(Shard()) // 4
        assert row * 8 == np.count_nonzero(found.memory["swa"])
        slots["swa"][-1] = -1
        with pytest.raises(KvdockError, match="missing in its window, the last 8"):
            receiver.transfers.expect(slots, [sender.transfers.offers(receives=False)])


def test_a_sender_may_have_fewer_pages_than_a_request_has_positions() -> None:
    pools = [states(), attention()]
    content = Content(pools, 48, states=12)
    with peers(Peer(pools, 12), Peer(pools, 4)) as (receiver, sender):
        pages = np.full(12, -1)
        pages[-1] = 3
        offers = [sender.transfers.offers(receives=False)]
        where = {"kv": np.arange(16), "mamba": pages}
        request = receiver.transfers.expect(where, offers)
        sender.fill(content, {"mamba": pages})
        deliver(sender, receiver, request, {"kv": np.arange(4), "mamba": pages})
        assert request.state is RequestState.ARRIVED, request.reason


def test_a_page_that_the_sender_does_not_have_fails_the_request() -> None:
    pools = [attention(), draft()]
    content = Content(pools, 8)
    with peers(Peer(pools), Peer(pools)) as (sender, receiver):
        slots = {"kv": np.arange(8)}
        full: dict[str, npt.ArrayLike] = {"kv": [2, 3], "draft": [2, -1]}
        request = transferred(sender, receiver, content, full, slots)
        assert request.state is RequestState.ARRIVED
        assert request.arrived == {"kv"}
        short: dict[str, npt.ArrayLike] = {"kv": [2, -1], "draft": [2, 3]}
        request = transferred(sender, receiver, content, short, slots)
        assert request.state is RequestState.FAILED
        assert request.reason == "pool kv: absent at the sender"
        assert request.free


@pytest.mark.parametrize(
    "other",
    [
        Namespace(model="other"),
        Namespace(model="m", revision="2"),
        Namespace(model="m", draft_model="d"),
        Namespace(model="m", lora="l"),
        Namespace(model="m", salt="s"),
    ],
)
def test_a_peer_with_other_bytes_is_rejected(other: Namespace) -> None:
    pools = [attention()]
    with peers(Peer(pools), Peer(pools, namespace=other)) as (sender, receiver):
        offers = sender.transfers.offers(receives=False)
        with pytest.raises(KvdockError, match="the peer's pages have other bytes"):
            receiver.transfers.expect({"kv": [0]}, [offers])


def test_another_type_of_a_part_is_rejected_and_another_page_size_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvdock")
    narrow = [Part("k", DType.F16, (HEADS, 9), shard_axis=0), attention().parts[1]]
    with peers(
        Peer([attention()]), Peer([attention(8)]), Peer([attention(parts=narrow)])
    ) as (sender, receiver, other):
        offers = [sender.transfers.offers(receives=False)]
        with pytest.raises(KvdockError, match="other bytes"):
            other.transfers.expect({"kv": [0]}, offers)
        for slot in (0, 8):
            receiver.transfers.expect({"kv": [slot]}, offers)
    said = [one for one in caplog.messages if "tokens here" in one]
    slots = "each token is sent to its slot"
    assert said == [f"pool kv: pages of 8 tokens here, of 4 at the peer: {slots}"]


class Garbling(PeerReference):
    """Sends every row one byte too far."""

    def rows(self, local: Any, remote: Any, sizes: Any) -> Any:
        return local + 1, remote, sizes


@pytest.mark.parametrize("slots", [np.arange(8), np.arange(8)[::-1].copy()])
def test_wrong_bytes_never_count_as_arrived(slots: Any) -> None:
    pools = [attention(layout=Layout.PAGE_FIRST)]
    content = Content(pools, 8)
    with peers(Peer(pools, plugin=Garbling()), Peer(pools)) as (sender, receiver):
        request = transferred(sender, receiver, content, {"kv": [2, 3]}, {"kv": slots})
        assert request.state is RequestState.CORRUPT
        assert request.free


def test_a_completion_without_digests_is_not_believed() -> None:
    pools = [attention()]
    content = Content(pools, 8)
    with peers(Peer(pools), Peer(pools)) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        sender.fill(content, {"kv": [2, 3]})
        request = receiver.transfers.expect({"kv": np.arange(8)}, offers)
        theirs = receiver.transfers.offers()
        future = sender.transfers.send(theirs, request.tickets[0], {"kv": [2, 3]})
        assert future.wait_quiet(LONG_S)
        receiver.transfers.complete(attrs.evolve(future.completion(), digests={}))
        assert request.state is RequestState.CORRUPT


def test_a_request_that_cannot_be_taken_in_has_not_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = [attention()]
    content = Content(pools, 8)
    with peers(Peer(pools), Peer(pools)) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        sender.fill(content, {"kv": [2, 3]})
        request = receiver.transfers.expect({"kv": np.arange(8)}, offers)

        def fail(*_: object) -> bool:
            raise MemoryError

        monkeypatch.setattr(ExpectedPart, "arrive", fail)
        with pytest.raises(MemoryError):
            deliver(sender, receiver, request, {"kv": [2, 3]})
        assert request.state is RequestState.FAILED
        assert request.reason == "it could not be taken in"
        assert request.free


class Unlanded(PeerReference):
    """Wants every row in its slot, however short."""

    def manifest(self) -> Manifest:
        return attrs.evolve(super().manifest(), landing_run_bytes=0)


def test_scattered_slots_are_reached_by_whole_pages_and_a_copy() -> None:
    rng = np.random.default_rng(1)
    slots = slots_for("scattered", 32, 64, rng)
    content = Content([attention()], 32)
    rows = {}
    for plugin in (PeerReference, Unlanded):
        seen: list[int] = []

        class Counting(plugin):  # type: ignore[misc, valid-type]
            def rows(
                self, local: Any, remote: Any, sizes: Any, seen: Any = seen
            ) -> Any:
                seen.append(len(local))
                return local, remote, sizes

        with peers(
            Peer([attention()], plugin=Counting()),
            Peer([attention(1)], 64, plugin=Counting()),
        ) as (sender, receiver):
            request = transferred(
                sender, receiver, content, {"kv": np.arange(8)}, {"kv": slots}
            )
            assert request.state is RequestState.ARRIVED
            assert receiver.read(content, {"kv": slots}).equals(content)
            area = receiver.transfers.pools["kv"].area
            assert area is None or area.used == 0
        rows[plugin] = sum(seen)
    assert rows[PeerReference] == 1
    assert rows[Unlanded] >= 32


def test_rows_are_cut_to_what_the_backend_takes() -> None:
    class Narrow(Unlanded):
        def manifest(self) -> Manifest:
            return attrs.evolve(super().manifest(), max_send_rows=5)

        def rows(self, local: Any, remote: Any, sizes: Any) -> Any:
            assert 0 < len(local) <= 5
            return local, remote, sizes

    slots = np.arange(32)[::-1].copy()
    content = Content([attention()], 32)
    with peers(
        Peer([attention()], plugin=Narrow()), Peer([attention(1)], 64, plugin=Narrow())
    ) as (sender, receiver):
        request = transferred(
            sender, receiver, content, {"kv": np.arange(8)}, {"kv": slots}
        )
        assert request.state is RequestState.ARRIVED, request.reason
        assert receiver.read(content, {"kv": slots}).equals(content)


def test_a_full_landing_area_asks_to_come_back_later() -> None:
    core = settings(peers={"landing_bytes": attention().page_bytes(Shard()) * 4})
    with peers(Peer([attention()]), Peer([attention(1)], 64, core=core)) as two:
        sender, receiver = two
        offers = [sender.transfers.offers(receives=False)]
        slots = np.arange(16)[::-1].copy()
        first = receiver.transfers.expect({"kv": slots}, offers)
        with pytest.raises(BusyError, match="landing area"):
            receiver.transfers.expect({"kv": slots + 16}, offers)
        assert receiver.attachment.leases("kv").leased_pages == 16
        content = Content([attention()], 16)
        sender.fill(content, {"kv": np.arange(4)})
        deliver(sender, receiver, first, {"kv": np.arange(4)})
        assert first.state is RequestState.ARRIVED
        receiver.transfers.expect({"kv": slots + 16}, offers)
        # What never fits goes to its slots directly.
        receiver.transfers.expect({"kv": np.arange(32, 64)[::-1].copy()}, offers)


def test_a_slot_that_is_expected_twice_is_busy() -> None:
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        receiver.transfers.expect({"kv": [0, 1]}, offers)
        with pytest.raises(BusyError, match="the page of a slot is in use"):
            receiver.transfers.expect({"kv": [2, 3]}, offers)
        with pytest.raises(KvdockError, match="given twice"):
            receiver.transfers.expect({"kv": [8, 8]}, offers)
        with pytest.raises(KvdockError, match="outside of 64"):
            receiver.transfers.expect({"kv": [64]}, offers)


def test_an_aborted_request_holds_its_slots_until_its_sender_has_ended() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        pages = {"kv": np.array([5, 6])}
        sender.fill(content, pages)
        offers = [sender.transfers.offers(receives=False)]
        slots = {"kv": np.arange(8)}
        request = receiver.transfers.expect(slots, offers)
        theirs = receiver.transfers.offers()
        request.abort()
        assert request.wait(0) is RequestState.ABORTED
        assert not request.wait_free(0)
        assert receiver.transfers.held_slots("kv") == 8
        with pytest.raises(BusyError):
            receiver.transfers.expect(slots, offers)
        # The sender has not heard of it.
        future = sender.transfers.send(theirs, request.tickets[0], dict(pages))
        assert future.wait_quiet(LONG_S)
        receiver.transfers.complete(future.completion())
        assert request.state is RequestState.ABORTED
        assert request.free
        assert not receiver.transfers.held_slots("kv")
        receiver.transfers.expect(slots, offers)


def test_a_dead_sender_frees_its_slots_and_an_unknown_one_does_not() -> None:
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        dead = receiver.transfers.expect({"kv": np.arange(4)}, offers)
        unknown = receiver.transfers.expect({"kv": np.arange(4) + 4}, offers)
        dead.sender_lost(0, PeerState.DEAD)
        unknown.sender_lost(0, PeerState.UNKNOWN)
        assert dead.reason == "sender 0 is lost: dead"
        assert unknown.reason == "sender 0 is lost: unknown"
        assert dead.wait_free(LONG_S)
        assert not unknown.wait_free(0)
        assert receiver.transfers.withdraw()
        assert unknown.free


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.REFUSED])
def test_what_a_failed_sender_left_in_sockets_holds_its_slots(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[threading.Timer] = []

    def start(timer: threading.Timer) -> None:
        timers.append(timer)

    monkeypatch.setattr(threading.Timer, "start", start)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        request = receiver.transfers.expect({"kv": np.arange(4)}, offers)
        receiver.transfers.complete(
            Completion(
                request=request.request, sender=0, ended=True, outcomes={"kv": outcome}
            )
        )
        assert request.state is RequestState.FAILED
        if outcome is Outcome.REFUSED:
            assert (request.free, timers) == (True, [])
            return
        assert not request.free
        (timer,) = timers
        assert timer.interval == receiver.transfers.pools["kv"].manifest.send_drain_s
        timer.function(*timer.args)
        assert request.free


def test_held_slots_are_bounded() -> None:
    core = settings(peers={"max_held_percent": 25})
    with peers(Peer([attention()]), Peer([attention()], core=core)) as two:
        sender, receiver = two
        offers = [sender.transfers.offers(receives=False)]
        for page in range(2):
            slots = {"kv": np.arange(8) + 8 * page}
            receiver.transfers.expect(slots, offers).sender_lost(0, PeerState.UNKNOWN)
        with pytest.raises(BusyError, match="16 slots are held for senders"):
            receiver.transfers.expect({"kv": [32]}, offers)
        assert receiver.transfers.withdraw()
        receiver.transfers.expect({"kv": [32]}, offers)


def test_a_request_ends_by_its_deadline_and_a_late_completion_only_frees_it() -> None:
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        request = receiver.transfers.expect(
            {"kv": np.arange(8)}, offers, timeout_s=0.05
        )
        assert request.wait(LONG_S) is RequestState.FAILED
        assert request.reason == "the deadline has passed"
        assert not request.wait_free(0)
        late = sender.transfers.decline(request.tickets[0])
        assert receiver.transfers.complete(late.to_bytes()) is request
        assert request.state is RequestState.FAILED
        assert request.reason == "the deadline has passed"
        assert request.free


def test_a_completion_of_a_sender_that_still_writes_frees_nothing() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.transfers.offers(receives=False)]
        request = receiver.transfers.expect({"kv": np.arange(8)}, offers)
        sender.fill(content, {"kv": [0, 1]})
        theirs = receiver.transfers.offers()
        future = sender.transfers.send(theirs, request.tickets[0], {"kv": [0, 1]})
        assert future.wait_quiet(LONG_S)
        ended = future.completion()
        receiver.transfers.complete(
            attrs.evolve(ended, ended=False, outcomes={"kv": Outcome.TIMEOUT})
        )
        assert request.state is RequestState.FAILED
        assert not request.wait_free(0)
        receiver.transfers.complete(ended)
        assert request.free
        assert request.state is RequestState.FAILED


def test_an_endpoint_that_was_closed_is_unavailable_and_a_new_one_works() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        old = receiver.transfers.offers()
        assert receiver.transfers.withdraw()
        offers = [sender.transfers.offers(receives=False)]
        request = receiver.transfers.expect({"kv": np.arange(8)}, offers)
        pages = {"kv": [0, 1]}
        sender.fill(content, pages)
        future = sender.transfers.send(old, request.tickets[0], pages)
        assert future.wait_quiet(LONG_S)
        assert future.outcomes["kv"] is Outcome.ERROR
        receiver.transfers.complete(future.completion())
        assert request.state is RequestState.FAILED
        assert request.wait_free(LONG_S)
        again = transferred(sender, receiver, content, {"kv": [0, 1]}, {"kv": range(8)})
        assert again.state is RequestState.ARRIVED


def test_a_connection_ends_once_its_endpoint_was_replaced() -> None:
    ended: list[object] = []

    class Counting(PeerReference):
        def disconnect(self, handle: Any, peer: Any) -> bool:
            ended.append(peer)
            return super().disconnect(handle, peer)

    content = Content([attention()], 8)
    where = {"kv": [0, 1]}, {"kv": range(8)}
    with peers(Peer([attention()], plugin=Counting()), Peer([attention()])) as two:
        sender, receiver = two
        for number in range(3):
            transferred(sender, receiver, content, *where)
            assert len(ended) == number
            assert receiver.transfers.withdraw()
    assert len(ended) == 3


REQUESTS = int(os.environ.get("TESTS_OF_KVDOCK_REQUESTS", "1500"))


@pytest.mark.slow
def test_healthy_requests_arrive_whatever_pauses_are_between_their_steps() -> None:
    """`make torture-direct` does 10,000."""
    content, workers = Content([attention()], 8), 4
    seeds = np.random.SeedSequence(0).spawn(workers)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        theirs, mine = (
            receiver.transfers.offers(),
            [sender.transfers.offers(receives=False)],
        )
        states: list[RequestState] = []

        def work(number: int) -> None:
            rng = np.random.default_rng(seeds[number])
            pages = {"kv": np.arange(2) + 2 * number}
            slots = {"kv": np.arange(8) + 8 * number}
            sender.fill(content, pages)

            def pause() -> None:
                # Half of the time none, else up to 2 ms.
                time.sleep(max(0.0, rng.uniform(-0.002, 0.002)))

            for _ in range(REQUESTS // workers):
                request = receiver.transfers.expect(slots, mine)
                pause()
                future = sender.transfers.send(theirs, request.tickets[0], pages)
                pause()
                assert future.wait(LONG_S)
                pause()
                message = future.completion().to_bytes()
                pause()
                receiver.transfers.complete(message)
                pause()
                states.append(request.wait(0))
                assert request.free, request.reason

        threads = [threading.Thread(target=work, args=(n,)) for n in range(workers)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert states == [RequestState.ARRIVED] * (REQUESTS // workers * workers)


def test_an_attachment_without_pools_for_peers_says_what_to_plan_with() -> None:
    with (
        Engine().attachment as cache,
        pytest.raises(KvdockError, match="peers=True"),
    ):
        PeerTransfers(cache)


def test_an_attachment_has_one_object_for_its_peers() -> None:
    with (
        peers(Peer([attention()])) as (one,),
        pytest.raises(KvdockError, match="already"),
    ):
        PeerTransfers(one.attachment)


def ticket() -> Ticket:
    return Ticket(
        request="r",
        number=0,
        sender=0,
        claim="c",
        epoch=Epoch("p", 0),
        duration_s=60.0,
        digests=False,
        pools={},
    )


def test_the_outcomes_of_a_send_are_not_seen_before_it_is_quiet() -> None:
    """What `wait` is followed by is a completion, and it says what is over."""
    future = RunningSend(ticket(), ("kv",), time.monotonic() + 60)
    seen: list[bool] = []

    class Watching:
        def end(self) -> None:
            seen.append(future.ended or future.wait(0))

    future.hold(cast("Lease", Watching()))
    assert future.start()
    future.finish(np.array([Outcome.OK], np.uint8))
    assert seen == [False]
    assert future.completion().ended


@pytest.mark.parametrize("first", ["run", "call"])
def test_a_call_that_goes_on_is_not_over_with_the_outcomes(first: str) -> None:
    future = RunningSend(ticket(), ("kv",), time.monotonic() + 60)
    assert future.start()
    future.enter()
    outcomes = np.array([Outcome.TIMEOUT], np.uint8)
    if first == "run":
        future.finish(outcomes)
        assert future.wait(0)
        assert not future.completion().ended
        future.leave()
    else:
        future.leave()
        assert not future.ended
        future.finish(outcomes)
    assert future.completion().ended
