"""Build the environment of the SGLang tests, and run them in it.

    python engines/sglang/tests/environment.py            build, or find it built
    python engines/sglang/tests/environment.py --test     run what is not long
    python engines/sglang/tests/environment.py --all      run everything
    python engines/sglang/tests/environment.py --test -k pools

SGLang comes from PyPI, unpatched: 3.4 GB, a minute and a half. Its kernels do
not: no index has a CPU build, so a stand-in in plain torch takes their place
(`standin/sgl_kernel`). All of it lives in `.venv-sglang` at the root of the
checkout; delete that folder and nothing is left.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "harness"))

from engine_environment import EngineEnvironment, tested  # noqa: E402 - found by the path above

SGLANG = tested("sglang")

CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # What is stored is loaded: a tiny model would compute it faster.
    "KVDOCK_CORE__PAYS__MODE": "always",
}
"""Environment that keeps SGLang on this machine and its processor."""

# torchvision's wheel is built for CUDA and cannot load its operators here; the
# one that stops its import is declared, which is all that SGLang needs of it.
_VISION = """\
# kvdock: declared so that this CUDA build can be imported beside torch for CPU
import torch as _torch
if not hasattr(_torch.ops.torchvision, "nms"):
    _kvdock = _torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _kvdock.define(_name + "(Tensor dets, Tensor scores, float t) -> Tensor")
"""


def _mend(site: Path) -> None:
    module = site / "torchvision" / "_meta_registrations.py"
    text = module.read_text()
    if "kvdock" not in text:
        module.write_text(_VISION + text)
    (site / "kvdock_standin.pth").write_text(f"{HERE / 'standin'}\n")


ENVIRONMENT = EngineEnvironment(
    engine="sglang",
    script=Path(__file__),
    what=f"SGLang {SGLANG} for the CPU: 3.4 GB, a minute and a half",
    packages=(
        ("-r", str(HERE / "requirements.txt")),
        # Their wheels ask for CUDA builds of torch and of the kernels.
        ("--no-deps", f"sglang=={SGLANG}", "torchvision==0.28.0"),
    ),
    mend=_mend,
    workspace={
        "core": "",
        "segments": "",
        "plugins/file": "",
        "plugins/hf3fs": "",
        "plugins/hicache": "",
        "plugins/mooncake": "[cpu]",
        "plugins/nixl": "[cu12]",
        "plugins/s3": "[demo]",
        "cli": "",
        "engines/sglang": "",
    },
    variables=CPU,
    quick="not long",
)
VENV = ENVIRONMENT.folder
build = ENVIRONMENT.build

if __name__ == "__main__":
    sys.exit(ENVIRONMENT.main())
