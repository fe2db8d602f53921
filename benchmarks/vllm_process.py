"""One engine of vLLM that answers prompts: computed, and restored from storage.

    python vllm_process.py CONNECTOR MODEL FOLDER

A process of `vllm.py`, in vLLM's environment. For each line of its input, a number, it
writes a line with the seconds to the first token of a new prompt, and to that of the
same prompt after all of vLLM's own caches were reset, so that it comes from storage.
The engine's core is a process of its own, as in vLLM's server.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

# The folder of this file has one that is called like the engine. The core's process
# runs this line again.
sys.path[:] = [one for one in sys.path if Path(one) != Path(__file__).parent]

PROMPT_TOKENS, BLOCK_TOKENS = 960, 32
HOST_BYTES = 256 << 20
STORED_S = 60.0
"""How long the pages of a prompt may take until they are stored."""


def connector(kind: str, folder: Path, host_bytes: int = HOST_BYTES) -> dict[str, Any]:
    """Return the settings of a KV transfer that keeps pages in a folder, or nowhere."""
    if kind == "kvdock":
        extra: dict[str, Any] = {
            "plugin": "file",
            "root": str(folder),
            "free_space": "1 MiB",
            "host_memory": host_bytes,
        }
        return {"kv_connector": "KvdockConnector", "kv_connector_extra_config": extra}
    tiers = [{"type": "fs", "root_dir": str(folder)}] if kind == "fs" else []
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": host_bytes,
        "secondary_tiers": tiers,
    }
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def engine(kind: str, model: str, folder: Path) -> Any:  # noqa: ANN401 - vLLM's object
    """Start an engine."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - the engine
    from vllm.entrypoints.llm import LLM  # noqa: PLC0415 - same

    return LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        kv_transfer_config=KVTransferConfig(
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            **connector(kind, folder),
        ),
    )


def turn(llm: Any, number: int) -> tuple[float, float]:  # noqa: ANN401 - same
    """Return the seconds to the first token: computed, and restored."""
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415 - the engine

    chosen = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    words = random.Random(number)  # noqa: S311 - a prompt
    prompt = [words.randrange(4, 500) for _ in range(PROMPT_TOKENS)]

    def answer() -> tuple[float, int, int]:
        began = time.perf_counter()
        (one,) = llm.generate([{"prompt_token_ids": prompt}], chosen, use_tqdm=False)
        took_s = time.perf_counter() - began
        return took_s, one.num_cached_tokens or 0, one.outputs[0].token_ids[0]

    computed = restored = answer()
    if computed[1]:
        raise SystemExit(f"a new prompt was not computed: {computed}")
    end_s = time.monotonic() + STORED_S
    # The last block may be computed: its last token decides what comes next.
    while restored[1] < PROMPT_TOKENS - BLOCK_TOKENS:
        # Pages are stored after the answer, and nothing tells when: try again.
        if time.monotonic() > end_s:
            raise SystemExit(f"a prompt was not restored: {computed}, {restored}")
        if llm.reset_prefix_cache(reset_connector=True):
            restored = answer()
        if computed[2] != restored[2]:
            raise SystemExit("another token after the restore")
    return computed[0], restored[0]


def main() -> None:
    """Answer line by line."""
    kind, model, folder = sys.argv[1:]
    # vLLM logs to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = engine(kind, model, Path(folder))
    for line in sys.stdin:
        answers.write("{:.9f} {:.9f}\n".format(*turn(llm, int(line))))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
