"""vLLM's API server behind `kvdock run`, and what its clients and operator can do.

Two lives tell two stories, as starting a server costs more than all steps of one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import vllm_environment
import vllm_models
from scenes import unlike_others
from test_families import on_files
from vllm_lives import Lives, prompts
from vllm_server import Server, serving

KVDOCK = str(Path(sys.executable).with_name("kvdock"))


def settings_of(folder: Path) -> list[str]:
    """Spell the settings of a store as the words of `kvdock run`."""
    settings = {
        "plugin": "file",
        "root": folder / "store",
        "free_space": "1 MiB",
        "quota": "4 MiB",  # 256 pages
        "host_memory": "16 MiB",
        "core.observers": "journal",
        "observers.journal.dir": folder / "journal",
        # On a busy machine a call of the default deadline may be a miss.
        **{f"core.deadlines.{call}": "60 s" for call in ("exists", "get", "put")},
    }
    return [
        word
        for name, value in settings.items()
        for word in ("--set", f"{name}={value}")
    ]


def served(folder: Path, model: Path, life: str) -> AbstractContextManager[Server]:
    """Start a server with one word in front of its command."""
    start = (KVDOCK, "run", *settings_of(folder), "--")
    return serving(model, {}, folder / f"{life}.log", start=start)


def separating(folder: Path, model: Path, dtype: str) -> list[str]:
    """Return the fields that separate a new command from what is stored."""
    command = [KVDOCK, "route", "--namespace", "--json", *settings_of(folder), "--"]
    command += f"vllm serve {model} --dtype {dtype} --max-model-len 512".split()
    command += ["--block-size", "32", "--enforce-eager", "--port", "1"]
    done = subprocess.run(
        command,
        env={**os.environ, **vllm_environment.CPU},
        stdout=subprocess.PIPE,
        check=False,
    )
    nearest = json.loads(done.stdout)["compared"]["target"]
    assert done.returncode == bool(nearest["differences"])
    return [difference["field"] for difference in nearest["differences"]]


def kvdock(*words: object) -> tuple[int, dict[str, Any]]:
    """Run a command of kvdock; return its exit code and what it prints."""
    command = [KVDOCK, *map(str, words), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, found


def ask_why_and_audit(server: Server, folder: Path) -> None:
    """Ask commands why a prompt did not hit, and whether what is restored is right."""
    some = [
        [*one, *range(7, 7 + rest)]
        for one, rest in zip(prompts(96), (0, 31), strict=False)
    ]
    given, new, short = (folder / name for name in ("given", "new", "short"))
    given.write_text("\n".join(map(json.dumps, some)))
    new.write_text(json.dumps([3 * one % 200 + 5 for one in range(128)]))
    short.write_text(json.dumps(some[0][:31]))
    for prompt in some:
        server.complete(prompt)
    assert server.keys_soon("put", 3 + 4) >= 3 + 4
    why = ("why", "--journal", folder / "journal", "--url", server.url, "--prompt")
    code, found = kvdock(*why, new)
    assert (code, found["pools"][0]["cause"]) == (1, "never_stored"), found
    code, found = kvdock(*why, short)
    assert code == 1
    assert found["verdict"].startswith("The prompt is one token short of a page")
    server.reset()
    stored = server.keys("put")
    code, found = kvdock("audit", server.url, "--prompts", given, "--rate", 100)
    assert code == 0, found
    assert (found["engine"], found["restored"]) == ("vllm", 2)
    assert found["restored_tokens"] >= 2 * 64
    assert found["largest"] < 1e-3
    # What was computed anew is not stored: the next prompt's pages are the next.
    server.complete([11 * one % 200 + 5 for one in range(96)])
    assert server.keys_soon("put", int(stored) + 3) == stored + 3
    server.reset()
    code, found = kvdock(*why, given.with_name("one"))  # no such file
    assert code == 2
    (folder / "one").write_text(json.dumps(some[0]))
    code, found = kvdock(*why, folder / "one")
    assert (code, found["ok"]) == (0, True), found


def hinted(kind: str, **payload: Any) -> dict[str, Any]:
    """Return the parameter with which a client sends one hint."""
    action = {
        "action_id": "1",
        "action_type": f"kvdock.{kind}",
        "action_version": "1",
        "payload": payload,
    }
    given = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    return {"kv_transfer_params": {"kvdock": given}}


def follow_hints(server: Server) -> None:
    """What is retained survives its neighbours, and what has expired is computed."""
    retained, neighbour, other, *rest = (
        unlike_others(number, 129) for number in range(1, 9)
    )
    flood = [unlike_others(number, 900) for number in range(30, 46)]
    # One is promised when it is stored, the other one afterwards.
    first = server.ask(retained, **hinted("retain", keep_s=3600))
    server.ask(neighbour)
    server.ask(other)
    assert server.keys_soon("put", 12) >= 12
    server.ask(other, **hinted("retain", keep_s=3600))
    pages = {"name": "hint_pages_total", "answer": "accepted"}
    assert server.soon(4, action="stored", **pages) >= 4
    assert server.soon(4, action="kvdock.retain", **pages) == 4
    server.reset()
    assert server.ask(neighbour)[1] == 128
    for prompt in flood:
        server.complete(prompt)
    assert server.keys_soon("put", 12 + 28 * len(flood)) > 400
    server.reset()
    assert server.ask(neighbour)[1] == 0
    assert server.ask(other)[1] == 128
    assert server.ask(retained) == (first[0], 128)
    # From now on a page is gone when its time is over.
    head, whole, soon = rest[0][:64], rest[0], rest[1]
    server.ask(whole, **hinted("expire", after_s=3600))
    server.ask(soon, **hinted("expire", after_s=3))
    over_s = time.monotonic() + 3
    assert server.soon(4 + 8, action="stored", **pages) >= 4 + 8
    server.reset()
    assert server.ask(whole)[1] == 128
    # Its head stays, for others that share it.
    server.ask(whole, **hinted("forget", from_token=64))
    assert server.soon(1, action="kvdock.forget", **pages) >= 2
    while time.monotonic() < over_s:
        time.sleep(0.05)
    server.reset()
    assert server.ask(soon)[1] == 0
    assert server.ask([*head, 9])[1] == 64
    assert server.ask(whole)[1] == 64
    wrong: dict[str, Any] = {"kv_transfer_params": {"kvdock": {"actions": 3}}}
    assert server.ask(retained, **wrong)[0] == first[0]
    assert server.soon(1, "hints_total", outcome="malformed") == 1


def test_servers_behind_one_word(lives: Lives, tmp_path: Path) -> None:
    model = vllm_models.make(vllm_models.FAMILIES["llama"], lives.models)
    prompt = prompts(100)[0]
    with served(tmp_path, model, "first") as server:
        first = server.complete(prompt)
        assert server.keys_soon("put", 3) >= 3
        assert server.keys("get") == 0
        server.reset()
        assert server.complete(prompt) == first
        assert server.keys_soon("get", 3) >= 3
        metrics = server.get("/metrics")
        ask_why_and_audit(server, tmp_path)
    said = server.log.read_text()
    assert "kvdock adds to the command:\n" in said
    assert "--kv-transfer-config" in said
    assert server.process.returncode in (0, -signal.SIGTERM), said
    shown = set(re.findall(r"^vllm:kvdock_\w+", metrics, re.MULTILINE))
    assert {"vllm:kvdock_keys_total", "vllm:kvdock_bytes_total"} <= shown, shown
    with served(tmp_path, model, "second") as server:
        assert server.complete(prompt) == first, "restored after a restart"
        assert server.keys_soon("get", 3) >= 3
        follow_hints(server)
    # A rollout is tried before it.
    assert separating(tmp_path, model, "float32") == []
    assert separating(tmp_path, model, "bfloat16") == ["page_format.model_config.dtype"]


@pytest.mark.slow
def test_two_replicas_share_one_store_with_each_other_and_with_one(
    lives: Lives, tmp_path: Path
) -> None:
    model = vllm_models.make(vllm_models.FAMILIES["llama"], lives.models)
    storage = on_files(tmp_path)
    prompt, other = prompts(100)
    two = ("--data-parallel-size", "2")
    with serving(model, storage, tmp_path / "two.log", *two) as server:
        right = [server.complete(prompt, 0), server.complete(other, 1)]
        for replica in (0, 1):
            assert server.keys_soon("put", 3, replica) >= 3
            assert server.keys("get", replica) == 0
        # What one replica has stored, the other one finds; no cache of its own has it.
        assert [server.complete(prompt, 1), server.complete(other, 0)] == right
        for replica in (0, 1):
            assert server.keys_soon("get", 3, replica) >= 3
    with serving(model, storage, tmp_path / "one.log") as server:
        assert [server.complete(prompt), server.complete(other)] == right
        assert server.keys_soon("get", 6) >= 6
