"""What an engine of a test does, beyond answering its prompts.

Each takes the engine, the phase that a test describes, and what watches the tier,
and returns what a test looks at. They run in a process of their own.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

STEPS_ALONE = 60
"""Steps of a running request that are timed before another one arrives, and after it
has ended: a machine that others use is not equally fast all the time."""

END_S = 120.0
HELD_S = 30.0
COUNTED = "vllm:kvdock_host_memory_"
BESIDE = "beside-"
"""How the names of requests begin that run beside those who come back."""
START_S = 300.0
"""How long an engine may take to start where other programs use the machine."""


@attrs.define(eq=False)
class Watch:
    """What kvdock's jobs did.

    Args:
        pages: Pool, operation and outcome, to the number of pages.
        attempts: Request and key to the number of loads that were tried.
        jobs: Whether it was a load, its seconds, and how many pages were moved.
    """

    pages: Counter[str] = attrs.field(factory=Counter)
    attempts: Counter[tuple[str, bytes]] = attrs.field(factory=Counter)
    jobs: list[tuple[bool, float, int]] = attrs.field(factory=list)

    @classmethod
    def of(cls, tier: Any) -> Watch:
        from kvdock import Outcome

        watch = cls()
        began: dict[int, float] = {}
        submit, result = tier._submit, tier._result

        def submitted(given: Any) -> None:
            began[given.job_id] = time.monotonic()
            if given.is_promotion:
                request = given.req_context.req_id
                watch.attempts.update((request, bytes(key)) for key in given.keys)
            submit(given)

        def ended(job: Any) -> Any:
            took_s = time.monotonic() - began.pop(job.number)
            watch.jobs.append((job.promotion, took_s, int(job.ended().sum())))
            operation = "load" if job.promotion else "store"
            for _, transfer in job.transfers:
                for code in transfer.outcomes.tolist():
                    name = Outcome(code).name.lower()
                    watch.pages[f"{transfer.pool}/{operation}/{name}"] += 1
            return result(job)

        tier._submit, tier._result = submitted, ended
        return watch

    def found(self) -> dict[str, Any]:
        """Return it as a test reads it."""
        return {
            "pages": dict(self.pages),
            "attempts": max(self.attempts.values(), default=0),
            "jobs": self.jobs,
        }


def beside(llm: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of a running request, alone and while another one waits.

    The other one's prompt is stored, and storage may hang.
    """
    from vllm.sampling_params import SamplingParams

    engine = llm.llm_engine
    alone: list[float] = []
    together: list[float] = []
    ended: dict[str, Any] = {}
    arrived = 0.0
    waiting = True

    def chosen(count: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)

    running = [(13 * n + 11) % 500 + 4 for n in range(40)]
    engine.add_request("running", {"prompt_token_ids": running}, chosen(900))
    end_s = time.monotonic() + END_S
    while len(alone) < 2 * STEPS_ALONE and time.monotonic() < end_s:
        began = time.monotonic()
        outputs = engine.step()
        took_s = time.monotonic() - began
        for one in outputs:
            if one.request_id == "other":
                waiting = False
            if one.finished:
                ended[one.request_id] = list(one.outputs[0].token_ids)
        if arrived and waiting:
            together.append(took_s)
        elif outputs and bool(arrived) == ("other" in ended):
            alone.append(took_s)
            if not arrived and len(alone) == STEPS_ALONE:
                other = {"prompt_token_ids": phase["prompts"][0]}
                engine.add_request("other", other, chosen(phase["new_tokens"]))
                arrived = time.monotonic()
    engine.abort_request(["running"])
    return {
        "alone": alone,
        # The last one computes the whole prompt.
        "together": together[:-1],
        "other": ended.get("other"),
    }


