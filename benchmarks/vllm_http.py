"""Conversations with `vllm serve`: host memory alone, vLLM's file tier, kvdock-file.

Usage: python benchmarks/vllm_http.py [--conversations N] [--turns N] [--clients N]
                                      [--together N] [--more]

Runs in vLLM's own environment, which it builds if it is not there (3.4 GB). Three
servers on the CPU have host memory for a quarter of what the conversations need, and
a device that holds little more than what it works on. Each turn appends to what was
said and to what the server has answered; conversations take their turns in another
order every time. Servers take turns as well, five conversations each, so that a busy
machine is equally busy for all. Per server: tokens of prompts that came from any
cache, the time to the first token, the CPU seconds of all its processes, and what is
left on the disk. The last line is a JSON object, also in results/vllm_http.json:
medians, where --more adds a run to those before.

With --together the device has room for all. After their turns its cache and host memory
are emptied, and all conversations return to a server at once, so many times. Figures
are those of the returns, in results/vllm_http_together.json; host memory alone has
nothing then, so that it is the one without a cache.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "engines" / "vllm" / "tests"
# A file beside this one is called like the engine, so its folder is searched last.
HERE = sys.path[0]
sys.path[0] = str(TESTS)
RESULTS = Path(__file__).parent / "results"

import vllm_environment  # noqa: E402 - found by the path above

if Path(sys.prefix) != vllm_environment.VENV:
    python = str(vllm_environment.build())
    os.execve(  # noqa: S606 - the same script, where vLLM is
        python,
        [python, __file__, *sys.argv[1:]],
        {**os.environ, **vllm_environment.CPU},
    )

sys.path[:0] = [str(TESTS / "engine")]
sys.path.append(HERE)

import argparse  # noqa: E402 - after the environment is the right one
import json  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import urllib.request  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from contextlib import ExitStack, contextmanager  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

import attrs  # noqa: E402
import psutil  # type: ignore[import-untyped]  # noqa: E402 - types are not installed
import vllm_models  # noqa: E402
from machine import describe  # noqa: E402
from vllm_process import BLOCK_TOKENS, connector  # noqa: E402
from vllm_server import Server, serving  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

SAID_TOKENS, ANSWER_TOKENS = 200, 16
DEVICE_BLOCKS = 72
"""What the requests of two clients need at once, and little more."""
SLICE = 5
"""Conversations that one server answers before the next server's turn."""
RATIOS = ("first_token_ms_median", "first_token_ms_p95", "cpu_s")
CONTENDERS = ("host", "fs", "kvdock")


