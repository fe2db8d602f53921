"""What doctor and attaching say of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from object_server import Fault, ObjectServer

from kvdock import Finding, KvdockError
from kvdock_s3.client import ObjectClient
from kvdock_s3.round_trip import try_bucket

Make = Callable[..., ObjectClient]


def wrong(client: ObjectClient) -> list[Finding]:
    return [one for one in try_bucket(client, 5.0) if not one.ok]


def test_a_good_bucket_is_tried_and_left_as_it_was(
    server: ObjectServer, client: Make
) -> None:
    (found,) = try_bucket(client(), 5.0)
    assert found.ok
    assert "byte for byte" in found.what
    assert not server.objects
    kinds = {method for method, _ in server.requests}
    assert kinds == {"PUT", "GET", "HEAD", "LIST", "DELETEMANY"}


@pytest.mark.parametrize(
    ("methods", "action"),
    [
        (("PUT",), "s3:PutObject"),
        (("GET",), "s3:GetObject"),
        (("LIST",), "s3:ListBucket"),
        (("DELETEMANY",), "s3:DeleteObject"),
    ],
)
def test_a_missing_permission_is_named(
    server: ObjectServer, client: Make, methods: tuple[str, ...], action: str
) -> None:
    server.fail(Fault.FORBIDDEN, *methods)
    (found,) = wrong(client())
    assert "no permission to" in found.what
    assert action in found.hint


def test_all_missing_permissions_are_named_at_once(
    server: ObjectServer, client: Make
) -> None:
    server.fail(Fault.FORBIDDEN, "PUT", "LIST", "DELETEMANY")
    assert [one.what.split()[3] for one in wrong(client())] == [
        "put",
        "list",
        "delete",
    ]


def test_a_server_that_stores_framing_is_rejected(
    server: ObjectServer, client: Make, engine: Callable[..., Any]
) -> None:
    server.fail(Fault.FRAMED, "PUT")
    (found,) = wrong(client())
    assert "does not keep objects as they are" in found.what
    with pytest.raises(KvdockError, match="does not keep objects as they are"):
        engine()


def test_a_server_that_returns_other_bytes_is_rejected(
    server: ObjectServer, client: Make
) -> None:
    server.fail(Fault.FLIPPED, "GET")
    (found,) = wrong(client())
    assert "other bytes came back" in found.what


def test_a_server_that_ignores_conditions_is_named_with_the_setting(
    server: ObjectServer, client: Make
) -> None:
    server.fail(Fault.UNCONDITIONAL, "PUT")
    (found,) = wrong(client())
    assert "conditional_put" in found.hint
    assert not wrong(client(conditional_put=False))


def test_a_rejected_clock_is_named(server: ObjectServer, client: Make) -> None:
    server.fail(Fault.SKEWED, "PUT", "GET", "HEAD", "LIST", "DELETEMANY")
    (found,) = wrong(client())
    assert "clock" in found.what
    assert "NTP" in found.hint


@pytest.mark.parametrize(("minutes", "side"), [(5, "ahead of"), (-5, "behind")])
def test_a_clock_that_differs_is_named_before_it_is_rejected(
    server: ObjectServer, client: Make, minutes: int, side: str
) -> None:
    server.clock_ahead = timedelta(minutes=minutes)
    made = client()
    assert not wrong(made)
    (found,) = [one for one in try_bucket(made, 30) if one.warning]
    assert side in found.what


@pytest.mark.parametrize("minutes", [5, -14])
def test_a_clock_that_s3_accepts_does_not_stop_an_engine(
    server: ObjectServer, engine: Callable[..., Any], minutes: int
) -> None:
    server.clock_ahead = timedelta(minutes=minutes)
    engine()


def test_a_bucket_that_is_not_there_is_named(client: Make) -> None:
    (found,) = wrong(client(url="s3://other/tests"))
    assert found.what == "there is no bucket 'other'"


def test_a_server_without_deletions_of_many_is_named_with_the_setting(
    server: ObjectServer, client: Make
) -> None:
    server.fail(Fault.NOT_IMPLEMENTED, "DELETEMANY")
    (found,) = wrong(client())
    assert "bulk_delete" in found.hint
    assert not wrong(client(bulk_delete=False))


def test_an_endpoint_that_nothing_listens_at_is_one_finding(
    server: ObjectServer, client: Make
) -> None:
    server.stop()
    (found,) = wrong(client())
    assert "Connection refused" in found.what
    assert "endpoint" in found.hint


def test_no_finding_shows_a_secret(server: ObjectServer, client: Make) -> None:
    server.fail(Fault.FORBIDDEN, "PUT", "LIST", "DELETEMANY")
    one = client(secret_access_key="do-not-tell", session_token="nor-this")
    said = str(wrong(one)) + repr(one.settings)
    assert "do-not-tell" not in said
    assert "nor-this" not in said
