"""What a backend's library has to do for transfers to peers, without a core above."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

import numpy as np
import peer_fuzz
import pytest
from peer_processes import PeerProcess, connected, memory_file, two_processes
from peer_trials import run, settings_of
from peers import LONG_S
from waiting import until

from kvdock import Outcome
from kvdock.errors import KvdockError

BYTES = 64 << 20
PIECES = 16
STOPS = 20
POISONED = MappingProxyType({"MALLOC_PERTURB_": "165"})
"""Memory that a library has freed is overwritten: to use it ends the process."""
LONG = "TESTS_OF_KVDOCK_TORTURE"
MANY = "TESTS_OF_KVDOCK_DIRECT_TRANSFERS"
MANY_S = 3600.0
MUTATIONS = "TESTS_OF_KVDOCK_DIRECT_MUTATIONS"
RESTARTS = "TESTS_OF_KVDOCK_DIRECT_RESTARTS"
GROWN_MIB = 512
"""Memory that no number of changed messages may take."""

long_form = pytest.mark.skipif(
    LONG not in os.environ, reason=f"90 s: make torture-direct sets {LONG}"
)

Pair = tuple[PeerProcess, PeerProcess]


def all_memory(base: int) -> tuple[list[int], list[int], list[int]]:
    """Return the rows that send everything in a few large pieces."""
    each = BYTES // PIECES
    local = [number * each for number in range(PIECES)]
    return local, [base + at for at in local], [each] * PIECES


def check_trial(backend: str, transfers: int) -> None:
    """Send requests between random layouts; no byte may be wrong.

    Where the environment asks for many transfers, all of them have to be made.
    """
    wanted = int(os.environ.get(MANY, "0"))
    most_s = MANY_S if wanted else LONG_S
    with settings_of(backend) as given:
        found = run(backend, wanted or transfers, 1, given, most_s)
    sys.stdout.write(f"\n{found}\n")
    assert found["transfers"] >= wanted
    assert found["wrong bytes"] == 0
    assert found["requests lost"] == 0
    assert found["requests arrived"] > 0
    again = {name: n for name, n in found.items() if name.startswith("tickets ")}
    assert sum(again.values()) > 0
    assert not [name for name in again if name.endswith("sent")]


def check_mutations(backend: str, mutations: int) -> None:
    """Give changed messages to both sides of a backend; see `peer_fuzz`."""
    wanted = int(os.environ.get(MUTATIONS, "0")) or mutations
    with settings_of(backend) as given:
        found = peer_fuzz.run(backend, wanted, 1, given)
    sys.stdout.write(f"\n{found}\n")
    assert found["grown_mib"] < GROWN_MIB
    for kind in ("offer", "ticket", "completion"):
        assert found[f"{kind} rejected"] > 0


class PeerContract:
    """Run by each backend that writes into a peer's memory."""

    backend = ""
    settings: Mapping[str, object] = MappingProxyType({})
    unavailable_within_s = 5.0
    restarts_within = 1
    """For how many endpoints a receiver that is restarted has ports."""
    ends_late_by_s = 6.0
    """How long after its deadline a call may end that cannot be cut short."""

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        """A sender and a receiver of 64 MiB each."""
        given = dict(self.settings)
        with two_processes(self.backend, BYTES, given, POISONED) as both:
            yield both

    def test_rows_land_where_they_belong_and_nowhere_else(self, pair: Pair) -> None:
        sender, receiver = pair
        sender.call("fill", 1)
        base = connected(sender, receiver)
        rng = np.random.default_rng(2)
        for rows, most in ((1, 64), (3000, 2000), (40, 300_000)):
            receiver.call("set", 0)
            cell = BYTES // rows
            sizes = rng.integers(1, min(most, cell), rows)
            local = rng.integers(0, BYTES - most, rows)
            remote = rng.permutation(rows) * cell
            outcomes, held, _ = sender.call("send", local, base + remote, sizes)
            assert (set(outcomes), held) == ({Outcome.OK}, False)
            expected = np.zeros(BYTES, np.uint8)
            for at, to, nbytes in zip(local, remote, sizes, strict=True):
                expected[to : to + nbytes] = sender.memory[at : at + nbytes]
            assert np.array_equal(expected, receiver.memory)

    def test_memory_that_was_not_attached_or_offered_is_refused(
        self, pair: Pair
    ) -> None:
        sender, receiver = pair
        sender.call("set", 7)
        base = connected(sender, receiver)
        local, remote = (
            [0, BYTES - 5, 0, 100],
            [base, base, base + BYTES - 5, base + 99],
        )
        outcomes, held, _ = sender.call("send", local, remote, [10] * 4)
        refused = Outcome.REFUSED
        assert outcomes == [Outcome.OK, refused, refused, Outcome.OK]
        assert not held
        assert np.count_nonzero(receiver.memory) == 20

    def test_a_forked_child_is_refused_at_once(self, pair: Pair) -> None:
        sender, receiver = pair
        base = connected(sender, receiver)
        found = sender.call("fork", "send", [0], [base], [10])
        assert found.startswith(f"([{int(Outcome.UNAVAILABLE)}], False")
        assert "fork" in sender.call("fork", "endpoint")
        assert "fork" in sender.call("fork", "connect", b"")
        assert sender.call("send", [0], [base], [10])[0] == [Outcome.OK]

    @pytest.mark.parametrize("wrong", [b"", b"[]\n", b"\x00" * 100, b'["x"'])
    def test_an_endpoint_that_is_none_is_rejected(self, wrong: bytes) -> None:
        with (
            two_processes(self.backend, 1 << 16, dict(self.settings)) as (sender, _),
            pytest.raises(KvdockError, match="not one of the"),
        ):
            sender.call("connect", wrong)

    @pytest.mark.slow
    def test_a_killed_receiver_is_noticed_at_once(self, pair: Pair) -> None:
        sender, receiver = pair
        base = connected(sender, receiver)
        endpoint, _ = receiver.call("endpoint")
        sender.call("begin", 1, *all_memory(base))
        receiver.kill()
        outcomes, _, took = sender.call("end", 1)
        assert set(outcomes) <= {Outcome.UNAVAILABLE, Outcome.OK}
        assert took < self.unavailable_within_s
        for _ in range(3):
            outcomes, held, took = sender.call("send", [0], [base], [10])
            assert outcomes == [Outcome.UNAVAILABLE]
            assert took < self.unavailable_within_s
        assert not held, "nothing was sent"
        with pytest.raises(KvdockError, match="no peer is reached"):
            sender.call("connect", endpoint)

    @pytest.mark.slow
    def test_a_withdrawn_pool_takes_nothing_until_it_is_offered_again(
        self, pair: Pair
    ) -> None:
        sender, receiver = pair
        sender.call("set", 7)
        base = connected(sender, receiver)
        assert sender.call("send", [0], [base], [10])[0] == [Outcome.OK]
        assert receiver.call("withdraw") is True
        receiver.call("set", 0)
        outcomes, _, took = sender.call("send", [0], [base], [10])
        assert outcomes == [Outcome.UNAVAILABLE]
        assert took < self.unavailable_within_s
        assert not receiver.memory.any()
        again, _ = receiver.call("endpoint")
        number = sender.call("connect", again)
        found = sender.call("send", [0], [base], [10], 30.0, number)
        assert found[0] == [Outcome.OK]
        assert sender.call("disconnect", number) is True

    def within(self, endpoints: int) -> dict[str, str]:
        """Return an environment with ports for so many endpoints."""
        raise NotImplementedError

    @contextmanager
    def receivers(
        self, path: str, endpoints: int
    ) -> Iterator[Callable[[], PeerProcess]]:
        """Yield what starts a receiver; all have the same ports, for so many."""
        environment = self.within(endpoints)
        with ExitStack() as started:

            def start() -> PeerProcess:
                given = dict(self.settings)
                one = PeerProcess(self.backend, path, given, environment=environment)
                return started.enter_context(one)

            yield start

    def check_nothing_came(self, receiver: PeerProcess, value: int = 3) -> None:
        """Look that memory which was given away holds what its owner has written."""
        for _ in range(10):
            wrong = np.count_nonzero(receiver.memory != value)
            assert not wrong, f"{wrong} bytes landed in memory that was given away"
            time.sleep(0.02)
        assert receiver.call("endpoint"), "the receiver lives"

    def test_an_endpoint_of_before_a_withdrawal_reaches_no_later_one(
        self,
    ) -> None:
        """The ports are so few that another endpoint would have the same ones."""
        with (
            memory_file(BYTES) as mine,
            memory_file(BYTES) as theirs,
            PeerProcess(self.backend, mine, dict(self.settings)) as sender,
            self.receivers(theirs, 2) as start,
        ):
            receiver = start()
            sender.call("set", 7)
            old, base = receiver.call("endpoint")
            linked = sender.call("connect", old)
            assert receiver.call("withdraw") is True
            receiver.call("set", 3)
            new, _ = receiver.call("endpoint")
            outcomes, _, _ = sender.call("send", [0], [base], [4096], 5.0, linked)
            assert outcomes != [Outcome.OK]
            with pytest.raises(KvdockError, match="no peer is reached"):
                sender.call("connect", old, 3.0)
            self.check_nothing_came(receiver)
            number = sender.call("connect", new)
            found = sender.call("send", [0], [base], [10], 30.0, number)
            assert found[0] == [Outcome.OK]

    @pytest.mark.slow
    def test_an_endpoint_whose_ports_another_one_has_reaches_nothing(self) -> None:
        """The ports stay bound for some time alone; then the proof is what counts."""
        with (
            memory_file(BYTES) as mine,
            memory_file(BYTES) as theirs,
            PeerProcess(self.backend, mine, dict(self.settings)) as sender,
            self.receivers(theirs, 1) as start,
        ):
            receiver = start()
            sender.call("set", 7)
            old, base = receiver.call("endpoint")
            assert receiver.call("withdraw") is True
            receiver.call("give_ports_back")
            receiver.call("set", 3)
            new, _ = receiver.call("endpoint")
            with pytest.raises(KvdockError, match="no peer is reached"):
                sender.call("connect", old, 3.0)
            self.check_nothing_came(receiver)
            number = sender.call("connect", new)
            found = sender.call("send", [0], [base], [10], 30.0, number)
            assert found[0] == [Outcome.OK]

    @pytest.mark.slow
    def test_a_restarted_receiver_gets_nothing_that_was_meant_for_the_last_one(
        self,
    ) -> None:
        """It has the same ports; what the old endpoint names may not be mapped."""
        with (
            memory_file(BYTES) as mine,
            memory_file(BYTES) as theirs,
            PeerProcess(self.backend, mine, dict(self.settings)) as sender,
            self.receivers(theirs, self.restarts_within) as start,
        ):
            sender.call("set", 7)
            receiver = start()
            old, _ = receiver.call("endpoint")
            # Killed with a connection, it would leave its port in use for a minute.
            receiver.call("release")
            receiver.kill()
            receiver = start()
            receiver.call("set", 3)
            receiver.call("endpoint")
            with pytest.raises(KvdockError, match="no peer is reached"):
                sender.call("connect", old, 3.0)
            self.check_nothing_came(receiver)

    @pytest.mark.slow
    def test_receivers_that_are_gone_leave_nothing_at_their_sender(self) -> None:
        restarts = int(os.environ.get(RESTARTS, "8"))
        held = []
        with (
            memory_file(1 << 16) as mine,
            memory_file(1 << 16) as theirs,
            PeerProcess(self.backend, mine, dict(self.settings)) as sender,
        ):
            for number in range(restarts):
                with PeerProcess(self.backend, theirs, dict(self.settings)) as receiver:
                    endpoint, base = receiver.call("endpoint")
                    sender.call("connect", endpoint)
                    sent = sender.call("send", [0], [base], [10], 30.0, number)
                    assert sent[0] == [Outcome.OK]
                held.append(sender.call("holds"))
        sys.stdout.write(f"\n{self.backend}: {held[0]} to {held[-1]}\n")
        for first, last in zip(*np.array(held)[[2, -1]], strict=True):
            assert last <= first + 3, f"descriptors and threads: {held}"

    @pytest.mark.slow
    def test_nothing_lands_after_a_withdrawal_under_a_stopped_sender(
        self, pair: Pair
    ) -> None:
        """The sender is stopped further on in its pieces each time, and goes on later.

        Its library has rows left to write, and learns of the end: it must not go wrong.
        """
        sender, receiver = pair
        sender.call("set", 7)
        number, base = 0, connected(sender, receiver)
        landed, amid = receiver.memory[:: 1 << 16], 0
        for turn in range(STOPS):
            receiver.call("set", 0)
            sender.call("begin", turn, *all_memory(base), 30.0, number)
            until(lambda: np.count_nonzero(landed) > turn * len(landed) // STOPS)  # noqa: B023 - called at once
            sender.stop()
            begun = np.count_nonzero(receiver.memory[:: 1 << 12])
            assert receiver.call("withdraw") is True
            # Another request has these slots by now.
            receiver.call("set", 3)
            sender.go_on()
            outcomes, _, _ = sender.call("end", turn)
            assert np.all(receiver.memory == 3), "bytes landed after the withdrawal"
            amid += bool(begun < BYTES >> 12 and Outcome.UNAVAILABLE in outcomes)
            endpoint, _ = receiver.call("endpoint")
            number = sender.call("connect", endpoint)
        assert amid, "the sender was never stopped in the middle"

    def stopped_receiver(self, pair: Pair, stopped_s: float, within_s: float) -> None:
        """Send to a receiver that is stopped, and look what lands when it goes on."""
        sender, receiver = pair
        sender.call("set", 7)
        base = connected(sender, receiver)
        receiver.stop()
        began = time.monotonic()
        outcomes, held, took = sender.call("send", *all_memory(base), within_s)
        assert not set(outcomes) & {Outcome.OK}
        assert held, "bytes may lie in sockets"
        assert took < within_s + self.ends_late_by_s
        # The call has ended: its memory belongs to another request now.
        sender.call("set", 5)
        again = sender.call("send", [0], [base], [10], 1.0)
        assert again[0] != [Outcome.OK]
        time.sleep(max(0.0, stopped_s - (time.monotonic() - began)))
        receiver.go_on()
        # Until the connection works again: whatever was left would be sent by then.
        until(lambda: sender.call("send", [0], [base], [10], 2.0)[0] == [Outcome.OK])
        assert receiver.call("withdraw") is True
        counts = np.bincount(receiver.memory, minlength=8)
        assert counts[5] == 10, f"memory of another request was sent: {counts}"
        assert counts[0] + counts[5] + counts[7] == BYTES
        receiver.call("set", 3)
        endpoint, _ = receiver.call("endpoint")
        number = sender.call("connect", endpoint)
        assert sender.call("send", [0], [base], [10], 30.0, number)[0] == [Outcome.OK]
        assert np.bincount(receiver.memory, minlength=6)[[3, 5]].tolist() == [
            BYTES - 10,
            10,
        ]

    @pytest.mark.slow
    def test_a_send_to_a_stopped_receiver_ends_and_frees_its_memory(
        self, pair: Pair
    ) -> None:
        self.stopped_receiver(pair, 0.0, 2.0)

    @long_form
    @pytest.mark.slow
    def test_the_same_with_a_receiver_that_is_stopped_for_75_s(
        self, pair: Pair
    ) -> None:
        self.stopped_receiver(pair, 75.0, 30.0)

    @pytest.mark.slow
    def test_a_stopped_receiver_is_not_connected_to_for_ever(self, pair: Pair) -> None:
        sender, receiver = pair
        endpoint, base = receiver.call("endpoint")
        receiver.stop()
        began = time.monotonic()
        with pytest.raises(KvdockError, match="peer"):
            sender.call("connect", endpoint, 1.5)
        assert time.monotonic() - began < 1.5 + self.unavailable_within_s
        receiver.go_on()
        sender.call("connect", endpoint, 30.0)
        assert sender.call("send", [0], [base], [10])[0] == [Outcome.OK]

    @pytest.mark.slow
    def test_a_release_ends_everything(self, pair: Pair) -> None:
        sender, receiver = pair
        base = connected(sender, receiver)
        receiver.call("release")
        assert sender.call("send", [0], [base], [10])[0] == [Outcome.UNAVAILABLE]
        sender.call("release")
        assert sender.call("send", [0], [base], [10])[0] != [Outcome.OK]
