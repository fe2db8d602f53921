"""Build the environment of an engine's tests at the root of the checkout.

People run the scripts that describe one, with a Python that has nothing installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILDERS = [
    line
    for line in (ROOT / "requirements-dev.txt").read_text().split()
    if line.startswith(("hatchling", "editables"))
]
"""What builds the workspace, once and not in an environment of each folder."""


def tested(engine: str) -> str:
    """Return the newest tested version: nothing of kvdock is installed yet."""
    api = ROOT / "engines" / engine / "src" / f"kvdock_{engine}" / "engine_api.py"
    return api.read_text().partition("TESTED = (")[2].partition(")")[0].split('"')[-2]


def _say(what: str) -> None:
    sys.stderr.write(f"== {what}\n")


@dataclass(frozen=True, kw_only=True)
class EngineEnvironment:
    """What is installed, and how tests run in it.

    Args:
        engine: Its folder in `engines`; the environment is `.venv-` with this name.
        script: The file that describes it.
        what: What is installed and how big it is, for who waits.
        packages: Arguments of `pip install`, call by call.
        removed: What these bring and nothing can use.
        mend: Changes what is installed, in its site-packages.
        workspace: Folders of the checkout, and the extras that their tests ask for.
        variables: Environment variables of the tests.
        quick: How pytest chooses what `--test` runs.
    """

    engine: str
    script: Path
    what: str
    packages: tuple[tuple[str, ...], ...]
    removed: tuple[str, ...] = ()
    mend: Callable[[Path], None] | None = None
    workspace: Mapping[str, str]
    variables: Mapping[str, str]
    quick: str = ""

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-{self.engine}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def _python(self, *arguments: str) -> None:
        command = [str(self.python), "-m", *arguments]
        subprocess.run(command, check=True, stdout=sys.stderr)

    def _install(self, *arguments: str) -> None:
        # Most of what an engine brings is never imported: what is, compiles itself.
        options = ("--quiet", "--no-input", "--disable-pip-version-check")
        self._python("pip", "install", *options, "--no-compile", *arguments)

    def _recipe(self) -> str:
        """Return a digest of everything that decides what is installed."""
        digest = hashlib.sha256(repr(self.packages).encode())
        tests = self.script.parent
        projects = [ROOT / name / "pyproject.toml" for name in self.workspace]
        for path in (
            tests / "requirements.txt",
            self.script,
            Path(__file__),
            *projects,
        ):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def build(self) -> Path:
        """Make the environment, or leave it alone if it is as it should be.

        Returns:
            Its Python.
        """
        stamp, recipe = self.folder / ".installed", self._recipe()
        if stamp.exists() and stamp.read_text() == recipe:
            return self.python
        started = time.monotonic()
        if not self.python.exists():
            _say(f"making {self.folder.name}")
            venv.create(self.folder, with_pip=True)
            # Python 3.11 brings one that takes twice as long.
            self._install("--upgrade", "pip")
        _say(f"installing {self.what}")
        for arguments in self.packages:
            self._install(*arguments)
        if self.removed:
            self._python("pip", "uninstall", "--quiet", "--yes", *self.removed)
        if self.mend:
            (site,) = (self.folder / "lib").glob("python3*/site-packages")
            self.mend(site)
        _say("installing the workspace: " + ", ".join(self.workspace))
        self._install(*BUILDERS)
        folders = [f"{ROOT / name}{extra}" for name, extra in self.workspace.items()]
        editable = [part for folder in folders for part in ("-e", folder)]
        self._install("--no-build-isolation", *editable)
        if "plugins/mooncake" in self.workspace:
            self._python("kvdock_mooncake.system_libraries")
        stamp.write_text(recipe)
        _say(f"{self.folder.name} is ready after {time.monotonic() - started:.0f} s")
        return self.python

    def main(self) -> int:
        """Build, and with --test or --all run the suite."""
        parser = argparse.ArgumentParser(description=f"The tests of {self.engine}.")
        parser.add_argument("--test", action="store_true", help="run the quicker tests")
        parser.add_argument("--all", action="store_true", help="run the whole suite")
        options, arguments = parser.parse_known_args()
        python = self.build()
        if not (options.test or options.all):
            sys.stdout.write(f"{python}\n")
            return 0
        chosen = ["-m", self.quick] if self.quick and not options.all else []
        # `make test` runs those beside it, which need no engine.
        tests = str(self.script.parent / "engine")
        command = [str(python), "-m", "pytest", tests, *chosen, *arguments]
        # A test of a whole engine takes minutes on a machine that is busy.
        command += ["-o", "faulthandler_timeout=900"]
        environ = {**os.environ, **self.variables}
        # Tests start many processes: what all of them import is compiled once.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.run(command, cwd=ROOT, env=environ).returncode  # noqa: PLW1510 - pytest's own status
