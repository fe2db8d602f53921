"""Processes with engines, one after the other, over one store."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import vllm_environment
import vllm_models
import warm_python

RUN = Path(__file__).with_name("vllm_run.py")
IMPORTED = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")


def prompts(tokens: int) -> list[list[int]]:
    """Return two prompts that share no prefix."""
    return [
        [(7 * n + 3) % 500 + 4 for n in range(tokens)],
        [(11 * n + 5) % 500 + 4 for n in range(tokens + 7)],
    ]


@attrs.frozen(kw_only=True)
class Lives:
    """Checkpoints, stores, and a place for what processes leave behind."""

    models: Path
    folder: Path

    def phase(
        self,
        family: str,
        name: str,
        storage: dict[str, Any],
        **more: Any,
    ) -> dict[str, Any]:
        """Describe one engine: its model, its prompts and where it stores."""
        tiny = vllm_models.FAMILIES[family]
        found = {
            "name": name,
            "model": str(vllm_models.make(tiny, self.models)),
            "prompts": prompts(tiny.prompt_tokens),
            "engine": tiny.engine,
            "storage": storage,
            **more,
        }
        if tiny.draft:
            draft = vllm_models.FAMILIES[tiny.draft]
            found["draft"] = str(vllm_models.make(draft, self.models))
            found["method"] = tiny.method
        return found

    def run(
        self,
        life: str,
        phases: list[dict[str, Any]],
        *,
        environ: dict[str, str] | None = None,
        timeout_s: float = 540,
    ) -> dict[str, Any]:
        """Run engines in one process of their own; return what each did."""
        out = self.folder / f"{life}.json"
        task = self.folder / f"{life}.task.json"
        task.write_text(json.dumps({"phases": phases, "out": str(out)}))
        log = self.folder / f"{life}.log"
        seed = len(list(self.folder.glob("*.log"))) % 2 + 1
        # Imports may read other variables.
        start = warm_python.cold if environ else warm_python.warm(IMPORTED, seed)
        variables = {**os.environ, **vllm_environment.CPU, **(environ or {})}
        process = start([str(RUN), str(task)], variables, log)
        try:
            status = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert out.exists(), f"rc {status}\n{log.read_text()[-4000:]}"
        found: dict[str, Any] = json.loads(out.read_text())
        forgiven = {one["name"] for one in phases if one.get("may_fail")}
        for name, did in found.items():
            assert "error" not in did or name in forgiven, (
                f"{name}: {did}\n{log.read_text()[-6000:]}"
            )
        assert len(found) == len(phases), log.read_text()[-4000:]
        return found


def log_probability_distance(left: list[Any], right: list[Any]) -> float:
    """Return how far the log probabilities of two rounds are apart, at most."""
    return max(
        abs(float(one) - float(other))
        for mine, theirs in zip(left, right, strict=True)
        for one, other in zip(mine["logprobs"], theirs["logprobs"], strict=True)
    )


def tokens(answers: list[Any]) -> list[list[int]]:
    return [one["tokens"] for one in answers]
