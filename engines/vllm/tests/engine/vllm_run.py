"""One process: engines of vLLM, one after the other, that answer and end.

    python vllm_run.py TASK.json

A task names the phases; each is one engine with its model and its storage. What it
answered, and what kvdock moved for it by its own count, is written to the task's
`out`, phase by phase.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from scenes import SCENES, START_S, Watch, held, meet, tier_of

FINISH_S = 60.0
SHARED = Path("/dev/shm")  # noqa: S108 - where vLLM puts its host memory


def finish(llm: Any) -> None:
    """Step until everything is stored: a store begins in the step after its own."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    end_s = time.monotonic() + FINISH_S
    while time.monotonic() < end_s:
        llm.llm_engine.engine_core.engine_core.step_fn()
        if not connector.has_pending_push_work():
            return
        time.sleep(0.002)
    raise TimeoutError("stores have not ended")


def alter_loaded_rows(tier: Any, alter: dict[str, Any]) -> None:
    """Change each row after it was loaded and verified, which nothing can notice.

    Args:
        tier: Kvdock's tier.
        alter: `pool`, or "" for all; `pieces`, which of a row's are changed.
    """
    view = tier._primary_kv_view
    rows = np.frombuffer(view, np.uint8).reshape(view.shape)
    real = tier._result

    def altered(job: Any) -> Any:
        for part, transfer in job.transfers if job.promotion else ():
            if alter.get("pool") not in ("", None, transfer.pool):
                continue
            region = tier._attachment[transfer.pool].region
            runs = alter.get("bytes") or [
                (int(base) - rows.ctypes.data, int(size))
                for base, size in zip(
                    region.bases[0].tolist(), region.sizes[0].tolist(), strict=True
                )
            ]
            assert len(part.positions) == len(transfer.pages)
            for page in transfer.pages.tolist():
                for start, size in runs:
                    # The sign of every number of four bytes, of every second of two.
                    rows[page, start : start + size][3::4] ^= 0x80
        return real(job)

    tier._result = altered


def answers(
    llm: Any, prompts: list[list[int]], phase: dict[str, Any], salt: str | None
) -> list[Any]:
    """Return tokens and their log probabilities for each prompt."""
    from vllm.sampling_params import SamplingParams

    chosen = SamplingParams(
        temperature=0,
        max_tokens=phase.get("new_tokens", 16),
        ignore_eos=True,
        logprobs=None if phase.get("draft") else 1,
    )
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    for one in given:
        if salt:
            one["cache_salt"] = salt
        if phase.get("image") is not None:
            one["multi_modal_data"] = {"image": picture(phase["image"])}
        if phase.get("image_named_as") is not None:
            one["multi_modal_uuids"] = {
                "image": [hash_of(llm, phase["image_named_as"])]
            }
        elif phase.get("image_name"):
            one["multi_modal_uuids"] = {"image": [phase["image_name"]]}
    more: dict[str, Any] = {}
    if phase.get("lora"):
        from vllm.lora.request import LoRARequest

        given_lora = phase["lora"]
        more["lora_request"] = LoRARequest(
            given_lora.get("name", "adapter"),
            given_lora.get("id", 1),
            given_lora["path"],
            load_inplace=given_lora.get("load_inplace", False),
        )
    if phase.get("embed"):
        # The last bits differ with the shape of a batch.
        return [
            {
                "cached": one.num_cached_tokens,
                "tokens": [round(part, 3) for part in one.outputs.embedding],
                "logprobs": [],
            }
            for one in llm.embed(given, use_tqdm=False)
        ]
    found = llm.generate(given, chosen, use_tqdm=False, **more)
    return [
        {
            "cached": one.num_cached_tokens,
            "tokens": list(one.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(
                    one.outputs[0].token_ids,
                    one.outputs[0].logprobs or (),
                    strict=False,
                )
            ],
        }
        for one in found
    ]


def picture(seed: int) -> Any:
    """Return an image that is the same in every process."""
    from PIL import Image  # type: ignore[import-not-found]  # beside vLLM alone

    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
    return Image.fromarray(pixels)


def hash_of(llm: Any, seed: int) -> str:
    """Return the name that vLLM gives an image that has none."""
    from vllm.multimodal.hasher import MultiModalHasher

    config = llm.model_config
    return str(
        MultiModalHasher.hash_kwargs(
            config.multimodal_config.mm_hasher_algorithm,
            model_id=config.model,
            image=picture(seed),
        )
    )


