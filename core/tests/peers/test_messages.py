"""Messages come back from their bytes, and nothing else is taken for one."""

from __future__ import annotations

import resource
import secrets
import time
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from peers import Peer
from request_pools import attention, peers

from kvdock.batch import Outcome
from kvdock.errors import SettingsError
from kvdock.peers.keys import MAC_BYTES, MessageKeys, UnsignedError
from kvdock.peers.messages import (
    MAX_MESSAGE_BYTES,
    Completion,
    Epoch,
    MessageError,
    Offer,
    PoolTicket,
    Ticket,
)

HEAD_BYTES = 4 + MAC_BYTES


def messages() -> list[Any]:
    with peers(Peer([attention()])) as (one,):
        offer = one.transfers.offer("kv")
    numbers = np.array([3, -1, 5], np.int64)
    ticket = Ticket(
        request="r",
        number=7,
        sender=1,
        claim="sender",
        epoch=Epoch("receiver", 5, (6,)),
        duration_s=2.5,
        digests=True,
        pools={"kv": PoolTicket(numbers), "swa": PoolTicket(numbers[:0], offer.grid)},
    )
    digests = {"kv": np.array([1 << 63, 0], np.uint64)}
    outcomes = {"kv": Outcome.OK, "swa": Outcome.TIMEOUT}
    completion = Completion(
        request="r", sender=1, ended=True, outcomes=outcomes, digests=digests
    )
    return [offer, ticket, completion]


def with_body(message: bytes, body: bytes) -> bytes:
    return message[:HEAD_BYTES] + body


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
        for wrong in (b"x" + data, data + b"x"):
            with pytest.raises(MessageError):
                type(one).from_bytes(wrong)


def changed(message: bytes, **fields: Any) -> bytes:
    """Replace fields of a message, as a peer of another mind would."""
    found = msgspec.msgpack.decode(message[HEAD_BYTES:])
    return with_body(message, msgspec.msgpack.encode({**found, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"duration_s": float("inf")},
        {"duration_s": float("nan")},
        {"duration_s": -1.0},
        {"number": -1},
        {"number": 1 << 60},
        {"sender": True},
        {"request": ""},
        {"request": "r" * 1000},
        {"claim": None},
        {"epoch": ["p", 1 << 60, []]},
        {"epoch": ["p", 1, [-1]]},
        {"pools": {"kv": [b"1234567", None]}},
        {"pools": {f"p{n}": [b"", None] for n in range(65)}},
        {"pools": {"kv": [b"", [["kv"]]]}},
        {"more": 1},
    ],
)
def test_a_ticket_with_a_field_out_of_bounds_is_rejected(fields: Any) -> None:
    _, ticket, _ = messages()
    with pytest.raises(MessageError):
        Ticket.from_bytes(changed(ticket.to_bytes(), **fields))


GRID = {"pages": 1, "page_tokens": 2, "layers": 4, "runs": 5, "rank": 7, "parts": 8}
"""Where a grid has what, as the format says."""
PART = {"row_bytes": 1, "outer": 2, "heads": 3, "bases": 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pages", 0),
        ("pages", 1 << 56),
        ("page_tokens", -1),
        ("layers", [0] * ((1 << 12) + 1)),
        ("runs", [-1, 0]),
        ("runs", [0, (1 << 12) + 1]),
        ("rank", [(1 << 12) + 1, 0]),
        ("parts", []),
        ("parts", 65),
        ("row_bytes", 0),
        ("outer", 1 << 56),
        ("heads", [0, -1]),
        ("bases", bytes(8 * ((1 << 12) + 1))),
    ],
)
def test_an_offer_with_a_field_out_of_bounds_is_rejected(
    field: str, value: Any
) -> None:
    offer = messages()[0].to_bytes()
    grid = msgspec.msgpack.decode(offer[HEAD_BYTES:])["grid"]
    parts = grid[GRID["parts"]]
    if field in PART:
        parts[0][PART[field]] = value
    else:
        grid[GRID[field]] = parts[:1] * value if field == "parts" and value else value
    with pytest.raises(MessageError, match=r"Expected .*\$\.grid"):
        Offer.from_bytes(changed(offer, grid=grid))


