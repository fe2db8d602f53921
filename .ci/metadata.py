"""Write what all distributions have in common into each pyproject.toml.

Usage: python .ci/metadata.py [--check | --set-version X.Y.Z]

The version, the addresses and the versions of Python stand once, in the table
`tool.kvdock` of the pyproject.toml at the root. With --check nothing is written, and
the exit status says whether anything would be.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "pyproject.toml"
FOLDERS = ("core", "segments", "cli", "plugins/*", "engines/*")
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)((a|b|rc)\d+)?")


def projects() -> list[Path]:
    """Return the pyproject.toml of every distribution."""
    found = [one for name in FOLDERS for one in ROOT.glob(f"{name}/pyproject.toml")]
    return sorted(found)


def filled(text: str, common: dict[str, object]) -> str:
    """Return the text of a pyproject.toml with what all have in common."""
    version, pythons = str(common["version"]), common["python"]
    major, minor = (int(one) for one in version.split(".")[:2])
    text = _with_version(text, version)
    # A distribution is released with the others, and asks for none of another minor;
    # a release candidate is below its release.
    least = f"{major}.{minor}" if version.replace(".", "").isdecimal() else version
    window = f">={least},<{major}.{minor + 1}"
    asked = r'("kvdock(?:-[a-z0-9]+)?)>=[^,"]+,<[\d.]+"'
    text = re.sub(asked, rf'\1{window}"', text)
    lines = "".join(
        f'  "Programming Language :: Python :: {one}",\n'
        for one in pythons  # type: ignore[attr-defined]
    )
    classifiers = r'(?:  "Programming Language :: Python :: 3\.\d+",\n)+'
    text = re.sub(classifiers, lines, text, count=1)
    text = re.sub(r"\n\[project\.urls\]\n(?:.+\n)+", "", text)
    table = urls(str(common["documentation"]), str(common["repository"]))
    rows = "".join(f'{name} = "{url}"\n' for name, url in table.items())
    return f"{text}\n[project.urls]\n{rows}" if rows else text


def _with_version(text: str, version: str) -> str:
    wanted = f'version = "{version}"'
    return re.sub(r'^version = ".*"$', wanted, text, count=1, flags=re.MULTILINE)


def urls(documentation: str, repository: str) -> dict[str, str]:
    """Return the addresses that are known, as an index shows them."""
    found = {"Documentation": documentation} if documentation else {}
    if repository:
        found |= {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        }
    return found


def main(arguments: list[str]) -> None:
    """Write or compare.

    Raises:
        SystemExit: If something is stale, or the version is none.
    """
    source = SOURCE.read_text()
    match arguments:
        case ["--set-version", version]:
            if not _VERSION.fullmatch(version):
                raise SystemExit(f"{version!r} is no version such as 0.2.0 or 0.2.0rc1")
            head, begin, rest = source.partition("[tool.kvdock]")
            source = head + begin + _with_version(rest, version)
            SOURCE.write_text(source)
        case [] | ["--check"]:
            pass
        case _:
            raise SystemExit(__doc__)
    common = tomllib.loads(source)["tool"]["kvdock"]
    stale = {
        path: text
        for path in projects()
        if (text := filled(path.read_text(), common)) != path.read_text()
    }
    if arguments == ["--check"]:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            raise SystemExit(f"{names}: stale, run: python .ci/metadata.py")
        return
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
