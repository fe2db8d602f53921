"""Test suites that others wrote, run against kvdock.

They come with the source archive of a release from the package index, which is compared
with a digest, and are run as they are: a plugin of pytest's puts kvdock's classes where
they expect their own. Nothing of them is kept in the repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

LIMIT_S = 540
"""Seconds for one file of tests."""


@attrs.frozen(kw_only=True)
class Archive:
    """The source archive of one release.

    Args:
        sha256: What the file must have.
        members: Beginnings of the names that are unpacked, below its one folder.
    """

    project: str
    version: str
    sha256: str
    members: tuple[str, ...]

    def unpacked(self, folder: Path) -> Path:
        """Load it from the index; return its folder, in `folder`."""
        # In the environments of engines alone.
        from pypi_simple import PyPISimple

        with PyPISimple() as index:
            (found,) = [
                one
                for one in index.get_project_page(self.project).packages
                if one.package_type == "sdist" and one.version == self.version
            ]
            assert found.digests["sha256"] == self.sha256
            index.download_package(found, folder / found.filename, verify=True)
        name = str(found.filename).removesuffix(".tar.gz")
        wanted = tuple(f"{name}/{one}" for one in self.members)
        with tarfile.open(folder / found.filename) as archive:
            members = [one for one in archive if one.name.startswith(wanted)]
            archive.extractall(folder, members, filter="data")
        return folder / name


def run(
    file: Path, plugin: Path, lacking: Mapping[str, str], variables: Mapping[str, str]
) -> tuple[int, str]:
    """Run a file of tests with a plugin; return how many passed, and all it said.

    Args:
        lacking: Tests that do not apply, with the reason for each.
    """
    paths = [str(plugin.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = ["--noconftest", "-q", "-p", plugin.stem, "-p", "no:cacheprovider"]
    words += [f"--deselect={file.name}::{test}" for test in lacking]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-c", os.devnull, file.name],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert not done.returncode, done.stdout[-8000:] + done.stderr[-2000:]
    return _passed(done.stdout.splitlines()[-1:]), done.stdout


def _passed(last: Sequence[str]) -> int:
    """Return the number of passed tests of pytest's closing line."""
    words = " ".join(last).replace(",", "").split()
    return int(words[words.index("passed") - 1])
