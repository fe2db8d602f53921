"""Ask a running SGLang or vLLM for tokens and completions, over HTTP.

Source: SGLang 0.5.23, `entrypoints/http_server.py`: `/model_info`, `/tokenize`,
`/generate`; vLLM 0.32.0, `entrypoints/openai/`: `/v1/models`, `/tokenize`,
`/v1/completions`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import attrs

from kvdock.errors import KvdockError
from kvdock_cli.http_request import request

Prompt = str | Sequence[int]


class RejectedError(KvdockError):
    """An engine answered, and not with what was asked for."""


@attrs.frozen
class Completion:
    """What an engine answered.

    Args:
        cached: Tokens of the prompt that it did not compute; None where it does not
            say.
        restored: Those of them that storage gave; None where it does not say.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int | None
    restored: int | None = None


@contextmanager
def _understood() -> Iterator[None]:
    """Raise KvdockError if an answer lacks what both engines give."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise KvdockError(
            f"the engine's answer is not understood: {error!r}",
            fix="Give the address of the HTTP server of SGLang or vLLM.",
        ) from error


def _given(**fields: object) -> dict[str, object]:
    """Return the fields of a request that have a value."""
    return {name: value for name, value in fields.items() if value}


@attrs.frozen
class EngineClient:
    """One engine's HTTP server.

    Args:
        url: Its address; a path in it does not count.
        engine: "sglang" or "vllm".
        model: The name under which it serves its model.
        within_s: How long it may take for a request.
    """

    url: str
    engine: str
    model: str
    within_s: float = 120.0

    @classmethod
    @_understood()
    def find(cls, url: str, *, within_s: float = 120.0) -> EngineClient:
        """Find out which engine answers at an address; raise KvdockError if none."""
        client = cls(url, "", "", within_s)
        found = client._ask("/model_info", missing=True)
        if "model_path" in found:
            name = str(found.get("served_model_name") or found["model_path"])
            return attrs.evolve(client, engine="sglang", model=name)
        models = client._ask("/v1/models", missing=True).get("data") or ()
        if models:
            return attrs.evolve(client, engine="vllm", model=str(models[0]["id"]))
        raise KvdockError(
            f"{url} is neither SGLang nor vLLM",
            fix="Give the address of the engine's own HTTP server, not of a router.",
        )

    @_understood()
    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, as the engine's tokenizer makes them."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        found = self._ask("/tokenize", {"model": self.model, "prompt": prompt})
        return tuple(map(int, found["tokens"]))

    @_understood()
    def complete(
        self,
        prompt: Prompt,
        *,
        tokens: int,
        salt: str = "",
        name: str = "",
        hints: Mapping[str, object] | None = None,
    ) -> Completion:
        """Let it answer a prompt greedily.

        Args:
            prompt: Text, or token ids.
            tokens: How many tokens to make, whatever they are.
            salt: Keeps the request apart from all that is cached; "" for none.
            name: The request's id, for the engine to use; "" for one of its own.
            hints: An envelope of hints for storage.

        Raises:
            KvdockError: If it refuses.
        """
        if self.engine == "sglang":
            body = {
                "text" if isinstance(prompt, str) else "input_ids": prompt,
                "sampling_params": {
                    "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True,
                },
                "return_logprob": True,
                **_given(cache_salt=salt, rid=name, kv_hints=hints),
            }  # fmt: skip
            meta = self._ask("/generate", body)["meta_info"]
            found = meta["output_token_logprobs"]
            return Completion(
                tokens=tuple(int(one[1]) for one in found),
                logprobs=tuple(float(one[0]) for one in found),
                cached=meta.get("cached_tokens"),
                restored=(meta.get("cached_tokens_details") or {}).get("storage"),
            )
        transfer = {"kvdock": hints} if hints else None
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "logprobs": 1,
            "return_tokens_as_token_ids": True,
            **_given(cache_salt=salt, request_id=name, kv_transfer_params=transfer),
        }  # fmt: skip
        answer = self._ask("/v1/completions", body)
        logprobs = answer["choices"][0]["logprobs"]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return Completion(
            tokens=tuple(int(one.rpartition(":")[2]) for one in logprobs["tokens"]),
            logprobs=tuple(map(float, logprobs["token_logprobs"])),
            cached=details.get("cached_tokens"),
        )

    def _ask(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        missing: bool = False,
    ) -> dict[str, Any]:
        status, text = request(
            self.url,
            path,
            body=json.dumps(body) if body is not None else "",
            within_s=self.within_s,
            wanted="answers",
        )
        if missing and status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if status != HTTPStatus.OK or not isinstance(found, dict):
            raise RejectedError(
                f"{path} of {self.url} answers {status}: {text[:200]}",
                fix="See the engine's log.",
            )
        return found