def reset_under_jobs(llm: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Reset all of vLLM's caches in steps in which a store or a load runs."""
    from vllm.sampling_params import SamplingParams

    engine = llm.llm_engine
    tier = tier_of(llm)
    chosen = SamplingParams(
        temperature=0, max_tokens=phase["new_tokens"], ignore_eos=True
    )
    resets: Counter[str] = Counter()
    ended: dict[str, Any] = {}
    for number, prompt in enumerate(phase["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, chosen)
    end_s = time.monotonic() + END_S
    while engine.has_unfinished_requests() and time.monotonic() < end_s:
        for one in engine.step():
            if one.finished:
                ended[one.request_id] = list(one.outputs[0].token_ids)
        kinds = {"load" if job.promotion else "store" for job in tier._jobs}
        if any(resets[kind] < phase["resets"] for kind in kinds):
            # vLLM rejects a reset while a request waits for a copy to the device.
            with suppress(RuntimeError):
                llm.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=True
                )
                resets.update(kinds)
                # No call may touch the rows that the next pages get.
                assert all(job.done for job in tier._jobs)
    tokens = [ended.get(str(number)) for number in range(len(phase["prompts"]))]
    return {"tokens": tokens, "resets": dict(resets)}


def store_until_killed(llm: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Answer new prompts without end; once a store runs, note which come next.

    And the name of the engine, by which its shared memory is found.
    """
    from vllm.sampling_params import SamplingParams

    tier = tier_of(llm)
    chosen = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    first = phase["first"]
    mark = Path(phase["mark"])
    while True:
        prompts = [
            {"prompt_token_ids": unlike_others(number, 300)}
            for number in range(first, first + 4)
        ]
        llm.generate(prompts, chosen, use_tqdm=False)
        first += 4
        if tier._jobs or mark.exists():
            new = mark.with_suffix(".new")
            name = llm.llm_engine.vllm_config.kv_transfer_config.engine_id
            new.write_text(f"{first} {name}")
            new.replace(mark)


def unlike_others(number: int, tokens: int) -> list[int]:
    """Return a prompt that shares no prefix with those of other numbers."""
    return [(number * n + n * n + 7) % 500 + 4 for n in range(1, tokens + 1)]


def meet(marks: list[str]) -> None:
    """Leave the first mark, and wait for those of other processes."""
    Path(marks[0]).touch()
    end_s = time.monotonic() + START_S
    while not all(Path(mark).exists() for mark in marks):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not all of {marks} are there")
        time.sleep(0.01)


def tier_of(llm: Any) -> Any:
    """Return kvdock's tier of an engine in this process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.connector.connector_scheduler.manager.secondary_tiers[0]


def held(llm: Any) -> int:
    """Step until no row of host memory is taken; return how many still are.

    By loads, or by pins on pages.
    """
    engine = llm.llm_engine.engine_core.engine_core
    memory = engine.scheduler.connector._memory
    assert memory is not None, "a decision about loads has failed"
    end_s = time.monotonic() + HELD_S
    while True:
        taken = len(memory._loads) + memory._reserved.total()
        taken += memory._rows - memory._free_rows()
        if not taken or time.monotonic() > end_s:
            return int(taken)
        engine.step_fn()


def pay(llm: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Time first tokens with a throttled store: computing, loading, and deciding."""
    from vllm.sampling_params import SamplingParams

    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    tier = tier_of(llm)
    injectors = {
        id(one): one
        for placements in tier._tiers.values()
        for placement in placements.values()
        if (one := getattr(placement.handle, "_injector", None)) is not None
    }
    decisions = connector._loads
    chosen = SamplingParams(temperature=0, max_tokens=1)

    def first_token_s(prompt: list[int]) -> float:
        began = time.monotonic()
        llm.generate([{"prompt_token_ids": prompt}], chosen, use_tqdm=False)
        took_s = time.monotonic() - began
        end_s = time.monotonic() + END_S
        while connector.has_pending_push_work() and time.monotonic() < end_s:
            llm.llm_engine.engine_core.engine_core.step_fn()
        assert llm.reset_prefix_cache(reset_connector=True)
        return took_s

    shuffled = random.Random(7)  # noqa: S311 - prompts

    def any_prompt(tokens: int) -> list[int]:
        return [shuffled.randrange(4, 500) for _ in range(tokens)]

    for number in range(4):
        first_token_s(any_prompt(phase["tokens"] // (1 + number)))
    prompt = any_prompt(phase["tokens"])
    first_token_s(prompt)
    found: dict[str, Any] = {}
    for speed in phase["speeds"]:
        for injector in injectors.values():
            injector.inject(kinds=("throttle",), operations=("get",), bandwidth=speed)
        rows: dict[str, list[float]] = {"compute": [], "always": [], "on": []}
        for number in range(phase["requests"] + phase["first"]):
            took = {"compute": first_token_s(any_prompt(phase["tokens"]))}
            connector._loads = None
            if number < phase["requests"]:
                took["always"] = first_token_s(prompt)
            connector._loads = decisions
            took["on"] = first_token_s(prompt)
            for name, took_s in took.items():
                rows[name].append(took_s)
        found[str(speed)] = rows
        print(speed, rows, flush=True)  # noqa: T201 - for its log
    return {"seconds": found}


@attrs.define(eq=False)
class Returns:
    """An engine that is asked again for prompts that are stored.

    Args:
        loads: Page to how often it was loaded since the caches were emptied.
        ended: Answers by request.
    """

    llm: Any
    new_tokens: int
    loads: Counter[bytes] = attrs.field(factory=Counter)
    ended: dict[str, Any] = attrs.field(factory=dict)

    def watch(self) -> None:
        """Count what is loaded for those who come back."""
        tier = tier_of(self.llm)
        submit = tier.submit_load

        def counted(job: Any) -> None:
            if not job.req_context.req_id.startswith(BESIDE):
                self.loads.update(bytes(key) for key in job.keys)
            submit(job)

        tier.submit_load = counted

    def add(self, name: str, prompt: list[int], count: int) -> None:
        from vllm.sampling_params import SamplingParams

        chosen = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, chosen)

    def step(self) -> None:
        """Take a step of the engine."""
        for one in self.llm.llm_engine.step():
            if one.finished:
                self.ended[one.request_id] = one

    def empty(self) -> None:
        """Empty the caches of device and host: what comes then is from storage."""
        end_s = time.monotonic() + END_S
        while time.monotonic() < end_s:
            with suppress(RuntimeError):  # a load reaches the device
                if self.llm.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=True
                ):
                    return
            self.step()
        raise TimeoutError("caches were not emptied")

    def answer(self, names: list[str], end_s: float, disturb: str) -> None:
        """Answer requests until a time; disturb them once pages are loaded."""
        while not self.ended.keys() >= set(names) and time.monotonic() < end_s:
            self.step()
            if disturb and self.loads:
                if disturb == "abort":
                    self.llm.llm_engine.abort_request([names.pop(0)])
                else:
                    self.empty()
                disturb = ""

    def found(self, names: list[str]) -> dict[str, Any]:
        """Return what a test looks at."""
        answers = [self.ended.get(name) for name in names]
        return {
            "tokens": [one and list(one.outputs[0].token_ids) for one in answers],
            "cached": [one.num_cached_tokens if one else 0 for one in answers],
            "loads": self.loads.total(),
            "different": len(self.loads),
        }


def come_back(llm: Any, phase: dict[str, Any]) -> dict[str, Any]:
    """Ask for stored prompts again, some at once, beside a request that runs.

    Each of `returns` has its prompts. Once pages of them are loaded, `disturb` ends the
    first of the requests with "abort", and empties the caches with "reset".
    """
    returns, found = Returns(llm, phase["new_tokens"]), []
    returns.watch()
    for at, asked in enumerate(phase["returns"]):
        returns.empty()
        returns.loads.clear()
        beside = f"{BESIDE}{at}"
        if phase["beside"]:
            running = [(13 * n + 11 + at) % 500 + 4 for n in range(40)]
            returns.add(beside, running, 2000)
            returns.step()
        began = time.monotonic()
        names = [f"{at}-{number}" for number in range(len(asked["prompts"]))]
        for name, prompt in zip(names, asked["prompts"], strict=True):
            returns.add(name, prompt, phase["new_tokens"])
        returns.answer(names, began + phase["limit_s"], asked.get("disturb", ""))
        found.append({"seconds": time.monotonic() - began, **returns.found(names)})
        llm.llm_engine.abort_request([beside, *(set(names) - returns.ended.keys())])
        found[-1]["held"] = held(llm)
    counted = {
        one.name.removeprefix(COUNTED): one.value
        for one in llm.get_metrics()
        if one.name.startswith(COUNTED)
    }
    return {"returns": found, "counted": counted}


SCENES = {
    "pay": pay,
    "back": come_back,
    "beside": beside,
    "killed": store_until_killed,
    "reset": reset_under_jobs,
}