def acceptance(llm: Any) -> dict[str, Any]:
    """Return the engine's own counts of drafted and accepted tokens."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            found[metric.name] = getattr(metric, "value", None) or getattr(
                metric, "values", 0
            )
    return found


def preemptions(llm: Any) -> int:
    """Return how often the engine has preempted a request."""
    return sum(
        int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == "vllm:num_preemptions"
    )


def let_llvmlite_be_read() -> None:
    """Let a second engine start in a process that has loaded llvmlite.

    vLLM 0.32 reads the `__dict__` of every value of every module then, and llvmlite's
    library answers any name, this one too, with a function.

    Source: vLLM 0.32.0, `triton_utils/dispatcher.py:_rebind_kernels`.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    library: Any = type(ffi.lib)
    answer = library.__getattr__

    def answer_but_dict(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    library.__getattr__ = answer_but_dict


def change_between_rounds(llm: Any, tier: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Do what a phase names between two rounds; return the phase of the next one."""
    if phase.get("kill"):
        tier._attachment.wait_idle(60)  # until copies have ended
    for pid in phase.get("kill", ()):
        with suppress(ProcessLookupError):  # it was killed before the last round
            os.kill(pid, signal.SIGKILL)
    if phase.get("drain"):
        # Late calls have ended, and the device has lost its pages.
        assert tier._transfers.drain(60)
        assert llm.reset_prefix_cache()
    if phase.get("swap"):
        # An ordinary roll-out: other files, the same path.
        new, used = phase["swap"]
        shutil.copytree(new, used, dirs_exist_ok=True)
    if phase.get("reload"):
        path = {"weights_path": phase["reload"]}
        llm.collective_rpc("reload_weights", kwargs=path)
        assert llm.reset_prefix_cache()
    if phase.get("forget_host"):
        # What the device still has is stored again.
        llm.llm_engine.engine_core.engine_core.scheduler.connector.reset_cache()
    later = {"lora": "later_lora", "prompts": "later_prompts"}
    return {
        **phase,
        **{own: phase[one] for own, one in later.items() if phase.get(one)},
    }


def live(phase: dict[str, Any]) -> dict[str, Any]:
    """Run one engine."""
    from vllm.config import KVTransferConfig
    from vllm.entrypoints.llm import LLM

    let_llvmlite_be_read()
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "block_size": 32,
        "enforce_eager": True,
        "seed": 0,
        "enable_prefix_caching": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "disable_log_stats": False,
        **phase.get("engine", {}),
    }
    if phase.get("draft"):
        arguments["speculative_config"] = {
            "model": phase["draft"],
            "num_speculative_tokens": phase.get("draft_tokens", 3),
            "method": phase["method"],
        }
    llm = LLM(
        model=phase["model"],
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvdockConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"host_memory": "64 MiB", **phase["storage"]},
        ),
        **arguments,
    )
    tier = tier_of(llm)
    watch = Watch.of(tier)
    if phase.get("alter") is not None:
        alter_loaded_rows(tier, phase["alter"])
    if phase.get("meet"):
        meet(phase["meet"])
    if phase.get("scene"):
        did = SCENES[phase["scene"]](llm, phase)
        finish(llm)
        llm.llm_engine.engine_core.shutdown()
        return {**did, **watch.found()}
    rounds, accepted, seconds = [], [], []
    for number in range(phase.get("rounds", 1)):
        before = time.monotonic()
        if number:
            phase = change_between_rounds(llm, tier, phase)
        salts = phase.get("salts") or [phase.get("salt")]
        salt = salts[number % len(salts)]
        rounds.append(answers(llm, phase["prompts"], phase, salt))
        seconds.append(time.monotonic() - before)
        finish(llm)
        accepted.append(acceptance(llm) if phase.get("draft") else {})
    preempted = 0 if arguments["disable_log_stats"] else preemptions(llm)
    taken = held(llm) if phase.get("held") else 0
    plan = tier._attachment.plan
    routes = {route.pool.name: route.backend for route in plan.accepted}
    groups = [
        {"layers": group.layers, "pieces": group.pieces, "number": group.number}
        for group in tier._identity.groups
    ]
    llm.llm_engine.engine_core.shutdown()
    return {
        "rounds": rounds,
        "accepted": accepted,
        "seconds": seconds,
        "groups": groups,
        "preemptions": preempted,
        "held": taken,
        "routes": routes,
        "row_bytes": tier._spec.kv_bytes_per_chunk,
        **watch.found(),
    }


def kill(phase: dict[str, Any]) -> dict[str, Any]:
    """Run one engine in a child, and kill it some time after it began to store.

    The child has what this process has imported, so it starts within seconds. What a
    killed engine leaves in shared memory stays there, where kvdock's doctor names it:
    it is removed here.
    """
    import vllm.entrypoints.llm

    del vllm
    mark = Path(phase["mark"])
    mark.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            live(phase)
        finally:
            traceback.print_exc()
            os._exit(1)
    end_s = time.monotonic() + START_S
    try:
        while not mark.exists():
            if time.monotonic() > end_s or not is_running(child):
                raise TimeoutError("the engine has not stored anything")
            time.sleep(0.01)
        time.sleep(phase["kill_after_s"])
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    killed = os.WTERMSIG(status) == signal.SIGKILL
    answering, name = mark.read_text().split()
    left = SHARED / f"vllm_offload_{name}.mmap"
    left.unlink()
    return {"killed": killed, "answering": int(answering)}


def is_running(child: int) -> bool:
    """Return whether a child runs, and leave its status to be collected."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def main() -> int:
    """Run the phases of a task."""
    task = json.loads(Path(sys.argv[1]).read_text())
    import mamba2_prefixes
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    mamba2_prefixes.apply()
    results: dict[str, Any] = {}
    for phase in task["phases"]:
        began = time.monotonic()
        try:
            run = kill if "kill_after_s" in phase else live
            results[phase["name"]] = run(phase)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            traceback.print_exc()
            results[phase["name"]] = {"error": f"{type(error).__name__}: {error}"}
            # A rejected engine leaves its connector to the next one of this process.
            ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()
        results[phase["name"]]["whole_s"] = time.monotonic() - began
        Path(task["out"]).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
