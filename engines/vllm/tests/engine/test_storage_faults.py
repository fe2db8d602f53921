"""The engine while storage returns wrong bytes, fails or hangs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from test_families import on_files
from vllm_lives import Lives, tokens

DEADLINE_S = 1.0
PROMISE_S = 0.2
"""How much later than its deadline a job may be reported."""

STEP_S = 1.0
"""An engine that does nothing but wait looks at its jobs once a step; a machine that
other programs use may take so long for one."""


def flip_every_page(folder: Path) -> None:
    """Change a byte in each 512 of all stored bytes."""
    flipped = 0
    for path in folder.rglob("*.dat"):
        data = bytearray(path.read_bytes())
        for at in range(256, len(data), 512):
            data[at] ^= 0xFF
        path.write_bytes(data)
        flipped += 1
    assert flipped


def test_flipped_pages_are_computed_again_and_repaired(
    lives: Lives, tmp_path: Path
) -> None:
    storage = on_files(tmp_path)
    first = lives.run("flip-store", [lives.phase("swa_full", "first", storage)])
    flip_every_page(tmp_path)
    both = lives.run(
        "flip-load",
        [
            lives.phase("swa_full", "flipped", storage),
            lives.phase("swa_full", "repaired", storage),
        ],
    )
    right = tokens(first["first"]["rounds"][0])
    flipped, repaired = both["flipped"], both["repaired"]
    assert tokens(flipped["rounds"][0]) == right
    loads = {one: n for one, n in flipped["pages"].items() if "/load/" in one}
    assert loads
    assert not [one for one in loads if one.endswith("/ok")], loads
    assert flipped["attempts"] == 1
    assert tokens(repaired["rounds"][0]) == right
    loads = {one: n for one, n in repaired["pages"].items() if "/load/" in one}
    assert set(loads) == {"kv/load/ok", "swa/load/ok"}, loads


def faulty(storage: dict[str, Any], kind: str, operation: str) -> dict[str, Any]:
    """Return settings in which calls of one operation fail or hang."""
    deadline = f"{DEADLINE_S} s"
    return {
        **storage,
        "core": {
            "deadlines": {
                "exists": deadline,
                "get": deadline,
                "put": deadline,
                "close": "1 s",
            },
        },
        "wrap": [
            {
                "name": "faults",
                "kinds": [kind],
                "operations": [operation],
                "hang": "60 s" if kind == "hang" else "3 s",
            }
        ],
    }


FAULTS = [
    (kind, operation)
    for kind in ("hang", "drop")
    for operation in ("get", "put", "exists")
]


@pytest.fixture(scope="module")
def suffered(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answer a stored prompt beside a running request, under each fault."""
    folder = tmp_path_factory.mktemp("faults")
    storage = on_files(folder)
    stored = lives.run("faults-store", [lives.phase("llama", "stored", storage)])
    phases = [
        lives.phase(
            "llama",
            f"{kind}-{operation}",
            faulty(storage, kind, operation),
            scene="beside",
            new_tokens=16,
        )
        for kind, operation in FAULTS
    ]
    late = faulty(storage, "late", "get")
    phases.append(lives.phase("llama", "late", late, rounds=2, drain=True))
    return {**stored, **lives.run("faults-load", phases)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "operation"), FAULTS)
def test_every_request_ends_with_the_right_answer(
    kind: str, operation: str, suffered: dict[str, Any]
) -> None:
    found = suffered[f"{kind}-{operation}"]
    assert found["other"] == tokens(suffered["stored"]["rounds"][0])[0]
    assert found["attempts"] <= 1
    if operation == "get":
        assert not [one for one in found["pages"] if one.endswith("/load/ok")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "operation"), FAULTS)
def test_every_job_is_reported_at_its_deadline(
    kind: str, operation: str, suffered: dict[str, Any]
) -> None:
    jobs = suffered[f"{kind}-{operation}"]["jobs"]
    assert jobs or operation == "exists"
    for _, took_s, _ in jobs:
        assert took_s < DEADLINE_S + PROMISE_S + STEP_S


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "operation"), FAULTS)
def test_the_steps_of_a_running_request_take_at_most_twice_as_long(
    kind: str, operation: str, suffered: dict[str, Any]
) -> None:
    found = suffered[f"{kind}-{operation}"]
    # Lower quartiles: a step that another program interrupts says nothing.
    alone, *_ = statistics.quantiles(found["alone"])
    # A fault that is over at once leaves few steps or none to look at.
    if kind == "hang" and operation != "put":
        assert len(found["together"]) >= 10
        together, *_ = statistics.quantiles(found["together"])
        assert together < 2 * alone


@pytest.mark.slow
def test_late_bytes_of_a_page_do_not_reach_what_its_row_holds_now(
    suffered: dict[str, Any],
) -> None:
    """The second round loads from host rows that the late calls were given."""
    late = suffered["late"]
    right = tokens(suffered["stored"]["rounds"][0])
    assert [tokens(one) for one in late["rounds"]] == [right, right]
    assert all(one["cached"] for one in late["rounds"][1])
    assert not [one for one in late["pages"] if one.endswith("/load/ok")]
