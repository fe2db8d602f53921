"""Try the newest SGLang on the index, and explain what differs.

    python engines/sglang/tests/latest.py                the newest version
    python engines/sglang/tests/latest.py --sglang 0.5.22
    python engines/sglang/tests/latest.py --look         no test suite
    python engines/sglang/tests/latest.py --releases 3   the last three, reports alone

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
from types import FunctionType
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
        if isinstance(now, str):
            why = now.removeprefix(_GONE)
            lines.append(f"host pool class is gone: {name} ({why})")
        elif now != code:
            other_in = [one for one in {**code, **now} if code.get(one) != now.get(one)]
            lines.append(
                f"code that builds or copies pages differs: {name}: "
                f"{', '.join(sorted(other_in))}"
            )
    lines += _probes(tested["probe"], other["probe"])
    if len(lines) == 1:
        lines.append("Nothing that kvdock-sglang uses differs.")
    return lines


def _probes(tested: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Say of which pools the values lie elsewhere, and of which nothing is known."""
    lines, missing = [], dict[str, list[str]]()
    for family, found in tested.items():
        now = other[family]
        if now.startswith(_GONE):
            missing.setdefault(now.removeprefix(_GONE), []).append(family)
        elif now != found:
            lines.append(f"values lie elsewhere in the pages of {family}")
    lines += [
        f"not probed: {', '.join(families)} ({why})"
        for why, families in missing.items()
    ]
    same = sum(tested[family] == now for family, now in other.items())
    if tested and len(lines):
        lines.append(f"{same} of {len(tested)} pools keep every value in its place")
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
        "probe": _probe(),
    }


def _probe() -> dict[str, str]:
    """Return where known values lie in the pages of every family of pools."""
    sys.path.insert(0, str(HERE / "engine"))
    import page_probe
    import pytest
    import zoo

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        page_probe.stand_in_for_kernels(patch)
        for family in zoo.FAMILIES:
            try:
                found[family] = page_probe.digest_of(family)
            except Exception as error:  # noqa: BLE001 - the report says what went wrong
                found[family] = f"{_GONE}{type(error).__name__}: {error}"
    return found


def _code(name: str) -> dict[str, str] | str:
    """Return digests of a host pool class's methods, or why there are none."""
    from kvdock_sglang import page_order

    try:
        cls = pkgutil.resolve_name(name)
        page_order.code_of(cls)
        return {
            method: page_order.code_of_method(found)
            for base in cls.__mro__
            if base.__module__.startswith("sglang.")
            for method, found in vars(base).items()
            if isinstance(found, FunctionType)
        }
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


def _listed(python: Path) -> str:
    listing = [str(python), "-m", "pip", "index", "versions", "sglang"]
    ran = subprocess.run(listing, capture_output=True, text=True, check=True)
    return ran.stdout


def report(python: Path, count: int) -> int:
    """Print what differs in the last releases; fail where values lie elsewhere."""
    listed = re.search(r"Available versions: (.+)", _listed(python))
    if listed is None:
        raise SystemExit("the package index names no version of sglang")
    tested, worst = _look(python, None), 0
    for version in listed[1].split(", ")[:count]:
        folder = _install(python, version) if version != environment.SGLANG else None
        lines = explain(tested, _look(python, folder))
        sys.stdout.write("\n".join(lines) + "\n\n")
        sys.stdout.flush()
        worst |= any("elsewhere" in one or "rejected" in one for one in lines)
    return worst


def main() -> int:
    """Look at another version, explain it, and run the suite with it."""
    parser = argparse.ArgumentParser(description="Try another version of SGLang.")
    parser.add_argument("--sglang", default="", help="a version; default: the newest")
    parser.add_argument("--look", action="store_true", help="run no tests")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--releases", type=int, default=0, help="look at this many releases, no tests"
    )
    options, arguments = parser.parse_known_args()
    if options.facts:
        sys.stdout.write(f"\n{FACTS}{json.dumps(look())}\n")
        return 0
    python = environment.build()
    if options.releases:
        return report(python, options.releases)
    version = options.sglang
    if not version:
        version = newest(_listed(python))
    folder = None
    if version != environment.SGLANG:
        folder = _install(python, version)
    lines = explain(_look(python, None), _look(python, folder))
    sys.stdout.write("\n".join(lines) + "\n")
    if options.look:
        return 0
    ran = subprocess.run(
        [str(python), "-m", "pytest", str(HERE), *arguments],
        cwd=environment.VENV.parent,
        env=_environ(folder),
        check=False,
    )
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