@attrs.define(eq=False)
class Contender:
    """A server, and what it did."""

    server: Server
    folder: Path
    spoken: list[list[int]]
    first_s: list[float] = attrs.field(factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cpu_s: float = 0.0

    def turn(self, number: int, said: list[int]) -> None:
        """Say something in a conversation, and listen to the answer."""
        prompt = self.spoken[number] + said
        answer, first_s, cached = ask(self.server, prompt)
        self.first_s.append(first_s)
        self.prompt_tokens += len(prompt)
        self.cached_tokens += cached
        self.spoken[number] = prompt + answer

    def forget(self) -> None:
        """Let what comes now be all that its figures are of."""
        self.first_s, self.prompt_tokens, self.cached_tokens = [], 0, 0

    def figures(self, right: list[list[int]]) -> dict[str, float]:
        """Return its figures, once its server has ended."""
        files = [one for one in self.folder.rglob("*") if one.is_file()]
        taken = sorted(self.first_s)
        return {
            "conversations_as_hosts": sum(map(list.__eq__, self.spoken, right)),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "first_token_ms_median": round(statistics.median(taken) * 1e3, 1),
            "first_token_ms_p95": round(taken[int(0.95 * len(taken))] * 1e3, 1),
            "cpu_s": round(self.cpu_s, 1),
            "files": len(files),
            "mib": round(sum(one.stat().st_blocks for one in files) / 2048, 1),
        }


def ask(server: Server, prompt: list[int]) -> tuple[list[int], float, int]:
    """Return an answer, the seconds to its first token, and the cached tokens."""
    given = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(  # noqa: S310 - http of our own
        server.url + "/v1/completions",
        json.dumps(given).encode(),
        {"Content-Type": "application/json"},
    )
    answer: list[int] = []
    first_s, cached = 0.0, 0
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as events:  # noqa: S310 - same
        for line in events:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            for choice in event.get("choices", ()):
                first_s = first_s or time.perf_counter() - began
                answer += choice["token_ids"] or ()
            if usage := event.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"] or 0
    if len(answer) != ANSWER_TOKENS:
        raise SystemExit(f"an answer has {len(answer)} tokens")
    return answer, first_s, cached


def cpu_s(server: Server) -> float:
    """Return the CPU seconds of a server's processes."""
    first = psutil.Process(server.process.pid)
    spent = [one.cpu_times() for one in (first, *first.children(recursive=True))]
    return sum(float(one.user + one.system) for one in spent)


@contextmanager
def started(kind: str, model: Path, folder: Path, given: Any) -> Iterator[Contender]:  # noqa: ANN401 - argparse's
    """Run a server; its first answer pays for what is set up on first use."""
    config: Any = vllm_models.MIDDLING.config()
    token_bytes = (
        8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    )
    tokens = (given.turns + given.together) * (SAID_TOKENS + ANSWER_TOKENS)
    host_bytes = given.conversations * tokens * token_bytes // 4
    place = folder / kind
    place.mkdir(mode=0o700)
    blocks, more = DEVICE_BLOCKS, list[str]()
    if given.together:
        blocks = given.conversations * (2 + tokens // BLOCK_TOKENS)
        more += ["--max-num-seqs", str(given.conversations)]
        more += ["--max-model-len", "4096", "--max-num-batched-tokens", "1024"]
    more += ["--num-gpu-blocks-override", str(blocks)]
    transfer = connector(kind, place, host_bytes)
    log = folder / f"{kind}.log"
    with serving(model, {}, log, *more, connector=transfer) as server:
        ask(server, [9] * 40)
        contender = Contender(server, place, [[] for _ in range(given.conversations)])
        before_s = cpu_s(server)
        yield contender
        contender.cpu_s = cpu_s(server) - before_s


def talk(contenders: list[Contender], given: Any) -> None:  # noqa: ANN401 - same
    """Let all conversations take all their turns, with one server after the other."""
    chosen = random.Random(0)  # noqa: S311 - what is said
    for _ in range(given.turns):
        order = chosen.sample(range(given.conversations), given.conversations)
        said = [[chosen.randrange(4, 500) for _ in range(SAID_TOKENS)] for _ in order]
        for first in range(0, len(order), SLICE):
            contenders = [*contenders[1:], contenders[0]]
            for contender in contenders:
                some = order[first : first + SLICE]
                with ThreadPoolExecutor(given.clients) as clients:
                    list(clients.map(contender.turn, some, map(said.__getitem__, some)))


def return_together(contenders: list[Contender], given: Any) -> None:  # noqa: ANN401 - same
    """Let all conversations take a turn at once, with empty caches, again and again."""
    chosen = random.Random(1)  # noqa: S311 - what is said
    every = range(given.conversations)
    for contender in contenders:
        contender.forget()
    for _ in range(given.together):
        said = [[chosen.randrange(4, 500) for _ in range(SAID_TOKENS)] for _ in every]
        for contender in contenders:
            contender.server.reset()
            with ThreadPoolExecutor(given.conversations) as clients:
                list(clients.map(contender.turn, every, said))


def measured(given: Any) -> dict[str, dict[str, float]]:  # noqa: ANN401 - same
    """Start the servers, talk with them, and return what each did."""
    with tempfile.TemporaryDirectory(dir=vllm_environment.VENV) as name:
        folder = Path(name)
        model = vllm_models.make(vllm_models.MIDDLING, folder)
        # A virtual host's memory costs 15 times more when it is first used.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.writelines(bytes(1 << 20) for _ in range(1024))
        with ExitStack() as servers, ThreadPoolExecutor() as threads:

            def start(kind: str) -> Contender:
                return servers.enter_context(started(kind, model, folder, given))

            contenders = list(threads.map(start, CONTENDERS))
            talk(contenders, given)
            if given.together:
                return_together(contenders, given)
        right = contenders[0].spoken
        return {
            kind: one.figures(right)
            for kind, one in zip(CONTENDERS, contenders, strict=True)
        }


def main() -> None:
    """Measure and print; the last line is the figures."""
    parser = argparse.ArgumentParser(description="Conversations with vllm serve.")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--together", type=int, default=0)
    parser.add_argument("--more", action="store_true")
    given = parser.parse_args()
    kept = RESULTS / f"vllm_http{'_together' * bool(given.together)}.json"
    figures = measured(given)
    print(f"{'':8} {'from cache':>16} {'first token':>12} {'p95':>7} CPU s files   MiB")
    for kind, one in figures.items():
        print(
            f"{kind:8} {one['cached_tokens']:7}/{one['prompt_tokens']:8} "
            f"{one['first_token_ms_median']:9} ms {one['first_token_ms_p95']:7} "
            f"{one['cpu_s']:5} {one['files']:5} {one['mib']:5}"
        )
    runs = [figures]
    if given.more and kept.exists():
        runs = [*json.loads(kept.read_text())["runs"], figures]
    medians = {
        kind: {
            name: round(statistics.median(run[kind][name] for run in runs), 1)
            for name in figures[kind]
        }
        for kind in CONTENDERS
    }
    ours, fs = medians["kvdock"], medians["fs"]
    medians["vs_fs"] = {name: round(fs[name] / ours[name], 2) for name in RATIOS}
    about = {
        **describe(vllm_environment.VENV),
        "vllm": vllm_environment.VLLM,
        **vars(given),
    }
    RESULTS.mkdir(exist_ok=True)
    whole = {"machine": about, "figures": medians, "runs": runs}
    kept.write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
