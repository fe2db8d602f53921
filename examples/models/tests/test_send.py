"""The demo that sends, but for its processes: choice, claims and handover."""

from __future__ import annotations

import json
import threading
import time
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock import Dock, KvdockError
from kvdock.errors import PluginError
from model_demo.backends import choose_sending
from model_demo.channel import Channel
from model_demo.families import Family, Scale
from model_demo.records import (
    SENDING,
    WIRE,
    Job,
    PoolRecord,
    Role,
    Served,
)
from model_demo.report import outcome
from model_demo.sending import hand_over
from model_demo.verdicts import Result, judge_sent

LONG_S = 120.0


def dock(*names: str) -> Dock:
    return Dock.load(environ={"KVDOCK_PLUGINS": ",".join(names)})


def generated(role: Role, folder: Path) -> Served:
    path = folder / f"{role}.npy"
    np.save(path, np.arange(6, dtype=np.float32).reshape(2, 3))
    return Served(
        family=Family.MHA,
        prompt_tokens=133,
        page_tokens=8,
        computed_tokens=5 if role is Role.DECODE else 133,
        ttft_s=0.1,
        token_ids=(1, 2),
        logits_path=str(path),
        proposed=10,
        accepted=5,
        pools={
            "kv": PoolRecord(loaded_pages=2, page_bytes=4),
            "draft": PoolRecord(loaded_pages=2, page_bytes=2),
        },
        arrived=("draft", "kv"),
        arrived_bytes=12,
    )


def judged(prefill: Served, decode: Served) -> Result:
    runs = {Role.PREFILL: prefill, Role.DECODE: decode}
    return judge_sent(
        Family.MHA, {role: {Family.MHA: one} for role, one in runs.items()}
    )


def test_two_processes_that_agree_pass_every_check(tmp_path: Path) -> None:
    result = judged(*(generated(role, tmp_path) for role in SENDING))
    assert [check for check in result.checks if not check.holds] == []
    found = outcome([result], "a", "why", "").data
    assert (found["schema"], found["ok"]) == ("kvdock.demo-send/1", True)
    (model,) = json.loads(json.dumps(found))["models"]
    assert model["failed"] == []


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"arrived": ("kv",)}, "every pool arrived whole"),
        ({"arrived_bytes": 11}, "as many bytes arrived"),
        ({"computed_tokens": 133}, "decode computed only"),
        ({"token_ids": (1, 3)}, "tokens are identical"),
        ({"accepted": 4}, "the draft is accepted as often"),
    ],
)
def test_each_claim_fails_by_name(
    tmp_path: Path, change: dict[str, Any], claim: str
) -> None:
    prefill, decode = (generated(role, tmp_path) for role in SENDING)
    result = judged(prefill, attrs.evolve(decode, **change))
    assert not result.ok
    (failed,) = [check for check in result.checks if not check.holds]
    assert failed.claim.startswith(claim)


def test_logits_that_differ_by_one_bit_are_noticed(tmp_path: Path) -> None:
    prefill, decode = (generated(role, tmp_path) for role in SENDING)
    logits = np.load(decode.logits_path)
    logits[1, 2] = np.nextafter(logits[1, 2], np.float32(9))
    np.save(decode.logits_path, logits)
    result = judged(prefill, decode)
    (failed,) = [check for check in result.checks if not check.holds]
    assert failed.claim.startswith("logits are bit-identical")


def test_without_a_backend_that_declares_it_the_error_says_what_to_install() -> None:
    with pytest.raises(KvdockError, match="no installed backend declares peers") as e:
        choose_sending(dock("file"))
    assert "pip install" in e.value.fix
    assert "kvdock list" in e.value.fix


def test_a_backend_that_does_not_declare_it_is_rejected_by_name() -> None:
    with pytest.raises(PluginError, match="'file' does not declare peers") as e:
        choose_sending(dock("file", "nixl"), "file")
    assert "Backends that do: nixl" in e.value.fix


def test_the_first_that_needs_no_server_is_chosen_and_the_others_are_named() -> None:
    backend, reason = choose_sending(dock("file", "mooncake", "nixl"))
    assert backend == "nixl"
    assert "needs no server" in reason
    assert "mooncake" in reason
    assert choose_sending(dock("nixl"), "nixl") == ("nixl", "asked for")


def test_a_library_that_is_missing_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    loaded = dock("nixl")
    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(KvdockError, match="nixl: NIXL is not installed"):
        choose_sending(loaded)


@pytest.mark.slow
def test_both_roles_hand_over_a_model_with_a_draft(tmp_path: Path) -> None:
    """Both in this process, over the backend's library."""
    ends = Pipe()
    made: dict[Role, Served] = {}
    plain = Job(
        role=Role.PREFILL,
        families=(Family.MHA,),
        scale=Scale.TINY,
        backend="nixl",
        directory=tmp_path,
        salt="a trial",
        threads=1,
        settings={"free_space": 0},
    )

    def work(role: Role, end: Connection) -> None:
        job = attrs.evolve(plain, role=role)
        with end:
            channel = Channel(end, time.monotonic() + LONG_S)
            done = hand_over(job, Family.MHA, channel, lambda _event: None)
            wire = json.dumps(WIRE.unstructure(done))
            made[role] = WIRE.structure(json.loads(wire), Served)

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip(SENDING, ends, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    result = judged(made[Role.PREFILL], made[Role.DECODE])
    assert [check for check in result.checks if not check.holds] == []
    assert result.runs[Role.DECODE].arrived == ("draft", "kv")
