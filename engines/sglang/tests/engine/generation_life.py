"""One life of SGLang's engine whose weights are replaced. In its own process.

    generation_life.py TASK.json

Steps are `["ask"]`, `["disk", FOLDER, VERSION]`, `["tensor", FOLDER, VERSION]`,
`["load", [[FOLDER, VERSION], ...], CLIENTS]` and `["write", FILE]`. The answer has for
each step what was said: tokens, and how many of the prompt's came from the cache.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine_run

import kvdock_trace

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGES = "sglang.srt.managers.io_struct"
PATIENCE_S = 120.0


class Life:
    """An engine, and what is done to it."""

    def __init__(self, task: dict[str, Any]) -> None:
        make_engine: Any = importlib.import_module("sglang").Engine
        storage: dict[str, Any] = {}
        arguments = {**engine_run.ALWAYS, **task["engine"]}
        if task["storage"] is not None:
            storage = {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": json.dumps(task["storage"]),
            }
        else:
            for name in [one for one in arguments if "hi" in one.split("_")[0]]:
                del arguments[name]
            arguments["enable_hierarchical_cache"] = False
            arguments["disable_radix_cache"] = True
        self.prompts: list[list[int]] = task["prompts"]
        self.new_tokens = task["new_tokens"]
        self.trace = Path(task["trace"]) if task["storage"] is not None else None
        self.engine = make_engine(model_path=task["model"], **arguments, **storage)
        self.manager = self.engine.tokenizer_manager
        self.messages: Any = importlib.import_module(MESSAGES)

    def run(self, work: Any) -> Any:
        return self.engine.loop.run_until_complete(work)

    async def answer(self, number: int) -> dict[str, Any]:
        request = self.messages.GenerateReqInput(
            input_ids=self.prompts[number],
            sampling_params={
                "temperature": 0,
                "max_new_tokens": self.new_tokens,
                "ignore_eos": True,
            },
            return_logprob=True,
        )
        out = await anext(self.manager.generate_request(request, None))
        meta = out["meta_info"]
        return {
            "prompt": number,
            "tokens": [row[1] for row in meta["output_token_logprobs"]],
            "cached": meta["cached_tokens"],
        }

    async def flush(self) -> None:
        """Empty the cache once nothing is being written any more."""
        if not (await self.manager.flush_cache(timeout_s=PATIENCE_S)).success:
            raise SystemExit("the engine does not become idle")

    async def until(self, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not ready() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - of any kind
            await asyncio.sleep(0.01)

    async def disk(self, folder: str, version: str | None) -> bool:
        """Update as POST /update_weights_from_disk does, and flush until it is."""
        request = self.messages.UpdateWeightFromDiskReqInput(
            model_path=folder, weight_version=version
        )
        good, why, _ = await self.manager.update_weights_from_disk(request, None)
        await self.flush()
        return bool(good) or "was not flushed" in why

    async def tensor(self, folder: str, version: str | None) -> bool:
        """Update in a session, tensor by tensor, as trainers do."""
        files: Any = importlib.import_module("safetensors.torch")
        found = files.load_file(Path(folder) / "model.safetensors")
        begin = self.messages.BeginWeightUpdateReqInput()
        end = self.messages.EndWeightUpdateReqInput()
        good, _ = await self.manager.begin_weight_update(begin, None)
        names = list(found)
        for part in (names[::2], names[1::2]):
            request = self.messages.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=self.engine._serialize_tensors_per_rank(
                    [(name, found[name]) for name in part], None
                ),
                flush_cache=False,
                weight_version=version,
            )
            done, _ = await self.manager.update_weights_from_tensor(request, None)
            good = good and done
        done, _ = await self.manager.end_weight_update(end, None)
        await self.flush()
        return bool(good and done)

    async def load(self, updates: list[Any], clients: int) -> dict[str, Any]:
        """Update while clients ask; each answer says which weights it is of."""
        gate, busy, over = asyncio.Event(), 0, False
        now = ""
        said: list[dict[str, Any]] = []

        async def client(number: int) -> None:
            nonlocal busy
            while not over:
                await gate.wait()
                busy, folder = busy + 1, now
                answer = await self.answer(number % len(self.prompts))
                said.append({**answer, "folder": folder})
                busy -= 1
                await asyncio.sleep(0)

        def more(before: int) -> bool:
            return len(said) >= before + 2 * clients

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        for folder, version in updates:
            gate.clear()
            await self.until(lambda: not busy)
            if not await self.disk(folder, version):
                raise SystemExit(f"no update to {folder}")
            now, before = folder, len(said)
            gate.set()
            await self.until(partial(more, before))
        over = True
        gate.set()
        await asyncio.gather(*tasks)
        return {"answers": said}

    def step(self, what: str, *given: Any) -> Any:
        if what == "write":
            return Path(given[0]).write_text("here")
        if what == "ask":
            numbers = range(len(self.prompts))
            found = [self.run(self.answer(number)) for number in numbers]
            if self.trace is not None:
                kvdock_trace.settle(self.trace)
            return found
        return self.run(getattr(self, what)(*given))


def main() -> None:
    """Run the task."""
    task = json.loads(Path(sys.argv[1]).read_text())
    if "sglang" in sys.modules:
        engine_run.start_by_fork()
    life = Life(task)
    found: list[Any] = []
    try:
        found += (life.step(*step) for step in task["steps"])
    finally:
        Path(task["out"]).write_text(json.dumps(found))
        life.engine.shutdown()


if __name__ == "__main__":
    main()
