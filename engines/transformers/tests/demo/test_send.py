"""The demo of direct transfer, but for its processes: choice, claims and handover."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock import ControlChannel, Dock, KvdockError
from kvdock.errors import PluginError, SettingsError
from kvdock_transformers.demo.records import to_json
from kvdock_transformers.demo.send.choice import Choice, choose_direct
from kvdock_transformers.demo.send.command import demo_send_of
from kvdock_transformers.demo.send.handover import Link
from kvdock_transformers.demo.send.presentation import as_object
from kvdock_transformers.demo.send.records import (
    Generated,
    PoolPages,
    Role,
    SendJob,
)
from kvdock_transformers.demo.send.roles import run_role
from kvdock_transformers.demo.send.verdicts import judge_sending
from kvdock_transformers.families import Family, Scale

LONG_S = 120.0


def dock(*names: str) -> Dock:
    return Dock.load(environ={"KVDOCK_PLUGINS": ",".join(names)})


def generated(role: Role, folder: Path) -> Generated:
    path = folder / f"{role}.npy"
    np.save(path, np.arange(6, dtype=np.float32).reshape(2, 3))
    return Generated(
        family=Family.MHA,
        role=role,
        prompt_tokens=133,
        prefix_tokens=128,
        computed_tokens=5 if role is Role.DECODE else 133,
        first_token_s=0.1,
        token_ids=(1, 2),
        logits_path=str(path),
        proposed=10,
        accepted=5,
        pools={
            "kv": PoolPages(pages=2, nbytes=8),
            "draft": PoolPages(pages=2, nbytes=4),
        },
        arrived=("draft", "kv"),
        arrived_bytes=12,
    )


def test_two_processes_that_agree_pass_every_check(tmp_path: Path) -> None:
    result = judge_sending(*(generated(role, tmp_path) for role in Role))
    assert [check for check in result.checks if not check.holds] == []
    found = json.loads(as_object([result], Choice("a", "why"), ""))
    assert (found["schema"], found["ok"]) == ("kvdock.demo-send/1", True)
    assert found["models"][0]["failed"] == []


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
    prefill, decode = (generated(role, tmp_path) for role in Role)
    result = judge_sending(prefill, attrs.evolve(decode, **change))
    assert not result.ok
    (failed,) = [check for check in result.checks if not check.holds]
    assert failed.claim.startswith(claim)


def test_logits_that_differ_by_one_bit_are_noticed(tmp_path: Path) -> None:
    prefill, decode = (generated(role, tmp_path) for role in Role)
    logits = np.load(decode.logits_path)
    logits[1, 2] = np.nextafter(logits[1, 2], np.float32(9))
    np.save(decode.logits_path, logits)
    result = judge_sending(prefill, decode)
    (failed,) = [check for check in result.checks if not check.holds]
    assert failed.claim.startswith("logits are bit-identical")


def test_without_a_backend_that_declares_it_the_error_says_what_to_install() -> None:
    with pytest.raises(KvdockError, match="no installed backend declares direct") as e:
        choose_direct(dock("file"))
    assert "pip install" in e.value.fix
    assert "kvdock list" in e.value.fix


def test_a_backend_that_does_not_declare_it_is_rejected_by_name() -> None:
    with pytest.raises(PluginError, match="'file' does not declare direct") as e:
        choose_direct(dock("file", "nixl"), "file")
    assert "Backends that do: nixl" in e.value.fix


def test_the_first_that_needs_no_server_is_chosen_and_the_others_are_named() -> None:
    found = choose_direct(dock("file", "mooncake", "nixl"))
    assert found.backend == "nixl"
    assert "needs no server" in found.reason
    assert "mooncake" in found.reason
    assert choose_direct(dock("nixl"), "nixl") == Choice("nixl", "asked for")


def test_a_library_that_is_missing_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    loaded = dock("nixl")
    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(KvdockError, match="nixl: NIXL is not installed"):
        choose_direct(loaded)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"model": "gpt"}, SettingsError, "gpt"),
        ({"size": "huge"}, SettingsError, "huge"),
        ({"set_": ["no_such=1"]}, SettingsError, "no_such"),
        ({"set_": ["quota"]}, SettingsError, "KEY=VALUE"),
        ({"directory": Path(__file__)}, SettingsError, "--dir"),
        ({"backend": "file"}, PluginError, "direct transfer"),
        ({"backend": "bogus"}, PluginError, "bogus"),
    ],
)
def test_bad_input_is_rejected_before_any_process_starts(
    given: dict[str, object], kind: type[KvdockError], words: str
) -> None:
    plain: dict[str, object] = {
        "model": "", "backend": "nixl", "set_": [], "directory": None,
        "as_json": False, "size": "tiny",
    }  # fmt: skip
    with pytest.raises(kind, match=words):
        demo_send_of(**{**plain, **given})  # type: ignore[arg-type]


def test_both_roles_hand_over_a_model_with_a_draft(tmp_path: Path) -> None:
    """Both in this process, over the backend's library."""
    ends = socket.socketpair()
    made: dict[Role, Generated] = {}
    plain = SendJob(
        role=Role.PREFILL,
        families=(Family.MHA,),
        scale=Scale.TINY,
        backend="nixl",
        directory=tmp_path,
        salt="a trial",
        threads=1,
        channel=-1,
        settings={"free_space": 0},
    )

    def work(role: Role, end: socket.socket) -> None:
        job = attrs.evolve(plain, role=role)
        with ControlChannel(end, time.monotonic() + LONG_S) as channel:
            done = run_role(job, Family.MHA, Link(channel), lambda _event: None)
            made[role] = Generated(**json.loads(json.dumps(to_json(done))))

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip(Role, ends, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    result = judge_sending(made[Role.PREFILL], made[Role.DECODE])
    assert [check for check in result.checks if not check.holds] == []
    assert result.decode.arrived == ("draft", "kv")


def test_loading_the_command_imports_nothing_heavy() -> None:
    module = "kvdock_transformers.demo.send.command"
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code]).decode().split())
    assert not loaded & {"torch", "transformers", "numpy", "rich", "typer"}
