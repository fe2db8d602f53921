"""Try the newest SGLang on the index, and explain what differs.

    python engines/sglang/tests/latest.py                the newest version
    python engines/sglang/tests/latest.py --sglang 0.5.22
    python engines/sglang/tests/latest.py --look         no test suite

The version lies beside the tested one in `.venv-sglang` and shares all of its
other packages, so it costs no second environment. A package that only the new
version needs shows as a name that cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import environment  # noqa: E402 - found by the path above

Facts = Mapping[str, Any]

FACTS = "FACTS "
"""How the line of output begins that has the facts."""

_GONE = "gone: "


def newest(listed: str) -> str:
    """Return the newest version of what `pip index versions` prints.

    Raises:
        SystemExit: If it names none.
    """
    found = re.search(r"Available versions: ([^,\s]+)", listed)
    if found is None:
        raise SystemExit("the package index names no version of sglang")
    return found[1]


def explain(tested: Facts, other: Facts) -> list[str]:
    """Say how another version differs, in the words of the adapter's tables."""
    lines = [f"SGLang {other['version']}, compared with the tested {tested['version']}"]
    if other["version"] == tested["version"]:
        lines.append("It is the tested version.")
    lines += [f"storage is rejected: {name} is missing" for name in other["missing"]]
    lines += [f"a patch is left out: {one}" for one in other["skipped_patches"]]
    lines += [
        f"host pool class without a description: {name}"
        for name in other["unknown_pools"]
        if name not in tested["unknown_pools"]
    ]
    for name, code in tested["code"].items():
        now = other["code"][name]
        if now.startswith(_GONE):
            why = now.removeprefix(_GONE)
            lines.append(f"host pool class is gone: {name} ({why})")
        elif now != code:
            lines.append(f"code that builds or copies pages differs: {name}")
    if len(lines) == 1:
        lines.append("Nothing that kvdock-sglang uses differs.")
    return lines


def look() -> Facts:
    """Return what the adapter finds in the SGLang that this process imports."""
    import sgl_kernel  # noqa: F401 - the stand-in comes before SGLang

    from kvdock_sglang import engine_api, engine_patches, host_pools

    return {
        "version": engine_api.installed_version(),
        "missing": engine_api.missing(engine_api.STORAGE),
        "skipped_patches": list(
            dict.fromkeys(map(str, engine_patches.skipped_patches()))
        ),
        "code": {name: _code(name) for name in host_pools.KNOWN},
        "unknown_pools": _unknown_pools(),
    }


def _code(name: str) -> str:
    """Return a digest of a host pool class, or why there is none."""
    from kvdock_sglang import page_order

    try:
        return page_order.code_of(pkgutil.resolve_name(name))
    except Exception as error:  # noqa: BLE001 - the report says what went wrong
        return f"{_GONE}{type(error).__name__}: {error}"


def _unknown_pools() -> list[str]:
    """Return host pool classes that the adapter has no description of."""
    from sglang.srt.mem_cache import pool_host
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    from kvdock_sglang import host_pools

    for module in pkgutil.iter_modules(pool_host.__path__, f"{pool_host.__name__}."):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)
    found: set[str] = set()
    waiting: list[type] = [HostKVCache]
    while waiting:
        below: list[type] = waiting.pop().__subclasses__()
        found.update(map(host_pools.class_name_of, below))
        waiting += below
    return sorted(found - set(host_pools.KNOWN) - set(host_pools.REJECTED))


def _environ(folder: Path | None) -> dict[str, str]:
    first = [str(folder)] if folder else []
    kept = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
    return {
        **os.environ,
        **environment.CPU,
        "PYTHONPATH": os.pathsep.join([*first, *kept]),
    }


def _look(python: Path, folder: Path | None) -> Facts:
    ran = subprocess.run(
        [str(python), __file__, "--facts"],
        env=_environ(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    for line in ran.stdout.splitlines():
        if line.startswith(FACTS):
            facts: Facts = json.loads(line.removeprefix(FACTS))
            return facts
    raise SystemExit(f"SGLang cannot be looked at:\n{ran.stderr[-3000:]}")


def _install(python: Path, version: str) -> Path:
    folder = environment.VENV / "other" / version
    if not (folder / "sglang").is_dir():
        sys.stderr.write(f"== installing SGLang {version} beside the tested one\n")
        subprocess.run(
            [
                *[str(python), "-m", "pip", "install", "--quiet", "--no-input"],
                *["--disable-pip-version-check", "--no-deps", "--target", str(folder)],
                f"sglang=={version}",
            ],
            check=True,
        )
    return folder


def main() -> int:
    """Look at another version, explain it, and run the suite with it."""
    parser = argparse.ArgumentParser(description="Try another version of SGLang.")
    parser.add_argument("--sglang", default="", help="a version; default: the newest")
    parser.add_argument("--look", action="store_true", help="run no tests")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.facts:
        sys.stdout.write(f"\n{FACTS}{json.dumps(look())}\n")
        return 0
    python = environment.build()
    version = options.sglang
    if not version:
        listing = [str(python), "-m", "pip", "index", "versions", "sglang"]
        listed = subprocess.run(listing, capture_output=True, text=True, check=True)
        version = newest(listed.stdout)
    folder = None
    if version != environment.SGLANG:
        folder = _install(python, version)
    lines = explain(_look(python, None), _look(python, folder))
    sys.stdout.write("\n".join(lines) + "\n")
    if options.look:
        return 0
    ran = subprocess.run(
        [str(python), "-m", "pytest", str(HERE), *arguments],
        cwd=environment.ROOT,
        env=_environ(folder),
        check=False,
    )
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
