"""Whole attachments over a real cluster: a restart, and an owner that freezes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdock import Attachment, Dock, DType, Namespace, Outcome, PoolSpec, Region, Shard
from kvdock.config import CoreSettings, Deadlines
from kvdock.former_generations import FormerGenerations
from kvdock.generations import Generation
from kvdock.pools import Part, Per
from kvdock_mooncake.server import Server, start_owner

pytestmark = pytest.mark.mooncake

ENGINE = Path(__file__).with_name("engine.py")
PAGES, PAGE_BYTES = 8, 64 << 10
HASHES = [f"{page:064x}" for page in range(PAGES)]
GET_S = 1.0


def ran(master: Server, what: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(ENGINE), master.address, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_restarted_engine_restores_target_and_late_draft(serve: Any) -> None:
    """Two processes: what draft acceptance after a restart hangs on."""
    master = serve()
    own = start_owner(master.address, 64 << 20)
    stored = ran(master, "put")
    for pool in ("target", "draft"):
        assert stored[pool] == {"found": 0, "good": 24, "same": True}
    restored = ran(master, "get")
    for pool in ("target", "draft", "again"):
        assert restored[pool] == {"found": 24, "good": 24, "same": True}
    assert restored["clients"] == 1, "a late pool shares the process's client"
    own.stop()


def test_a_frozen_owner_holds_pages_back_until_late_bytes_cannot_land(
    serve: Any, freeze: Any, eventually: Callable[..., Any]
) -> None:
    master = serve("-client_ttl=60")
    own = start_owner(master.address, 64 << 20)
    memory = np.random.default_rng(5).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)
    wanted = memory.copy()
    dock = Dock.load(require=("mooncake",))
    attachment = attach(
        dock,
        memory,
        {"master": master.address, "segment_bytes": 0, "lease_s": 0.5},
        Namespace(model="frozen"),
    )
    places = {"kv": np.arange(PAGES)}
    assert attachment.put(HASHES, places).pages == PAGES
    freeze(own.process.pid)
    try:
        began = time.monotonic()
        moved = attachment.get(HASHES, places)
        assert time.monotonic() - began < GET_S + 2
        assert set(moved.outcomes["kv"]) == {Outcome.TIMEOUT}
        assert moved.pages == 0
        # The library may still write there: these pages stay leased.
        assert attachment.leases("kv").leased_pages == PAGES
        refused = attachment.get(HASHES, places)
        assert set(refused.outcomes["kv"]) <= {Outcome.REFUSED, Outcome.UNAVAILABLE}
        assert not attachment.wait_idle(0.0)
    finally:
        os.kill(own.process.pid, signal.SIGCONT)
    eventually(lambda: attachment.leases("kv").leased_pages == 0, within_s=70)
    assert attachment.wait_idle(60)
    memory[:] = 0
    eventually(lambda: attachment.get(HASHES, places).pages == PAGES)
    assert np.array_equal(memory, wanted)
    assert attachment.close()
    own.stop()


def test_pages_of_a_private_generation_go_as_it_is_left_and_those_of_a_run_stay(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing lists a cluster's namespaces, so each goes while it is open."""
    master = serve()
    own = start_owner(master.address, 64 << 20)
    settings = {"master": master.address, "segment_bytes": 0, "lease_s": 0.5}
    dock = Dock.load(require=("mooncake",))
    given = SimpleNamespace(used=("mooncake",), backends={"mooncake": settings})
    former = FormerGenerations("policy", 1, dock, given)  # type: ignore[arg-type]  # what it reads of it
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    stays = ["", Generation(run="policy", version="7").text]
    opened = {
        text: attach(dock, memory, settings, Namespace(model="rl", generation=text))
        for text in (*stays, Generation.private().text, Generation.private().text)
    }
    for one in opened.values():
        assert one.put(HASHES, {"kv": np.arange(PAGES)}).pages == PAGES
    *others, left, _ = opened.values()
    former.leave([*others, left])
    former.delete([])
    found = [
        int(one.pools_by_name["kv"].exists(HASHES, time.monotonic() + 5).sum())
        for one in opened.values()
    ]
    assert found == [PAGES, PAGES, 0, PAGES]
    for one in opened.values():
        one.close()
    own.stop()
    assert "stay until mooncake evicts them" not in caplog.text


def attach(
    dock: Dock, memory: Any, settings: dict[str, object], space: Namespace
) -> Attachment:
    """Attach memory as a pool of single pages."""
    pool = PoolSpec(
        name="kv",
        kind="mla",
        parts=(Part("kv", DType.U8, (PAGE_BYTES,), per=Per.PAGE),),
        layers=(0,),
        page_tokens=1,
        anchor=True,
    )
    return Attachment.open(
        dock,
        dock.plan([pool], Shard(), ("mooncake",)),
        space,
        {"kv": Region.of(pool, Shard(), (memory,), PAGES)},
        {"mooncake": settings},
        core=CoreSettings(deadlines=Deadlines(get=GET_S)),
    )
