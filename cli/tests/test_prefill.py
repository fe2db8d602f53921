"""The pace of prefill, measured on an engine that serves OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvdock.errors import KvdockError, SettingsError
from kvdock_cli.bench import prefill
from kvdock_cli.commands.bench import bench
from kvdock_cli.output import UsageProblem


class Engine(ThreadingHTTPServer):
    """Prefills 1000 tokens per second of a clock of its own."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.clock_s = 0.0
        self.request_s = 0.5
        self.token_s = 0.001
        self.context = 8192
        self.card: dict[str, Any] = {"id": "org/model"}
        self.prompts: list[list[int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self._answer(200 if found else 404, {"data": [self.server.card]})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(text)
        prompt = asked["prompt"]
        if asked["model"] != "org/model" or asked["max_tokens"] != 1:
            self._answer(404, {"error": "unknown model"})
        elif len(prompt) > self.server.context:
            self._answer(400, {"error": "the prompt is too long"})
        else:
            self.server.prompts.append(prompt)
            one = self.server
            one.clock_s += one.request_s + one.token_s * len(prompt)
            logprobs = {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}
            self._answer(200, {"choices": [{"text": "x", "logprobs": logprobs}]})

    def _answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with Engine() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        monkeypatch.setattr("time.perf_counter", lambda: server.clock_s)
        yield server
        server.shutdown()
        thread.join()


def test_what_every_request_costs_does_not_count(engine: Engine) -> None:
    assert prefill.prefill_pace(engine.url) == pytest.approx(1000)
    lengths = sorted({len(prompt) for prompt in engine.prompts})
    assert lengths == [1024, 4096]
    assert len(engine.prompts) == prefill.requests()


def test_no_two_prompts_share_a_prefix_that_could_be_cached(engine: Engine) -> None:
    prefill.prefill_pace(f"{engine.url}/v1/")
    assert len({tuple(prompt[:16]) for prompt in engine.prompts}) == 8


def test_a_short_context_shortens_the_prompts(engine: Engine) -> None:
    engine.context = 2050
    assert prefill.prefill_pace(engine.url) == pytest.approx(1000)
    assert max(map(len, engine.prompts)) == 2048


def test_an_engine_that_cannot_be_timed_is_an_error(engine: Engine) -> None:
    engine.context = 255
    with pytest.raises(KvdockError, match=r"400: .*too long"):
        prefill.prefill_pace(engine.url)
    engine.context, engine.token_s = 8192, 0.0
    with pytest.raises(KvdockError, match="no longer for 4096 tokens than for 1024"):
        prefill.prefill_pace(engine.url)
    engine.card["id"] = "another"
    with pytest.raises(KvdockError, match=r"404: .*unknown model"):
        prefill.prefill_pace(engine.url)


def test_what_is_not_an_engine_is_an_error(engine: Engine) -> None:
    engine.card = {}
    with pytest.raises(KvdockError, match="answer is not understood: KeyError"):
        prefill.prefill_pace(engine.url)
    with pytest.raises(KvdockError, match="no answers come from"):
        prefill.prefill_pace("127.0.0.1:9")
    with pytest.raises(SettingsError, match="is not an address to ask for answers"):
        prefill.prefill_pace("ftp://host")


def test_the_report_names_the_pace_as_measured(
    engine: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = (f"root={tmp_path / 'kv'}", "free_space=0")
    pace = prefill.prefill_pace(engine.url)
    # The clock of the engine stands still between requests.
    monkeypatch.undo()
    monkeypatch.setattr(prefill, "prefill_pace", lambda *_: pace)
    small: dict[str, Any] = {"page": ("64 KiB",), "batch": (2,), "threads": (1,)}
    bench("file", set_=given, engine=engine.url, json=True, **small)
    found = json.loads(capsys.readouterr().out)
    assert found["recompute_from"] == "engine"
    assert found["recompute_tokens_per_s"] == pytest.approx(1000)
    bench("file", set_=given, engine=engine.url, **small)
    said = capsys.readouterr().out
    assert "1,000 (measured)" in " ".join(said.split())


def test_a_pace_is_given_or_measured_and_not_both() -> None:
    with pytest.raises(UsageProblem, match="say the same"):
        bench("file", recompute=1.0, engine="http://127.0.0.1:1")
