"""SGLang's HTTP server behind `kvdock run`: what its clients and administrator can do.

Two lives tell two stories, as starting a server costs more than all steps of one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import engine_run
import environment
import lives
import pytest
import tiny_models

import kvdock_trace
from kvdock.child_processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.slow

KEY = "of the administrator"
STORAGE = "/hicache/storage-backend"
RESTORED = "kvdock_restored_prefix_pages_total"
KVDOCK = str(Path(sys.executable).with_name("kvdock"))
LAUNCH = (sys.executable, "-m", "sglang.launch_server")


@attrs.frozen
class Server:
    """SGLang's server on loopback, as an administrator sees it.

    Args:
        port: Where it listens.
        trace: Where it writes down what it moves.
    """

    port: int
    trace: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Send a request; return the status and the text of the answer.

        A request may still be on the engine's books when its answer has come.
        """
        deadline = time.monotonic() + 20
        while True:
            status, text = self._ask(method, path, body)
            if "scheduler is not idle" not in text or time.monotonic() > deadline:
                return status, text
            time.sleep(0.05)

    def _ask(self, method: str, path: str, body: object) -> tuple[int, str]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {KEY}",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - same
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def attach(self, **settings: object) -> tuple[int, str]:
        """Attach kvdock with these settings."""
        given = {
            "backend_name": "kvdock",
            "module_path": "kvdock_sglang",
            "class_name": "KvdockStorage",
            "prefetch_threshold": 16,
            **settings,
        }
        wanted = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(given),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_write_policy": "write_through",
        }
        return self.ask("PUT", STORAGE, wanted)

    def answer(self, prompt: list[int], **more: object) -> tuple[Any, int]:
        """Return what the model says, and how much of the prompt was cached."""
        sampling = {
            "temperature": 0,
            "max_new_tokens": lives.NEW_TOKENS,
            "ignore_eos": True,
        }
        asked = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            **more,
        }
        status, text = self.ask("POST", "/generate", asked)
        assert status == HTTPStatus.OK, text
        meta = json.loads(text)["meta_info"]
        rows = [(row[1], row[0]) for row in meta["output_token_logprobs"]]
        return rows, int(meta["cached_tokens"])

    def hint(self, kind: str, **payload: object) -> dict[str, object]:
        """Return the field of a request that carries one hint."""
        action = {
            "action_id": "1",
            "action_type": f"kvdock.{kind}",
            "action_version": "1",
            "payload": payload,
        }
        given = {"protocol_version": "1", "message_id": "m", "actions": [action]}
        return {"kv_hints": given}

    def soon(self, count: float, name: str, **labels: str) -> float:
        """Wait until a metric of kvdock has a value; return the one that it has."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        deadline = time.monotonic() + 60
        while True:
            found = sum(
                float(row.rsplit(" ", 1)[1])
                for row in self.ask("GET", "/metrics")[1].splitlines()
                if row.startswith(f"kvdock_{name}{{")
                and all(one in row for one in wanted)
            )
            if found >= count or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def forget(self) -> None:
        """Empty the engine's memory; it declines while it is still busy."""
        deadline = time.monotonic() + 20
        while self.ask("POST", "/flush_cache")[0] != HTTPStatus.OK:
            assert time.monotonic() < deadline, "the engine does not become idle"
            time.sleep(0.05)


def flags_of(folder: Path, port: int) -> dict[str, object]:
    """Return the launch arguments of a server of a tiny model, without storage."""
    tiny = tiny_models.MODELS["llama"]
    flags = {**engine_run.ALWAYS, **tiny.engine}
    del flags["enable_hierarchical_cache"], flags["hicache_storage_prefetch_policy"]
    return {
        **flags,
        "model_path": tiny_models.make(tiny.name, folder),
        "host": "127.0.0.1",
        "port": port,
        "admin_api_key": KEY,
        "log_level": "warning",
        "enable_metrics": True,
    }


def settings_of(folder: Path) -> list[str]:
    """Spell the settings of a store as the words of `kvdock run`."""
    settings = {
        "plugin": "file",
        "root": folder / "store",
        "free_space": "1 MiB",
        "prefetch_threshold": 16,
    }
    return [
        word
        for name, value in settings.items()
        for word in ("--set", f"{name}={value}")
    ]


