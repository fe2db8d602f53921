"""A server of vLLM, and a client of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import vllm_environment

START_S = 900.0
SOON_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@attrs.frozen(eq=False)
class Server:
    """A running API server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:  # noqa: S310 - http of our own
            text: str = answer.read().decode()
        return text

    def complete(self, prompt: list[int], replica: int | None = None) -> list[str]:
        """Return the tokens of an answer, of a certain replica or of any."""
        return self.ask(prompt, replica)[0]

    def ask(
        self, prompt: list[int], replica: int | None = None, **more: Any
    ) -> tuple[list[str], int]:
        """Return the tokens of an answer, and how many of the prompt were cached."""
        given = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 16,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            **more,
        }
        chosen = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        request = urllib.request.Request(  # noqa: S310 - same
            self.url + "/v1/completions",
            json.dumps(given).encode(),
            {"Content-Type": "application/json", **chosen},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - same
            found = json.load(answer)
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["logprobs"]["tokens"], int(cached or 0)

    def reset(self) -> None:
        """Empty the caches of device and host, so that storage alone has pages."""
        request = urllib.request.Request(  # noqa: S310 - same
            self.url + "/reset_prefix_cache?reset_external=true", method="POST"
        )
        end_s = time.monotonic() + SOON_S
        while time.monotonic() < end_s:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - same
                if json.load(answer)["success"]:
                    return
            time.sleep(0.1)
        pytest.fail("vLLM's caches were not reset")

    def keys(self, operation: str, replica: int = 0) -> float:
        """Return how many pages were OK, by the server's own metrics."""
        wanted = {"operation": operation, "outcome": "ok", "engine": str(replica)}
        return self.count("keys_total", **wanted)

    def count(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series with some labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").splitlines()
            if line.startswith(f"vllm:kvdock_{name}{{")
            and all(one in line for one in wanted)
        )

    def keys_soon(self, operation: str, count: float, replica: int = 0) -> float:
        """Wait until that many pages were moved: metrics come with later steps."""
        wanted = {"operation": operation, "outcome": "ok", "engine": str(replica)}
        return self.soon(count, "keys_total", **wanted)

    def soon(self, count: float, name: str, **labels: str) -> float:
        """Wait until a metric has a value; return the one that it has."""
        end_s = time.monotonic() + SOON_S
        while self.count(name, **labels) < count and time.monotonic() < end_s:
            # An idle engine has no steps, and so reports nothing.
            self.complete([5, 6, 7], int(labels.get("engine", 0)) or None)
            time.sleep(0.2)
        return self.count(name, **labels)


@contextmanager
def serving(
    model: Path,
    storage: dict[str, Any],
    log: Path,
    *more: str,
    connector: dict[str, Any] | None = None,
    start: Sequence[str] = (),
) -> Iterator[Server]:
    """Run a server until SIGTERM, with more arguments, or another connector.

    `start` is a command that starts the server with what storage needs.
    """
    port = free_port()
    transfer = {
        "kv_connector": "KvdockConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_memory": "16 MiB",
            **storage,
        },
        **(connector or {}),
    }
    command = [
        *start,
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "1024", "--block-size", "32"),
        *("--max-num-seqs", "4", "--enforce-eager", "--seed", "0"),
        # Without a time vLLM kills its engine at once, and its shared memory stays.
        *("--shutdown-timeout", "60"),
        *(() if start else ("--kv-transfer-config", json.dumps(transfer))),
        "--enable-prompt-tokens-details",
        *more,
    ]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Development mode has the request that resets all of vLLM's caches.
            env={
                **os.environ,
                **vllm_environment.CPU,
                "VLLM_SERVER_DEV_MODE": "1",
            },
        )
        try:
            _wait_for(process, url, log)
            yield Server(process, url, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()  # noqa: S310 - http of our own
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"the server does not answer\n{log.read_text()[-4000:]}")
