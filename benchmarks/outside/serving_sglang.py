"""`sglang.bench_serving` against SGLang's server: before a restart, and after it.

    python serving_sglang.py TRACE [--quick]

A part of `serving.py`, in SGLang's environment. The trace, or generated conversations
where it is "", as Mooncake's dataset has them. After the restart every prompt is new to
the server: what it does not compute comes from storage, or from a prompt before it. The
last line is the figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serving import ROOT, write_model  # and the paths of what follows

import engine_run  # isort: skip
from eviction_loads import conversations  # isort: skip

from kvdock.child_processes import free_port
from kvdock_cli.simulation.traces import read_trace
from kvdock_sglang.launch_flags import LOADER_KEYS

REQUESTS = 4 if "--quick" in sys.argv else 8
MOST_BLOCKS, NEW_TOKENS, CLIENTS = 10, 8, 2
LIVES = ("before", "after")
START = """import sgl_kernel, runpy
runpy.run_module("sglang.launch_server", run_name="__main__")"""
FLAGS = {
    **{k: v for k, v in engine_run.ALWAYS.items() if k != "skip_tokenizer_init"},
    "context_length": 4096,
    "max_total_tokens": 16384,
    "page_size": 64,
    "log_level": "warning",
}


def flags_of(backend: str, extra: dict[str, str]) -> dict[str, object]:
    """Return the flags of a storage backend."""
    kind = "hicache_storage_backend"
    return {kind: backend, f"{kind}_extra_config": json.dumps(extra)}


@contextmanager
def served(flags: dict[str, object], log: Path) -> Iterator[str]:
    """Run SGLang's server; yield its address."""
    port = free_port()
    words = [sys.executable, "-c", START, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", str(value)][
            : 1 if value is True else 2
        ]
    with log.open("w") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(0.1)
        else:
            raise SystemExit(log.read_text()[-3000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_storage(folder: Path) -> None:
    """Wait until nothing was written for two seconds: pages come after answers."""
    last, since = -1, time.monotonic()
    while time.monotonic() < since + 2:
        blocks = sum(one.stat().st_blocks for one in folder.rglob("*"))
        if blocks != last:
            last, since = blocks, time.monotonic()
        time.sleep(0.1)


def bench(url: str, model: Path, trace: Path) -> dict[str, float]:
    """Run SGLang's benchmark; return what it says of the requests."""
    out = trace.with_suffix(".out")
    out.unlink(missing_ok=True)
    words = ["--backend", "sglang", "--base-url", url, "--model", str(model)]
    words += ["--dataset-name", "mooncake", "--dataset-path", str(trace)]
    words += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(CLIENTS)]
    words += ["--warmup-requests", "0", "--cache-report", "--output-file", str(out)]
    command = [sys.executable, "-m", "sglang.bench_serving", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found = json.loads(out.read_text())
    if found["completed"] != REQUESTS:
        raise SystemExit(f"{found['completed']} of {REQUESTS} requests were answered")
    report = found["cache_report"]
    return {
        "first_token_ms_p50": round(found["median_ttft_ms"], 1),
        "first_token_ms_p99": round(found["p99_ttft_ms"], 1),
        "requests_per_s": round(found["request_throughput"], 2),
        "prompt_tokens": found["total_input_tokens"],
        "tokens_not_computed": report["total_cached_tokens"],
        "tokens_from_storage": report["storage_cached_tokens"] or 0,
    }


def write_trace(source: str, out: Path) -> None:
    """Write the first requests that have few blocks."""
    requests = (read_trace(Path(source)) if source else conversations(6000)).requests
    some = [one.tolist() for one in requests if len(one) <= MOST_BLOCKS][:REQUESTS]
    rows = [
        {"timestamp": 0, "output_length": NEW_TOKENS, "hash_ids": blocks}
        for blocks in some
    ]
    out.write_text("\n".join(map(json.dumps, rows)))


def main() -> None:
    """Let each store live twice."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=ROOT / ".venv-sglang") as name:
        top, trace = Path(name), Path(name) / "trace"
        write_trace(sys.argv[1], trace)
        model = write_model(top)
        (pages := top / "pages").mkdir(mode=0o700)
        own, ours = pages / "files", pages / "kvdock"
        stores: dict[str, dict[str, object]] = {
            "no storage": {},
            "SGLang's files": flags_of("file", {"file_storage_path": str(own)}),
            "kvdock": flags_of(
                "dynamic", {**LOADER_KEYS, "plugin": "file", "root": str(ours)}
            ),
        }
        for store, flags in stores.items():
            # Without storage both lives are alike.
            for life in LIVES if flags else LIVES[:1]:
                every = {**FLAGS, "model_path": model, **flags}
                with served(every, top / "log") as url:
                    figures[f"{store}, {life}"] = bench(url, model, trace)
                    wait_for_storage(pages)
    print(json.dumps({"bench_serving": figures}))


if __name__ == "__main__":
    main()
