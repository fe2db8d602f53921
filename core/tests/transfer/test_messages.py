from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from peers import Peer
from request_pools import attention, peers

from kvdock.batch import Outcome
from kvdock.transfer.messages import (
    Completion,
    MessageError,
    Offer,
    PoolTicket,
    Ticket,
)


def messages() -> list[Any]:
    with peers(Peer([attention()])) as (one,):
        offer = one.direct.offer("kv")
    numbers = np.array([3, -1, 5], np.int64)
    parts = {"kv": PoolTicket(numbers), "swa": PoolTicket(numbers[:0], offer.grid)}
    ticket = Ticket(request="r", sender=1, digests=True, pools=parts)
    digests = {"kv": np.array([1 << 63, 0], np.uint64)}
    outcomes = {"kv": Outcome.OK, "swa": Outcome.TIMEOUT}
    completion = Completion(
        request="r", sender=1, ended=True, outcomes=outcomes, digests=digests
    )
    return [offer, ticket, completion]


def test_messages_come_back_from_their_bytes() -> None:
    for one in messages():
        again = type(one).from_bytes(one.to_bytes())
        assert again.to_bytes() == one.to_bytes()


def test_a_message_of_another_kind_or_cut_short_is_rejected() -> None:
    found = messages()
    for one in found:
        data = one.to_bytes()
        for kind in (Offer, Ticket, Completion):
            if kind is not type(one):
                with pytest.raises(MessageError, match="a peer sent what is not"):
                    kind.from_bytes(data)
        for end in range(0, len(data), 7):
            with pytest.raises(MessageError):
                type(one).from_bytes(data[:end])
        with pytest.raises(MessageError):
            type(one).from_bytes(b"x" + data)
        deep = b"[" * (1 << 19)
        with pytest.raises(MessageError):
            type(one).from_bytes(data[:4] + struct.pack("<I", len(deep)) + deep)
