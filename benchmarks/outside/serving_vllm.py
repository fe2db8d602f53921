"""vLLM's benchmark of conversations, and agent-sim, against vLLM's server.

    python serving_vllm.py PYTHON [--quick]

A part of `serving.py`, in vLLM's environment. Host memory holds a quarter of what the
conversations need, the device what two requests need. agent-sim comes from the package
index into an environment of its own, made with PYTHON, and does not run where that is
"". The last line is the figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from serving import write_model  # and the paths of what follows

import attrs  # isort: skip
import test_outside  # isort: skip
import vllm_environment  # isort: skip
import vllm_models  # isort: skip
from vllm_process import connector  # isort: skip
from vllm_server import Server, serving  # isort: skip

CACHE_PRESSURE = "cache-pressure==0.6.3"
STORES = {"host": "host memory alone", "fs": "vLLM's fs tier", "kvdock": "kvdock"}
CONVERSATIONS = 6 if "--quick" in sys.argv else 10
TURNS, CLIENTS = 4, 2
COMMON, FIRST, SAID, ANSWERED = 256, 1000, 150, 16
LONGEST = 2400
"""Tokens of the longest prompt of either benchmark, and its answer."""
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
# It takes four characters for a token; each is one of this model's.
AGENTS = {"sessions": 3, "main-tokens": 500, "step-tokens": 100, "finalize-tokens": 50}
AGENTS |= {"sub-tokens": 400, "sub-windows": 2, "max-tokens": ANSWERED, "salt": 1}


def write_conversations(folder: Path) -> Path:
    """Write what the conversations are like, and a text for them."""
    text, out = folder / "text", folder / "conversations.json"
    text.write_text(" ".join(f"the {n}th page" for n in range(20_000)))
    lengths = {
        "num_turns": 2 * TURNS,
        "common_prefix_num_tokens": COMMON,
        "prefix_num_tokens": FIRST,
        "num_tokens": SAID,
    }
    constant = {
        name: {"distribution": "constant", "value": value}
        for name, value in [*lengths.items(), ("answered", ANSWERED)]
    }
    wanted = {
        "filetype": "generate_conversations",
        "num_conversations": CONVERSATIONS,
        "text_files": [str(text)],
        "prompt_output": {"num_tokens": constant.pop("answered")},
        "prompt_input": constant,
    }
    out.write_text(json.dumps(wanted))
    return out


def multi_turn(server: Server, script: Path, model: Path, top: Path) -> dict[str, Any]:
    """Let vLLM's benchmark hold its conversations; return what it took."""
    out = top / "stats.json"
    words = ["--model", str(model), "--served-model-name", "tiny", "--url", server.url]
    words += ["--input-file", str(write_conversations(top)), "--no-early-stop"]
    words += ["--num-clients", str(CLIENTS), "--stats-json-output", str(out)]
    words += ["--max-active-conversations", str(CONVERSATIONS)]
    command = [sys.executable, str(script), *words]
    subprocess.run(command, cwd=script.parent, check=True, stdout=sys.stderr)
    rows = json.loads(out.read_text())
    # A client ends where one of its conversations does, and no other one waits.
    if len(rows) != (TURNS - 1) * CONVERSATIONS + CLIENTS:
        raise SystemExit(f"{len(rows)} requests were answered")
    p50, p99 = np.percentile([one["ttft_ms"] for one in rows], [50, 99])
    begun = min(one["start_time_ms"] for one in rows)
    ended = max(one["start_time_ms"] + one["latency_ms"] for one in rows)
    sources = {
        line.split('source="')[1].split('"')[0]: int(float(line.split()[-1]))
        for line in server.get("/metrics").splitlines()
        if line.startswith("vllm:prompt_tokens_by_source_total{")
    }
    return {
        "first_token_ms_p50": round(p50, 1),
        "first_token_ms_p99": round(p99, 1),
        "requests_per_s": round(1e3 * len(rows) / (ended - begun), 2),
        **{f"tokens_{source}": count for source, count in sorted(sources.items())},
    }


def agent_sim(server: Server, script: Path, out: Path) -> dict[str, Any]:
    """Let agents work; they end at the first context that has to be computed anew."""
    words = [f"--{name}={value}" for name, value in AGENTS.items()]
    words += [f"--base-url={server.url}/v1", "--no-viz", f"--output={out}"]
    # It fails where a context was not kept.
    subprocess.run([script, *words], check=False, stdout=sys.stderr)
    summary = json.loads(out.read_text())["summary"]
    steps = AGENTS["main-tokens"] // AGENTS["step-tokens"]
    return {
        "turns": AGENTS["sessions"] * (steps - 1),
        "turns_reused": summary["main_reused"],
        "contexts": AGENTS["sessions"],
        "contexts_kept": summary["finalize_ok"],
        "contexts_as_quick": summary["finalize_ttft_ok"],
    }


def main() -> None:
    """Let each store live once."""
    config: Any = vllm_models.MIDDLING.config()
    heads, width = config.num_key_value_heads, config.head_dim
    token_bytes = 8 * config.num_hidden_layers * heads * width
    whole = COMMON + CONVERSATIONS * (FIRST + TURNS * (SAID + ANSWERED))
    archive = attrs.evolve(test_outside.ARCHIVE, members=("benchmarks/multi_turn/",))
    figures: dict[str, Any] = {"multi_turn": {}, "agent_sim": {}}
    with tempfile.TemporaryDirectory(dir=vllm_environment.VENV) as name:
        top, python = Path(name), sys.argv[1]
        script = archive.unpacked(top) / "benchmarks" / "multi_turn"
        script /= "benchmark_serving_multi_turn.py"
        agents = top / "agents" / "bin"
        if python:
            subprocess.run([python, "-m", "venv", agents.parent], check=True)
            pip = [str(agents / "python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, CACHE_PRESSURE], check=True, stdout=sys.stderr)
        model = write_model(top)
        (top / "template").write_text(TEMPLATE)
        more = ["--chat-template", str(top / "template"), "--max-model-len", "4096"]
        more += ["--num-gpu-blocks-override", str(CLIENTS * LONGEST // 32)]
        for store, said in STORES.items():
            (folder := top / store).mkdir(mode=0o700)
            transfer = connector(store, folder, whole * token_bytes // 4)
            log = top / f"{store}.log"
            with serving(model, {}, log, *more, connector=transfer) as server:
                figures["multi_turn"][said] = multi_turn(server, script, model, top)
                if python:
                    found = agent_sim(server, agents / "agent-sim", top / "agents.json")
                    figures["agent_sim"][said] = found
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
