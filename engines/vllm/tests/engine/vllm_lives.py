"""Processes with engines, one after the other, over one store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import vllm_environment
import vllm_models

RUN = Path(__file__).with_name("vllm_run.py")


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
        with log.open("w") as err:
            ended = subprocess.run(
                [sys.executable, str(RUN), str(task)],
                stdout=err,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout_s,
                env={**os.environ, **vllm_environment.CPU, **(environ or {})},
            )
        assert out.exists(), f"rc {ended.returncode}\n{log.read_text()[-4000:]}"
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
    """Return the tokens of each answer."""
    return [one["tokens"] for one in answers]
