"""A stand-in for an engine's HTTP server, SGLang's or vLLM's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

Answer = Callable[["Asked"], tuple[list[int], list[float], int | None]]
"""Takes a request; returns tokens, log-probabilities and cached tokens."""


@attrs.frozen
class Asked:
    """A request for a completion, in the words of neither engine."""

    prompt: list[int]
    tokens: int
    salt: str
    name: str
    hints: dict[str, Any] | None = None


def ids(prompt: str | list[int]) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


@contextmanager
def serving(  # noqa: C901 - two servers in one
    engine: str, answer: Answer, in_memory: int = 0
) -> Iterator[tuple[str, list[Asked]]]:
    """Serve until the block ends; yield the address, and what was asked.

    `in_memory` of the cached tokens come from the engine's own memory, which SGLang
    says.
    """
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            known: dict[tuple[str, str], object] = {
                ("sglang", "/model_info"): {"model_path": "m"},
                ("vllm", "/v1/models"): {"data": [{"id": "m"}]},
            }
            self.say(known.get((engine, self.path)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self.say({"tokens": ids(body["prompt"])})
            elif engine == "sglang" and self.path == "/generate":
                self.sglang(body)
            elif engine == "vllm" and self.path == "/v1/completions":
                self.vllm(body)
            else:
                self.say(None)

        def ask(self, given: Asked) -> tuple[list[int], list[float], int | None]:
            asked.append(given)
            return answer(given)

        def sglang(self, body: dict[str, Any]) -> None:
            prompt = body.get("text") or body["input_ids"]
            most = body["sampling_params"]["max_new_tokens"]
            salt, name = body.get("cache_salt", ""), body.get("rid", "")
            given = Asked(ids(prompt), most, salt, name, body.get("kv_hints"))
            tokens, logs, cached = self.ask(given)
            pairs = [[log, one, None] for log, one in zip(logs, tokens, strict=True)]
            meta: dict[str, Any] = {"output_token_logprobs": pairs}
            meta["cached_tokens"] = cached
            if cached:
                meta["cached_tokens_details"] = {
                    "device": in_memory, "host": 0, "storage": cached - in_memory,
                }  # fmt: skip
            self.say({"text": "", "meta_info": meta})

        def vllm(self, body: dict[str, Any]) -> None:
            salt, name = body.get("cache_salt", ""), body.get("request_id", "")
            prompt, most = ids(body["prompt"]), body["max_tokens"]
            hints = body.get("kv_transfer_params", {}).get("kvdock")
            given = Asked(prompt, most, salt, name, hints)
            tokens, logs, cached = self.ask(given)
            words = [f"token_id:{one}" for one in tokens]
            logprobs = {"tokens": words, "token_logprobs": logs}
            details = None if cached is None else {"cached_tokens": cached}
            usage = {"prompt_tokens_details": details}
            self.say({"choices": [{"logprobs": logprobs}], "usage": usage})

        def say(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