@pytest.mark.parametrize(
    ("number", "fields", "place"),
    [
        (0, {"endpoint": bytes((1 << 20) + 1)}, "endpoint"),
        (0, {"epoch": ["p", 1, [0] * ((1 << 16) + 1)]}, "epoch"),
        (1, {"pools": {"kv": [bytes(8 * ((1 << 22) + 1)), None]}}, "pools"),
        (2, {"digests": {"kv": bytes(8 * ((1 << 22) + 1))}}, "digests"),
        (2, {"outcomes": {f"p{n}": 0 for n in range(65)}}, "outcomes"),
        (2, {"outcomes": {"kv": 200}}, "outcomes"),
    ],
)
def test_more_than_a_message_may_have_is_rejected(
    number: int, fields: Any, place: str
) -> None:
    message = messages()[number]
    with pytest.raises(MessageError, match=rf"\$\.{place}"):
        type(message).from_bytes(changed(message.to_bytes(), **fields))


def array_of(count: int, item: bytes) -> bytes:
    """Return a MessagePack array."""
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * (60 << 20),
        array_of(60 << 20, b"\x00"),
        array_of(6 << 20, b"\xc4\x01a" * 2),
        b"\xdf" + (20 << 20).to_bytes(4, "big") + b"\xa1k\x00" * (20 << 20),
        b"\x81\xa4kind" + array_of(50 << 20, b"\xc0"),
    ],
    ids=["nested", "numbers", "texts", "map", "field"],
)
def test_60_mib_of_something_else_cost_next_to_nothing(body: bytes) -> None:
    """Of the format before: 8 to 34 s of processor time, and 1.5 GiB."""
    for one in messages():
        message = with_body(one.to_bytes(), body)
        before = resource.getrusage(resource.RUSAGE_SELF)
        with pytest.raises(MessageError):
            type(one).from_bytes(message)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
        assert after.ru_maxrss - before.ru_maxrss < 200 << 10


def test_a_message_above_the_bound_is_not_looked_at() -> None:
    began = time.process_time()
    with pytest.raises(MessageError, match="bytes"):
        Offer.from_bytes(b"kvd2" + bytes(MAX_MESSAGE_BYTES))
    assert time.process_time() - began < 1


def keys_of(path: Path, *lines: str) -> MessageKeys:
    path.write_text("\n".join(lines) + "\n")
    return MessageKeys(path)


def key() -> str:
    return secrets.token_hex(32)


def test_keys_are_rotated_without_a_restart(tmp_path: Path) -> None:
    old, new = key(), key()
    paths = tmp_path / "here", tmp_path / "there"
    here, there = (keys_of(path, "# keys", old) for path in paths)

    def works() -> bool:
        signed = attrs.evolve(messages()[2], keys=here).to_bytes()
        try:
            Completion.from_bytes(signed).check(there)
        except UnsignedError:
            return False
        return True

    assert works()
    steps = [[old, new], [new, old], [new]]
    for lines in steps:
        for path in paths:
            path.write_text("\n".join(lines))
            assert works()
    paths[1].write_text(key())
    assert not works()
    # What is not a file of keys changes nothing, until it is one again.
    paths[0].write_text("short")
    assert not works()
    paths[1].write_text(new)
    assert works()


def test_a_message_that_was_changed_or_not_signed_is_rejected(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys", key())
    for one in messages():
        with pytest.raises(UnsignedError, match="not signed with any key"):
            type(one).from_bytes(one.to_bytes()).check(keys)
        signed = attrs.evolve(one, keys=keys).to_bytes()
        assert type(one).from_bytes(signed).check(keys)
        assert type(one).from_bytes(signed).check(None)
    _, ticket, _ = messages()
    data = attrs.evolve(ticket, keys=keys).to_bytes()
    with pytest.raises(UnsignedError):
        Ticket.from_bytes(changed(data, number=8)).check(keys)


@pytest.mark.parametrize("text", ["", "# nothing", "short", "é" * 40, "k" * 31])
def test_a_file_without_keys_is_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text, "utf-8")
    with pytest.raises(SettingsError, match="key_file"):
        MessageKeys(path)
    with pytest.raises(SettingsError, match="key_file"):
        MessageKeys(tmp_path / "none")


def test_a_file_of_keys_that_is_away_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(tmp_path / "keys", key())
    (tmp_path / "keys").unlink()
    body = b"a message"
    for _ in range(50):
        keys.check(keys.sign(body), body)
    said = [one for one in caplog.messages if "not read again" in one]
    assert len(said) == 1


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_keys_that_others_can_read_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    path = tmp_path / "keys"
    path.write_text(key())
    path.chmod(mode)
    MessageKeys(path)
    assert len([one for one in caplog.messages if "chmod 600" in one]) == warnings
