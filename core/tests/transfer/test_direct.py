from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from peers import LONG_S, Content, Peer, pages_for, settings, slots_for
from request_pools import HEADS, attention, draft, latent, peers, states, window
from shelf import Engine

from kvdock.batch import Outcome
from kvdock.errors import KvdockError
from kvdock.namespace import Namespace
from kvdock.pools.enums import DType, Layout
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard, every_shard
from kvdock.testing.direct_reference import DirectReference
from kvdock.transfer.direct import BusyError
from kvdock.transfer.expectation import (
    Expectation,
    ExpectedPart,
    PeerState,
    RequestState,
)
from kvdock.transfer.leases import PageLeases
from kvdock.transfer.messages import Completion

if TYPE_CHECKING:
    from kvdock.plugin.manifest import Manifest


def deliver(
    sender: Peer,
    receiver: Peer,
    request: Expectation,
    pages: Mapping[str, npt.ArrayLike],
    number: int = 0,
) -> None:
    """Send one ticket of a request, and complete it."""
    offers = receiver.direct.offers()
    future = sender.attachment.send(offers, request.tickets[number], pages)
    assert future.wait_quiet(LONG_S)
    receiver.direct.complete(future.completion().to_bytes())


def transferred(
    sender: Peer,
    receiver: Peer,
    content: Content,
    pages: Mapping[str, npt.ArrayLike],
    slots: Mapping[str, npt.ArrayLike],
) -> Expectation:
    sender.fill(content, pages)
    offers = [sender.direct.offers(receives=False)]
    request = receiver.attachment.expect(slots, offers)
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
    core = settings(direct={"verify": verify})
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
            offers = [one.direct.offers(receives=False) for one in prefill]
            span = receiver.grid("kv").parts[0].heads
            chosen = [
                n
                for n, one in enumerate(prefill)
                if max(span[0], one.grid("kv").parts[0].heads[0])
                < min(span[1], one.grid("kv").parts[0].heads[1])
            ]
            request = receiver.attachment.expect(slots, [offers[n] for n in chosen])
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
        offers = [sender.direct.offers(receives=False)]
        with pytest.raises(
            KvdockError, match="none of the 1 senders has k of layer 0, head 2"
        ):
            receiver.attachment.expect({"kv": [0]}, offers)
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
            receiver.attachment.expect(slots, [sender.direct.offers(receives=False)])


def test_a_sender_may_have_fewer_pages_than_a_request_has_positions() -> None:
    pools = [states(), attention()]
    content = Content(pools, 48, states=12)
    with peers(Peer(pools, 12), Peer(pools, 4)) as (receiver, sender):
        pages = np.full(12, -1)
        pages[-1] = 3
        offers = [sender.direct.offers(receives=False)]
        where = {"kv": np.arange(16), "mamba": pages}
        request = receiver.attachment.expect(where, offers)
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
        offers = sender.direct.offers(receives=False)
        with pytest.raises(KvdockError, match="the peer's pages have other bytes"):
            receiver.attachment.expect({"kv": [0]}, [offers])


def test_another_type_of_a_part_is_rejected_and_another_page_size_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvdock")
    narrow = [Part("k", DType.F16, (HEADS, 9), shard_axis=0), attention().parts[1]]
    with peers(
        Peer([attention()]), Peer([attention(8)]), Peer([attention(parts=narrow)])
    ) as (sender, receiver, other):
        offers = [sender.direct.offers(receives=False)]
        with pytest.raises(KvdockError, match="other bytes"):
            other.attachment.expect({"kv": [0]}, offers)
        for slot in (0, 8):
            receiver.attachment.expect({"kv": [slot]}, offers)
    said = [one for one in caplog.messages if "tokens here" in one]
    slots = "each token is sent to its slot"
    assert said == [f"pool kv: pages of 8 tokens here, of 4 at the peer: {slots}"]


class Garbling(DirectReference):
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
        offers = [sender.direct.offers(receives=False)]
        sender.fill(content, {"kv": [2, 3]})
        request = receiver.attachment.expect({"kv": np.arange(8)}, offers)
        theirs = receiver.direct.offers()
        future = sender.attachment.send(theirs, request.tickets[0], {"kv": [2, 3]})
        assert future.wait_quiet(LONG_S)
        receiver.direct.complete(attrs.evolve(future.completion(), digests={}))
        assert request.state is RequestState.CORRUPT


