"""Benchmarks that others wrote, as clients of real servers on the CPU.

Usage: serving.py [--trace FILE] [--agent-sim PYTHON] [--only ENGINE]
                  [--quick] [--save]

`make bench-serving` runs it with any Python. Two parts, each in the environment of its
engine, which is built if it is not there (3.4 GB each), one server at a time:

- sglang: `sglang.bench_serving`, Mooncake's workload, against SGLang without storage,
  with its own files and with kvdock, before and after a restart (`serving_sglang.py`);
- vllm: vLLM's benchmark of conversations, from its source archive, and agent-sim of
  cache-pressure, against vLLM with host memory alone, with its own file tier and with
  kvdock (`serving_vllm.py`).

agent-sim runs where PYTHON, or the Python that runs this, is 3.12 or newer: its
releases say 3.9, and older ones do not read their syntax. The last line is one JSON
object; with --save the figures are kept in benchmarks/results/serving.json, of which
docs/fill_benchmarks.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULT = HERE.parent / "results" / "serving.json"
for tests in (ROOT / "engines" / name / "tests" for name in ("sglang", "vllm")):
    sys.path[:0] = [str(tests), str(tests / "engine")]
sys.path.insert(0, str(ROOT / "tests" / "harness"))
# At the end: scripts of that folder have the names of libraries.
sys.path.append(str(HERE.parent))

import environment as sglang_environment  # noqa: E402 - found by the path above
import vllm_environment  # noqa: E402 - same
from machine import describe  # noqa: E402 - same

ENGINES = {"vllm": vllm_environment, "sglang": sglang_environment}
NEW_ENOUGH = (3, 12)
VISIBLE = slice(4, 98)
"""Tokens of the model that are characters which can be seen."""


def write_model(folder: Path) -> Path:
    """Write a model whose every token is text, for clients that wait for text.

    Called by the parts, in an engine's environment.
    """
    import vllm_models  # noqa: PLC0415 - in an engine's environment
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - same

    model = Path(vllm_models.make(vllm_models.MIDDLING, folder))
    weights = load_file(model / "model.safetensors")
    head = weights["lm_head.weight"]
    kept = head[VISIBLE].clone()
    head.zero_()[VISIBLE] = kept
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def main() -> None:
    """Run the parts one after the other, and keep what they print last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids")
    new = sys.executable if sys.version_info >= NEW_ENOUGH else ""
    parser.add_argument("--agent-sim", default=new, help="a Python of 3.12 or newer")
    parser.add_argument("--only", choices=ENGINES, help="one engine's part")
    parser.add_argument("--quick", action="store_true", help="half of the requests")
    parser.add_argument("--save", action="store_true", help="keep them for the page")
    given = parser.parse_args()
    whole = {"machine": describe(ROOT), "quick": given.quick, "figures": {}}
    words = {"sglang": given.trace or "", "vllm": given.agent_sim}
    for name in [given.only] if given.only else ENGINES:
        python = ENGINES[name].build()
        script = [str(python), str(HERE / f"serving_{name}.py"), str(words[name])]
        script += ["--quick"] if given.quick else []
        done = subprocess.run(
            script,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, **ENGINES[name].CPU},
        )
        whole["figures"] |= json.loads(done.stdout.splitlines()[-1])
    if given.save:
        RESULT.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole))


if __name__ == "__main__":
    main()
