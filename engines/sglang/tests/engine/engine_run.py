"""One life of SGLang's engine: start, answer prompts, end. In its own process.

    engine_run.py TASK.json

The task names a model folder, launch arguments and rounds of prompts. A round
may name something that is done to the store first; the engine then forgets
what it holds in memory and has to ask the store again.

The answer is a JSON file with, per round and prompt, the tokens, their log
probabilities, and how many tokens of the prompt the engine took from its cache.
A child of the engine that fails kills its whole process tree, so this never
runs inside of a test.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tamper
from sgl_kernel import patches  # the stand-in comes before SGLang

import kvdock_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ALWAYS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.5,
    "context_length": 1024,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "page_size": 16,
    "enable_hierarchical_cache": True,
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_io_backend": "direct",
    "hicache_ratio": 2.0,
}


def _answers(
    engine: Any, prompts: list[list[int]], new_tokens: int, **more: Any
) -> list[Any]:
    found = []
    for prompt in prompts:
        # One at a time: what else is in a batch changes the last bits.
        began = time.monotonic()
        sampling = {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        out = _answer(engine, input_ids=prompt, sampling_params=sampling, **more)
        meta = out["meta_info"]
        rows = meta["output_token_logprobs"]
        found.append(
            {
                "prompt": prompt,
                "tokens": [row[1] for row in rows],
                "logprobs": [row[0] for row in rows],
                "cached": meta["cached_tokens"],
                "seconds": time.monotonic() - began,
            }
        )
    return found


def _answer(engine: Any, **fields: Any) -> Any:
    """Ask as a client of HTTP may, who has more fields than `Engine.generate`."""
    request = importlib.import_module("sglang.srt.managers.io_struct").GenerateReqInput
    answers = engine.tokenizer_manager.generate_request(
        request(return_logprob=True, **fields), None
    )
    return engine.loop.run_until_complete(anext(answers))


def _check_weights(engine: Any, action: str) -> None:
    """Call what POST /weights_checker calls."""
    module = importlib.import_module("sglang.srt.managers.io_struct")
    asked = engine.tokenizer_manager.check_weights(
        module.CheckWeightsReqInput(action=action)
    )
    good, why, *_ = engine.loop.run_until_complete(asked)
    if not good:
        raise SystemExit(why)


def _embeddings(engine: Any, prompts: list[list[int]]) -> list[Any]:
    """Answer with vectors in place of tokens."""
    # Engine.encode takes text alone.
    request = importlib.import_module("sglang.srt.managers.io_struct").EmbeddingReqInput
    found = []
    for prompt in prompts:
        answers = engine.tokenizer_manager.generate_request(
            request(input_ids=prompt), None
        )
        out = engine.loop.run_until_complete(anext(answers))
        found.append(
            {
                "prompt": prompt,
                # The last bits differ with the part that is computed.
                "tokens": [round(part, 3) for part in out["embedding"]],
                "cached": 0,
            }
        )
    return found


def _forget(engine: Any, timeout_s: float = 20.0) -> None:
    """Empty the engine's memory; it declines while it is still writing."""
    deadline = time.monotonic() + timeout_s
    while not engine.flush_cache().success:
        if time.monotonic() > deadline:
            raise SystemExit("the engine does not become idle")
        time.sleep(0.05)


def _prompts(one: dict[str, Any], rounds: list[Any]) -> list[list[int]]:
    if one["prompts"] != "next turn":
        return list(one["prompts"])
    return [[*last["prompt"], *last["tokens"], *range(40, 47)] for last in rounds[-1]]


def _kill(pids: Iterable[str]) -> None:
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)


DEEDS: dict[str, Callable[..., Any]] = {
    "alter": lambda trace: tamper.alter(Path(trace)),
    "damage": lambda root: tamper.damage(Path(root)),
    "kill": lambda *pids: _kill(pids),
    "nothing": lambda: None,
    "write": lambda path, text: Path(path).write_text(text),
}
"""What may be done to a store between two rounds."""


def start_by_fork() -> None:
    """Fork the engine's processes: this one was forked by what has imported it."""
    patches.mend_again()
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: choose("fork", force=True)


def main() -> None:
    """Run the task."""
    task = json.loads(Path(sys.argv[1]).read_text())
    if "sglang" in sys.modules:
        start_by_fork()
    # Exported lazily, and its types are there only where SGLang is installed.
    make_engine: Any = importlib.import_module("sglang").Engine

    engine = make_engine(
        model_path=task["model"],
        **{**ALWAYS, **task["engine"]},
        hicache_storage_backend=task.get("backend", "dynamic"),
        hicache_storage_backend_extra_config=json.dumps(task["storage"]),
    )
    rounds: list[Any] = []
    try:
        for one in task["rounds"]:
            if one.get("first"):
                _forget(engine)
                what, *given = one["first"]
                if what == "weights":
                    _check_weights(engine, *given)
                else:
                    DEEDS[what](*given)
            more = one.get("generate", {})
            asked = _prompts(one, rounds)
            if task["engine"].get("is_embedding"):
                rounds.append(_embeddings(engine, asked))
            else:
                rounds.append(_answers(engine, asked, task["new_tokens"], **more))
            if os.environ.get(kvdock_trace.FOLDER):
                kvdock_trace.settle(Path(os.environ[kvdock_trace.FOLDER]))
    finally:
        Path(task["out"]).write_text(json.dumps(rounds))
        engine.shutdown()


if __name__ == "__main__":
    main()