def test_a_request_that_cannot_be_taken_in_has_not_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = [attention()]
    content = Content(pools, 8)
    with peers(Peer(pools), Peer(pools)) as (sender, receiver):
        offers = [sender.direct.offers(receives=False)]
        sender.fill(content, {"kv": [2, 3]})
        request = receiver.attachment.expect({"kv": np.arange(8)}, offers)

        def fail(*_: object) -> bool:
            raise MemoryError

        monkeypatch.setattr(ExpectedPart, "arrive", fail)
        with pytest.raises(MemoryError):
            deliver(sender, receiver, request, {"kv": [2, 3]})
        assert request.state is RequestState.FAILED
        assert request.reason == "it could not be taken in"
        assert request.free


class Unlanded(DirectReference):
    """Wants every row in its slot, however short."""

    def manifest(self) -> Manifest:
        return attrs.evolve(super().manifest(), landing_run_bytes=0)


def test_scattered_slots_are_reached_by_whole_pages_and_a_copy() -> None:
    rng = np.random.default_rng(1)
    slots = slots_for("scattered", 32, 64, rng)
    content = Content([attention()], 32)
    rows = {}
    for plugin in (DirectReference, Unlanded):
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
            area = receiver.direct.pools["kv"].area
            assert area is None or area.used == 0
        rows[plugin] = sum(seen)
    assert rows[DirectReference] == 1
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
    core = settings(direct={"landing_bytes": attention().page_bytes(Shard()) * 4})
    with peers(Peer([attention()]), Peer([attention(1)], 64, core=core)) as two:
        sender, receiver = two
        offers = [sender.direct.offers(receives=False)]
        slots = np.arange(16)[::-1].copy()
        first = receiver.attachment.expect({"kv": slots}, offers)
        with pytest.raises(BusyError, match="landing area"):
            receiver.attachment.expect({"kv": slots + 16}, offers)
        assert receiver.attachment.leases("kv").leased_pages == 16
        content = Content([attention()], 16)
        sender.fill(content, {"kv": np.arange(4)})
        deliver(sender, receiver, first, {"kv": np.arange(4)})
        assert first.state is RequestState.ARRIVED
        receiver.attachment.expect({"kv": slots + 16}, offers)
        # What never fits goes to its slots directly.
        receiver.attachment.expect({"kv": np.arange(32, 64)[::-1].copy()}, offers)


def test_a_slot_that_is_expected_twice_is_busy() -> None:
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.direct.offers(receives=False)]
        receiver.attachment.expect({"kv": [0, 1]}, offers)
        with pytest.raises(BusyError, match="the page of a slot is in use"):
            receiver.attachment.expect({"kv": [2, 3]}, offers)
        with pytest.raises(KvdockError, match="given twice"):
            receiver.attachment.expect({"kv": [8, 8]}, offers)
        with pytest.raises(KvdockError, match="outside of 64"):
            receiver.attachment.expect({"kv": [64]}, offers)


def test_two_requests_send_the_same_prefix_at_once() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        pages = {"kv": np.array([5, 6])}
        sender.fill(content, pages)
        offers = [sender.direct.offers(receives=False)]
        requests = [
            receiver.attachment.expect({"kv": np.arange(8) + 8 * n}, offers)
            for n in range(4)
        ]
        theirs = receiver.direct.offers()
        futures = [
            sender.attachment.send(theirs, one.tickets[0], pages) for one in requests
        ]
        for future in futures:
            assert future.wait_quiet(LONG_S)
            assert future.ok
            receiver.direct.complete(future.completion())
        assert {one.state for one in requests} == {RequestState.ARRIVED}
        assert not sender.attachment.leases("kv").leased_pages


def test_an_aborted_request_holds_its_slots_until_its_sender_has_ended() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        pages = {"kv": np.array([5, 6])}
        sender.fill(content, pages)
        offers = [sender.direct.offers(receives=False)]
        slots = {"kv": np.arange(8)}
        request = receiver.attachment.expect(slots, offers)
        request.abort()
        assert request.wait(0) is RequestState.ABORTED
        assert not request.wait_free(0)
        assert receiver.direct.held_slots("kv") == 8
        with pytest.raises(BusyError):
            receiver.attachment.expect(slots, offers)
        deliver(sender, receiver, request, dict(pages))
        assert request.state is RequestState.ABORTED
        assert request.free
        assert not receiver.direct.held_slots("kv")
        receiver.attachment.expect(slots, offers)


