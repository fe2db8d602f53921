"""One life of vLLM's engine whose weights are replaced. In its own process.

    generation_life.py TASK.json

Steps are `["ask"]`, `["transfer", FOLDER, VERSION, PAUSE]`, `["broken", FOLDER]`,
`["reload", FOLDER, VERSION]`, `["unpaused", FOLDER]`, `["flush"]`,
`["rush", FOLDER, VERSION]`, `["load", [[FOLDER, VERSION, PAUSE], ...], CLIENTS]` and
`["write", FILE]`. The answer has for each step what was said: tokens, how many of the
prompt's came from a cache, and the versions of the weights that made them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PATIENCE_S = 120.0
QUIET_S = 0.5


class Inside:
    """An engine in this process, with the methods of one in another."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.entrypoints.llm import LLM

        self.llm = LLM(**arguments)
        self.core = self.llm.llm_engine.engine_core

    async def generate(self, prompt: Any, chosen: Any, _: str) -> AsyncIterator[Any]:
        for one in self.llm.generate([prompt], chosen, use_tqdm=False):
            yield one
        await asyncio.sleep(0)

    async def pause_generation(self, mode: str = "abort") -> None:
        self.core.engine_core.pause_scheduler(mode)

    async def resume_generation(self) -> None:
        self.core.engine_core.resume_scheduler()

    def shutdown(self) -> None:
        self.core.shutdown()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            return getattr(self.llm, name)(*args, **options)

        return call


class Life:
    """An engine, and what is done to it."""

    def __init__(self, task: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        self.prompts: list[list[int]] = task["prompts"]
        self.root = Path(task["root"])
        self.chosen = SamplingParams(
            temperature=0, max_tokens=task["new_tokens"], ignore_eos=True
        )
        self.numbers = itertools.count()
        arguments = {"model": task["model"], **task["engine"]}
        self.engine: Any = (
            Inside(arguments)
            if task["inside"]
            else AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        )

    async def answer(self, number: int) -> dict[str, Any]:
        """Ask for one prompt."""
        request = {"prompt_token_ids": self.prompts[number]}
        name = f"r{next(self.numbers)}"
        async for out in self.engine.generate(request, self.chosen, name):
            last = out
        said = last.outputs[0]
        return {
            "prompt": number,
            "tokens": list(said.token_ids),
            "cached": last.num_cached_tokens,
            "aborted": said.finish_reason == "abort",
            "versions": [one.version for one in said.weight_versions or ()],
        }

    async def ask(self) -> list[dict[str, Any]]:
        """Ask for every prompt, one after the other, and wait until all is stored."""
        found = [await self.answer(number) for number in range(len(self.prompts))]
        await self.settle()
        return found

    async def settle(self) -> None:
        """Wait until all is stored: no more comes for some time."""
        if isinstance(self.engine, Inside):
            if self.engine.core.engine_core.scheduler.connector is not None:
                vllm_run.finish(self.engine.llm)
            return
        seen, since_s = -1, time.monotonic()
        while time.monotonic() < since_s + QUIET_S:
            found = 0
            with suppress(FileNotFoundError):  # deleted while it is looked at
                files = self.root.rglob("*")
                found = sum(one.stat().st_size for one in files if one.is_file())
            if found != seen:
                seen, since_s = found, time.monotonic()
            await asyncio.sleep(0.02)

    async def flush(self) -> bool:
        """Empty device and host."""
        return bool(await self.engine.reset_prefix_cache(reset_connector=True))

    async def rush(self, folder: str, version: str) -> None:
        """Reload while a request is computed, and a part of it is being stored."""
        engine = self.engine.llm.llm_engine
        storing = self.engine.core.engine_core.scheduler.connector.connector_scheduler
        engine.add_request("rush", {"prompt_token_ids": [*range(9, 200)]}, self.chosen)
        while not storing._jobs:
            engine.step()
        await self.reload(folder, version, "keep")
        while engine.has_unfinished_requests():
            engine.step()

    async def send(self, folder: str, *, first: bool) -> None:
        """Transfer a half of the weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        given = {"folder": folder, "first": first}
        await self.engine.update_weights(WeightTransferUpdateRequest(update_info=given))

    async def transfer(self, folder: str, version: str | None, pause: str) -> None:
        """Update as a trainer does."""
        await self.engine.pause_generation(mode=pause)
        await self.engine.start_weight_update()
        await self.send(folder, first=True)
        await self.send(folder, first=False)
        await self.engine.finish_weight_update(version)
        await self.engine.resume_generation()

    async def broken(self, folder: str) -> str:
        """Fail when half of the weights are there, and go on asking."""
        await self.engine.pause_generation()
        await self.engine.start_weight_update()
        await self.send(folder, first=True)
        try:
            await self.send("/nowhere", first=False)
        except Exception as error:  # noqa: BLE001 - the engine's own
            return type(error).__name__
        finally:
            await self.engine.resume_generation()
        return ""

    async def reload(
        self, folder: str, version: str | None, pause: str = "abort"
    ) -> None:
        """Load another checkpoint, without a trainer."""
        await self.engine.pause_generation(mode=pause)
        given = {"weights_path": folder}
        await self.engine.collective_rpc("reload_weights", kwargs=given)
        if version is not None:
            await self.engine.update_weight_version(version)
        await self.engine.resume_generation()

    async def unpaused(self, folder: str) -> None:
        """Load another checkpoint, and empty no cache."""
        given = {"weights_path": folder}
        await self.engine.collective_rpc("reload_weights", kwargs=given)

    async def load(self, updates: list[Any], clients: int) -> list[dict[str, Any]]:
        """Update while clients ask."""
        over = False
        said: list[dict[str, Any]] = []

        async def client(number: int) -> None:
            while not over:
                said.append(await self.answer(number % len(self.prompts)))

        def more(before: int) -> bool:
            return len(said) >= before + 2 * clients

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        for update in updates:
            await self.transfer(*update)
            await self.until(partial(more, len(said)), tasks)
        over = True
        await asyncio.gather(*tasks)
        return said

    async def until(self, ready: Callable[[], bool], tasks: list[Any]) -> None:
        """Wait for clients."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not ready():
            if time.monotonic() > deadline_s or any(one.done() for one in tasks):
                raise SystemExit("clients have no answers")
            await asyncio.sleep(0.01)

    async def write(self, file: str) -> None:
        """Say that this step was reached, and what a killed engine leaves behind."""
        config = self.engine.llm.llm_engine.vllm_config.kv_transfer_config
        await asyncio.to_thread(Path(file).write_text, config.engine_id)


async def live(task: dict[str, Any]) -> list[Any]:
    """Take the steps of a task."""
    life = Life(task)
    try:
        return [await getattr(life, what)(*given) for what, *given in task["steps"]]
    finally:
        life.engine.shutdown()


def main() -> None:
    """Run the task."""
    task = json.loads(Path(sys.argv[1]).read_text())
    found = asyncio.run(live(task))
    Path(task["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
