"""The build of kvdock's library in C, which is optional.

Where it cannot be compiled the wheel is the pure one, and Python does the same work.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

SOURCE = "src/kvdock/native/pages.c"
LIBRARY = "src/kvdock/native/_pages.so"
# With these the same compiler makes the same bytes in every folder.
FLAGS = ["-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,--build-id=none"]
TIMEOUT_S = 120.0


class PagesHook(BuildHookInterface[Any]):
    """Compile the library for a wheel, or beside its source for an editable install."""

    _folder: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to what is built, or say on stderr why it is left out."""
        if self.target_name != "wheel":
            return
        editable = version == "editable"
        library = Path(self.root, LIBRARY)
        try:
            # Beside its place, so that it can be moved there.
            self._folder = TemporaryDirectory(dir=library.parent if editable else None)
            built = Path(self._folder.name, library.name)
            missing = compile_library(Path(self.root), built)
            if editable and not missing:
                # Not written over: a process may have the old one mapped.
                built.replace(library)
                return
        except OSError as error:
            missing = str(error)
        if missing:
            sys.stderr.write(f"kvdock is built without its library in C: {missing}\n")
            if editable:
                library.unlink(missing_ok=True)
            return
        build_data["force_include"][str(built)] = LIBRARY.removeprefix("src/")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform()}"

    def finalize(self, *_: object) -> None:
        """Remove what was compiled, once it is in the wheel."""
        if self._folder is not None:
            self._folder.cleanup()


def platform() -> str:
    """Return the platform of the wheel's tag: this one, if no other is named."""
    here = next(tag for tag in platform_tags() if tag.startswith("linux_"))
    return os.environ.get("KVDOCK_WHEEL_PLATFORM") or here


def compile_library(root: Path, built: Path) -> str:
    """Compile the library; return "", or why there is none."""
    if os.environ.get("KVDOCK_PURE", "0") not in {"", "0"}:
        return "KVDOCK_PURE is set"
    if sys.platform != "linux":
        return f"it is for Linux, and this is {sys.platform}"
    found = [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    try:
        command = shlex.split(os.environ.get("CC", "")) or found
        if not command:
            return "no C compiler: CC is not set, and cc, gcc and clang are not on PATH"
        # From the root, so that the name of the source is the same in every folder.
        done = subprocess.run(  # noqa: S603 - the compiler that the user names
            [*command, *FLAGS, "-o", str(built), SOURCE],
            cwd=root,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except (ValueError, subprocess.SubprocessError) as error:
        return f"the C compiler cannot be run: {error}"
    if done.returncode or not built.is_file():
        said = " ".join(f"{done.stderr} {done.stdout}".split())[:500]
        return f"{command[0]} ended with status {done.returncode}: {said}"
    built.chmod(0o644)
    return ""