def test_a_dead_sender_frees_its_slots_and_an_unknown_one_does_not() -> None:
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.direct.offers(receives=False)]
        dead = receiver.attachment.expect({"kv": np.arange(4)}, offers)
        unknown = receiver.attachment.expect({"kv": np.arange(4) + 4}, offers)
        dead.sender_lost(0, PeerState.DEAD)
        unknown.sender_lost(0, PeerState.UNKNOWN)
        assert dead.reason == "sender 0 is lost: dead"
        assert unknown.reason == "sender 0 is lost: unknown"
        assert dead.wait_free(LONG_S)
        assert not unknown.wait_free(0)
        assert receiver.direct.withdraw()
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
        offers = [sender.direct.offers(receives=False)]
        request = receiver.attachment.expect({"kv": np.arange(4)}, offers)
        receiver.direct.complete(
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
        assert timer.interval == receiver.direct.pools["kv"].manifest.send_drain_s
        timer.function(*timer.args)
        assert request.free


def test_held_slots_are_bounded() -> None:
    core = settings(direct={"max_held_percent": 25})
    with peers(Peer([attention()]), Peer([attention()], core=core)) as two:
        sender, receiver = two
        offers = [sender.direct.offers(receives=False)]
        for page in range(2):
            slots = {"kv": np.arange(8) + 8 * page}
            receiver.attachment.expect(slots, offers).sender_lost(0, PeerState.UNKNOWN)
        with pytest.raises(BusyError, match="16 slots are held for senders"):
            receiver.attachment.expect({"kv": [32]}, offers)
        assert receiver.direct.withdraw()
        receiver.attachment.expect({"kv": [32]}, offers)


def test_a_request_ends_by_its_deadline_and_a_late_completion_only_frees_it() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.direct.offers(receives=False)]
        request = receiver.attachment.expect(
            {"kv": np.arange(8)}, offers, timeout_s=0.05
        )
        assert request.wait(LONG_S) is RequestState.FAILED
        assert request.reason == "the deadline has passed"
        assert not request.wait_free(0)
        sender.fill(content, {"kv": [0, 1]})
        deliver(sender, receiver, request, {"kv": [0, 1]})
        assert request.state is RequestState.FAILED
        assert request.free


def test_a_completion_of_a_sender_that_still_writes_frees_nothing() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        offers = [sender.direct.offers(receives=False)]
        request = receiver.attachment.expect({"kv": np.arange(8)}, offers)
        sender.fill(content, {"kv": [0, 1]})
        theirs = receiver.direct.offers()
        future = sender.attachment.send(theirs, request.tickets[0], {"kv": [0, 1]})
        assert future.wait_quiet(LONG_S)
        ended = future.completion()
        receiver.direct.complete(
            attrs.evolve(ended, ended=False, outcomes={"kv": Outcome.TIMEOUT})
        )
        assert request.state is RequestState.FAILED
        assert not request.wait_free(0)
        receiver.direct.complete(ended)
        assert request.free
        assert request.state is RequestState.FAILED


def test_an_endpoint_that_was_closed_is_unavailable_and_a_new_one_works() -> None:
    content = Content([attention()], 8)
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        old = receiver.direct.offers()
        assert receiver.direct.withdraw()
        offers = [sender.direct.offers(receives=False)]
        request = receiver.attachment.expect({"kv": np.arange(8)}, offers)
        pages = {"kv": [0, 1]}
        sender.fill(content, pages)
        future = sender.attachment.send(old, request.tickets[0], pages)
        assert future.wait_quiet(LONG_S)
        assert future.outcomes["kv"] is Outcome.ERROR
        receiver.direct.complete(future.completion())
        assert request.state is RequestState.FAILED
        assert request.wait_free(LONG_S)
        again = transferred(sender, receiver, content, {"kv": [0, 1]}, {"kv": range(8)})
        assert again.state is RequestState.ARRIVED


def test_an_attachment_without_direct_pools_says_what_to_plan_with() -> None:
    with (
        Engine().attachment as cache,
        pytest.raises(KvdockError, match="direct_transfer=True"),
    ):
        cache.offer("kv")


def test_a_lease_for_reading_is_shared_and_excludes_others() -> None:
    leases = PageLeases(4)
    pages = np.array([1, 2])
    one, two = leases.share(pages), leases.share(pages[:1])
    assert one is not None
    assert two is not None
    assert leases.take_all(pages) is None
    one.end()
    one.end()
    assert leases.in_use([0, 1, 2]).tolist() == [False, True, False]
    two.end()
    taken = leases.take_all(pages)
    assert taken is not None
    assert leases.share(pages) is None
    taken.end()
    assert not leases.leased_pages
