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

import argparse
import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
VENV = ROOT / ".venv-sglang"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
WORKSPACE = {
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
}
"""Folders of the checkout, and the extras that their tests need."""
API = ROOT / "engines" / "sglang" / "src" / "kvdock_sglang" / "engine_api.py"


def _tested() -> str:
    """Return the newest tested version: nothing of kvdock is installed yet."""
    return API.read_text().partition("TESTED = (")[2].partition(")")[0].split('"')[-2]


SGLANG = _tested()

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


def _say(what: str) -> None:
    sys.stderr.write(f"== {what}\n")


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-input"]
    subprocess.run([*command, "--disable-pip-version-check", *arguments], check=True)


def _folders() -> dict[Path, str]:
    return {
        ROOT / name: extra
        for name, extra in WORKSPACE.items()
        if (ROOT / name / "pyproject.toml").exists()
    }


def _recipe() -> str:
    """Return a digest of everything that decides what is installed."""
    digest = hashlib.sha256()
    digest.update(SGLANG.encode())
    for path in [HERE / "requirements.txt", Path(__file__)]:
        digest.update(path.read_bytes())
    for folder in _folders():
        digest.update((folder / "pyproject.toml").read_bytes())
    return digest.hexdigest()


def build() -> Path:
    """Make `.venv-sglang`, or leave it alone if it is as it should be.

    Returns:
        Its Python.
    """
    recipe = _recipe()
    if STAMP.exists() and STAMP.read_text() == recipe:
        return PYTHON
    started = time.monotonic()
    if not PYTHON.exists():
        _say(f"making {VENV.name}")
        venv.create(VENV, with_pip=True)
    _say(f"installing SGLang {SGLANG} for the CPU: 3.4 GB, a minute and a half")
    _pip("torch==2.13.0", "transformers==5.19.0", "tokenizers==0.23.2")
    # Their wheels ask for CUDA builds of torch and of the kernels.
    _pip("--no-deps", f"sglang=={SGLANG}", "torchvision==0.28.0")
    _pip("-r", str(HERE / "requirements.txt"))
    _let_torchvision_load()
    _say("installing the workspace: " + ", ".join(f.name for f in _folders()))
    for folder, extra in _folders().items():
        _pip("-e", f"{folder}{extra}")
        if folder.name == "mooncake":
            bring = [str(PYTHON), "-m", "kvdock_mooncake.system_libraries"]
            subprocess.run(bring, check=True, stdout=sys.stderr)
    site = next((VENV / "lib").glob("python3*/site-packages"))
    (site / "kvdock_standin.pth").write_text(f"{HERE / 'standin'}\n")
    STAMP.write_text(recipe)
    _say(f"{VENV.name} is ready after {time.monotonic() - started:.0f} s")
    return PYTHON


def _let_torchvision_load() -> None:
    site = next((VENV / "lib").glob("python3*/site-packages"))
    module = site / "torchvision" / "_meta_registrations.py"
    text = module.read_text()
    if "kvdock" not in text:
        module.write_text(_VISION + text)


def main() -> int:
    """Build, and with --test or --all run the suite."""
    parser = argparse.ArgumentParser(description="The SGLang test environment.")
    parser.add_argument("--test", action="store_true", help="run what is not long")
    parser.add_argument("--all", action="store_true", help="run the whole suite")
    options, arguments = parser.parse_known_args()
    python = build()
    if not (options.test or options.all):
        sys.stdout.write(f"{python}\n")
        return 0
    chosen = [] if options.all else ["-m", "not long"]
    command = [str(python), "-m", "pytest", str(HERE), *chosen, *arguments]
    # A test of the whole engine takes minutes on a machine that is busy.
    command += ["-o", "faulthandler_timeout=900"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **CPU}).returncode  # noqa: PLW1510 - pytest's own status


if __name__ == "__main__":
    sys.exit(main())
