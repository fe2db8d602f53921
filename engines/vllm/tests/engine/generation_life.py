"""One life of vLLM's engine whose weights are replaced. In its own process.

    generation_life.py TASK.json

Steps are `["ask"]`, `["transfer", FOLDER, VERSION, PAUSE]`, `["broken", FOLDER]`,
`["reload", FOLDER, VERSION]`, `["unpaused", FOLDER]`, `["flush"]`,
`["load", [[FOLDER, VERSION, PAUSE], ...], CLIENTS]` and `["write", FILE]`. The answer
has for each step what was said: tokens, how many of the prompt's came from a cache, and
the versions of the weights that made them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 120.0
QUIET_S = 0.5


@dataclass
class Nothing(base.WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """There is nothing to connect."""


@dataclass
class Part(base.WeightTransferUpdateInfo):  # type: ignore[misc]  # same
    """Every second tensor of a checkpoint, from the first or the second on."""

    folder: str
    first: int


class FromFolder(base.WeightTransferEngine[Nothing, Part]):  # type: ignore[misc]  # same
    """Loads tensors as a trainer's are loaded, from files."""

    init_info_cls = Nothing
    update_info_cls = Part

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """There is nothing to connect."""

    def start_weight_update(self) -> None:
        """Weights are loaded in place."""

    def finish_weight_update(self) -> None:
        """All of them are there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part; a CPU is not waited for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Part) -> None:
        """Load a part."""
        found = load_file(Path(update_info.folder) / "model.safetensors")
        self.model.load_weights([*found.items()][update_info.first :: 2])

    def shutdown(self) -> None:
        """There is nothing to end."""


class Life:
    """An engine, and what is done to it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.prompts: list[list[int]] = task["prompts"]
        self.root = Path(task["root"])
        self.chosen = SamplingParams(
            temperature=0, max_tokens=task["new_tokens"], ignore_eos=True
        )
        self.numbers = itertools.count()
        WeightTransferEngineFactory.register_engine("folder", FromFolder)
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=task["model"], **task["engine"])
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
        """Wait until storage has not changed for some time."""
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

    async def send(self, folder: str, first: int) -> None:
        """Transfer a half of the weights."""
        given = {"folder": folder, "first": first}
        await self.engine.update_weights(
            base.WeightTransferUpdateRequest(update_info=given)
        )

    async def transfer(self, folder: str, version: str | None, pause: str) -> None:
        """Update as a trainer does."""
        await self.engine.pause_generation(mode=pause)
        await self.engine.start_weight_update()
        await self.send(folder, 0)
        await self.send(folder, 1)
        await self.engine.finish_weight_update(version)
        await self.engine.resume_generation()

    async def broken(self, folder: str) -> str:
        """Fail when half of the weights are there, and go on asking."""
        await self.engine.pause_generation()
        await self.engine.start_weight_update()
        await self.send(folder, 0)
        try:
            await self.send("/nowhere", 1)
        except Exception as error:  # noqa: BLE001 - the engine's own
            return type(error).__name__
        finally:
            await self.engine.resume_generation()
        return ""

    async def reload(self, folder: str, version: str | None) -> None:
        """Load another checkpoint, without a trainer."""
        await self.engine.pause_generation()
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
        """Say that this step was reached."""
        Path(file).write_text("here")


async def live(task: dict[str, Any]) -> None:
    """Run the task."""
    life = Life(task)
    found: list[Any] = []
    try:
        for what, *given in task["steps"]:
            found.append(await getattr(life, what)(*given))
    finally:
        Path(task["out"]).write_text(json.dumps(found))
        life.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(live(json.loads(Path(sys.argv[1]).read_text())))