def words_of(flags: Mapping[str, object]) -> list[str]:
    """Spell launch arguments as the words of a command."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return words


@contextmanager
def served(folder: Path, life: str) -> Iterator[Server]:
    """Start SGLang's server with a store in a folder."""
    port = free_port()
    command = [KVDOCK, "run", *settings_of(folder), "--", *LAUNCH]
    command += words_of(flags_of(folder, port))
    server = Server(port, folder / f"{life}.trace")
    log = folder / f"{life}.log"
    variables = {
        **os.environ,
        **environment.CPU,
        kvdock_trace.FOLDER: str(server.trace),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            # So that its own children can be ended with it.
            start_new_session=True,
        )
    try:
        _until_it_answers(server, process, log)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until_it_answers(
    server: Server, process: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + 600  # on a machine that others use
    while True:
        try:
            if server.ask("GET", "/health")[0] == HTTPStatus.OK:
                return
        except OSError:
            pass
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def kvdock(*words: object) -> tuple[int, dict[str, Any]]:
    """Run a command of kvdock; return its exit code and what it prints."""
    command = [KVDOCK, *map(str, words), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, found


def pages_stored(server: Server) -> set[str]:
    return {
        name
        for one in kvdock_trace.moves(server.trace)
        if one["what"] == "write"
        for name in one["hashes"]
    }


def check_from_outside(
    server: Server, prompt: list[int], memory: int, folder: Path
) -> None:
    """Ask the commands whether what is restored is right, and why it is not more."""
    given, short = folder / "given", folder / "short"
    given.write_text(json.dumps(prompt))
    short.write_text(json.dumps(prompt[:15]))
    server.forget()
    kvdock_trace.settle(server.trace)
    stored = pages_stored(server)
    code, found = kvdock("audit", server.url, "--prompts", given, "--rate", 100)
    assert code == 0, found
    assert (found["engine"], found["restored"]) == ("sglang", 1)
    assert found["restored_tokens"] == memory
    assert found["largest"] < 1e-3
    kvdock_trace.settle(server.trace)
    assert pages_stored(server) == stored, "what is computed anew is not stored"
    why = ("why", "--journal", folder / "journal", "--url", server.url, "--prompt")
    server.forget()
    code, found = kvdock(*why, given)
    assert (code, found["ok"]) == (0, True), found
    code, found = kvdock(*why, short)
    assert code == 1
    assert found["verdict"].startswith("The prompt is one token short of a page of")


def attach_and_detach(server: Server, folder: Path) -> Any:
    """Change storage while the server runs; return the answer to the first prompt."""
    prompt, root = lives.PROMPTS[0], str(folder / "store")
    shown = json.loads(server.ask("GET", STORAGE)[1])
    assert shown["hicache_storage_backend"] == "dynamic", "it was started with storage"
    assert server.ask("DELETE", STORAGE)[0] == HTTPStatus.OK
    shown = json.loads(server.ask("GET", STORAGE)[1])
    assert shown["hicache_storage_backend"] is None
    server.answer(prompt)
    warm, memory = server.answer(prompt)
    assert memory > 0

    # What cannot be attached is rejected with a reason, and nothing breaks.
    status, why = server.attach(plugin="file", rot=root)
    assert (status, "unknown setting 'rot'" in why) == (400, True), why
    status, why = server.attach(plugin="fil", root=root)
    assert (status, "no backend 'fil'" in why) == (400, True), why

    status, said = server.attach(plugin="file", root=root)
    assert status == HTTPStatus.OK, said
    shown = json.loads(server.ask("GET", STORAGE)[1])
    assert shown["hicache_storage_backend"] == "dynamic"
    for other in (
        {"plugin": "mooncake", "master": "127.0.0.1:1"},
        {"plugin": "file", "root": root, "revision": "after an update"},
    ):
        status, why = server.attach(**other)
        assert (status, "Detach first" in why) == (400, True), why

    # Stored by the first attachment, restored by the second.
    server.forget()
    assert server.answer(prompt) == (warm, 0)
    kvdock_trace.settle(server.trace)
    assert server.ask("DELETE", STORAGE)[0] == HTTPStatus.OK
    server.forget()
    assert server.answer(prompt) == (warm, 0), "the storage is still in use"
    journal = str(folder / "journal")
    observed = {
        "core": {"observers": ["metrics", "journal"]},
        "observers": {"journal": {"dir": journal}},
    }
    status, said = server.attach(plugin="file", root=root, **observed)
    assert status == HTTPStatus.OK, said
    server.forget()
    assert server.answer(prompt) == (warm, memory)
    rows = server.ask("GET", "/metrics")[1].splitlines()
    (row,) = [row for row in rows if row.startswith(RESTORED)]
    assert float(row.split()[-1]) > 0

    check_from_outside(server, prompt, memory, folder)

    kvdock_trace.settle(server.trace)
    assert server.ask("POST", f"{STORAGE}/clear")[0] == HTTPStatus.OK
    server.forget()
    assert server.answer(prompt) == (warm, 0)
    kvdock_trace.settle(server.trace)
    return warm, memory


def unlike_others(number: int, length: int) -> list[int]:
    """Return a prompt that shares no prefix with one of another number."""
    return [number, *((7 * at + number) % 400 + 4 for at in range(1, length))]


def said_in(answer: list[tuple[int, float]]) -> list[int]:
    """Return the tokens: probabilities differ by how much is computed anew."""
    return [token for token, _ in answer]


def follow_hints(server: Server, folder: Path) -> None:
    """What is retained survives its neighbours, and what has expired is computed."""
    retained, neighbour, other, whole, brief = (
        unlike_others(number, 129) for number in range(4, 9)
    )
    flood = [unlike_others(number, 200) for number in range(30, 80)]
    storage = {
        "plugin": "file",
        "root": str(folder / "hinted"),
        "quota": "2 MiB",
        "segment_bytes": "64 KiB",
        "free_space": "1 MiB",
        "core": {"observers": ["metrics"]},
    }
    pages = {"name": "hint_pages_total", "answer": "accepted"}
    assert server.ask("DELETE", STORAGE)[0] == HTTPStatus.OK
    status, said = server.attach(**storage)
    assert status == HTTPStatus.OK, said
    # One is promised when it is stored, the other one afterwards.
    first, _ = server.answer(retained, **server.hint("retain", keep_s=3600))
    server.answer(neighbour)
    server.answer(other)
    kvdock_trace.settle(server.trace)
    server.answer(other, **server.hint("retain", keep_s=3600))
    stored = server.soon(8, action="stored", **pages)
    assert stored >= 8
    assert server.soon(8, action="kvdock.retain", **pages) >= 8
    server.forget()
    assert server.answer(neighbour)[1] == 128
    for prompt in flood:
        server.answer(prompt)
    kvdock_trace.settle(server.trace)
    server.forget()
    assert server.answer(neighbour)[1] == 0
    assert server.answer(other)[1] == 128
    again, cached = server.answer(retained)
    assert (said_in(again), cached) == (said_in(first), 128)
    # From now on a page is gone when its time is over.
    server.answer(whole)
    server.answer(brief, **server.hint("expire", after_s=3))
    over = time.monotonic() + 3
    assert server.soon(stored + 8, action="stored", **pages) >= stored + 8
    kvdock_trace.settle(server.trace)
    # The head of the other one stays, for prompts that share it.
    server.answer(whole, **server.hint("forget", from_token=64))
    assert server.soon(4, action="kvdock.forget", **pages) >= 4
    while time.monotonic() < over:
        time.sleep(0.05)
    server.forget()
    assert server.answer(brief)[1] == 0
    assert server.answer([*whole[:64], 9])[1] == 64
    again, _ = server.answer(retained, **server.hint("retain"))
    assert said_in(again) == said_in(first)
    assert server.soon(1, "hints_total", outcome="malformed") == 1


def separating(folder: Path, **changes: object) -> list[str]:
    """Return the fields that separate a new command from what is stored."""
    command = [KVDOCK, "route", "--namespace", "--json", *settings_of(folder), "--"]
    done = subprocess.run(
        [*command, *LAUNCH, *words_of(flags_of(folder, 1) | changes)],
        env={**os.environ, **environment.CPU},
        stdout=subprocess.PIPE,
        check=False,
    )
    nearest = json.loads(done.stdout)["compared"]["target"]
    assert done.returncode == bool(nearest["differences"])
    return [difference["field"] for difference in nearest["differences"]]


def test_servers_behind_one_word(tmp_path: Path) -> None:
    with served(tmp_path, "first") as server:
        found = attach_and_detach(server, tmp_path)
    said = (tmp_path / "first.log").read_text()
    assert "kvdock adds to the command:\n--enable-hierarchical-cache\n" in said
    with served(tmp_path, "second") as server:
        assert server.answer(lives.PROMPTS[0]) == found, "restored after a restart"
        follow_hints(server, tmp_path)
    # A rollout is tried before it.
    assert separating(tmp_path, served_model_name="other") == []
    assert separating(tmp_path, kv_cache_dtype="bf16", context_length=512) == [
        "page_format.arguments.context_tokens",
        "page_format.arguments.kv_cache_dtype",
    ]
