"""Find and run the blocks of code in the pages of the site and in READMEs.

A block has a language, which says what is done with it:

| language | what is done |
|---|---|
| `sh`, `console` | run by bash, which stops at the first error; `$ ` begins a command |
| `python` | all blocks of a page run as one program, warnings are errors |
| `toml`, `json`, `yaml`, `ini` | read; settings of kvdock are checked by their schema |
| `text` | output: each line was printed by the block before it |

A comment before the block says why it is not run:

    <!-- not run: server -->

Commands of kvdock in blocks that are not run, and in the text, are still checked
against the options that there are.

Everything of a page runs in a folder of its own, in which the example paths of the
pages (below /var and /tmp) lie. `pip` is a script that checks what is to be installed.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import yaml

from kvdock_segments.index_file import erase_records, read_contents
from kvdock_segments.paths import IndexName

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "plugins" / "file" / "tests" / "data" / "stored_sample_2.tar.xz"

REASONS = {
    "server": "needs a server or a bucket",
    "gpu": "needs a GPU",
    "cluster": "needs several hosts, 3FS or Kubernetes",
    "engine": "needs SGLang or vLLM installed",
    "root": "needs another user, or changes the machine",
    "checkout": "is a target of make, or takes the whole checkout",
    "long": "takes more than seconds; `make test-site` runs it",
    "excerpt": "is part of something, or shows how it is written",
}
"""Why a block is not run, and what that means."""

FENCE = re.compile(r"^( *)(`{3,}|:{3,})(.*)$")
MARK = re.compile(r"<!-- not run: (.+?) -->")
EXAMPLE_PATHS = re.compile(r"(?<![\w/])/(?=(?:var/lib|var/cache|tmp)/)")
COMMAND = re.compile(r"(?:^|[;&|(]\s*|\$ |! )kvdock(?= |$)([^;&|)#\n]*)", re.MULTILINE)
INLINE = re.compile(r"(?<!`)`(kvdock(?: [^`]*)?)`")
NOT_COMMANDS = ("kvdock stores these pools",)
"""Words of a log that begin like a command."""


@attrs.frozen
class Block:
    """One block of code.

    Args:
        page: Its page, from the root of the repository.
        line: Number of the line of its fence.
        language: What stands behind the fence.
        body: Its text, without the indentation of a list that it stands in.
        reason: Why it is not run, or "".
    """

    page: str
    line: int
    language: str
    body: str
    reason: str = ""

    def __str__(self) -> str:
        """Return where it stands."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the pages of the site, READMEs among them."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
    found += [*ROOT.glob("*/*/README.md")]
    known = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    left_out = ("changelog.d/", "docs/decisions/", "CHANGELOG.md")
    names = {str(path.relative_to(ROOT)) for path in found} & set(known)
    return [ROOT / name for name in sorted(names) if not name.startswith(left_out)]


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a page that are fenced; directives are none."""
    page = str(path.relative_to(ROOT))
    found: list[Block] = []
    lines = path.read_text().splitlines()
    at, last = 0, ""
    while at < len(lines):
        match = FENCE.match(lines[at])
        if not match:
            last = lines[at].strip() or last
            at += 1
            continue
        indent, fence, language = match.groups()
        end = at + 1
        while end < len(lines) and lines[end].strip() != fence:
            end += 1
        body = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end])
        mark = MARK.fullmatch(last)
        if not language.strip().startswith("{"):
            reason = mark[1] if mark else ""
            found.append(Block(page, at + 1, language.strip(), body, reason))
        at, last = end + 1, ""
    return found


def indented(path: Path) -> list[str]:
    """Return where a page has code by indentation, which says no language."""
    found = []
    fence, before = "", ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = FENCE.match(line)
        if match and (not fence or line.strip() == fence):
            fence = "" if fence else match[2]
        # Behind an item of a list the same is its next paragraph.
        elif not fence and line.startswith("    ") and not before:
            found.append(f"{path.relative_to(ROOT)}:{number}")
        if fence or line[:1] not in ("", " ") or match:
            before = line if re.match(r"(-|\d+\.) ", line) else ""
    return found


def commands(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands of kvdock on a page, in blocks and text, and where."""
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    for block in blocks(path):
        if block.language in ("sh", "console"):
            joined = block.body.replace("\\\n", " ")
            for match in COMMAND.finditer(joined):
                yield str(block), f"kvdock{match[1]}"
    fenced = re.sub(r"^( *)(`{3,}).*?^ *\2$", "", text, flags=re.MULTILINE | re.DOTALL)
    for match in INLINE.finditer(" ".join(fenced.split("\n"))):
        if match[1] not in NOT_COMMANDS:
            yield name, match[1]


class Sandbox:
    """A folder in which a page's blocks run one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = ""
        for below in ("var/lib", "var/cache", "tmp"):
            (folder / below).mkdir(parents=True)
        with tarfile.open(SAMPLE) as archive:
            archive.extractall(folder, filter="data")
        (folder / "store").chmod(0o700)
        _forget_failures(folder / "store")
        for root in ("var/lib/kvdock", "var/lib/kv", "var/cache/kvdock"):
            shutil.copytree(folder / "store", folder / root)
        path = [Path(__file__).parent / "page_commands", Path(sys.executable).parent]
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVDOCK_", "MOONCAKE_", "AWS_"))
        } | {
            "PATH": ":".join([*map(str, path), os.environ["PATH"]]),
            "NO_COLOR": "1",
        }

    def placed(self, text: str) -> str:
        """Move example paths below the folder."""
        return EXAMPLE_PATHS.sub(f"{self.folder}/", text)

    def run(self, block: Block) -> None:
        """Run a block of commands.

        Raises:
            AssertionError: If a command fails.
        """
        body = block.body
        if block.language == "console":
            lines = [one for one in body.splitlines() if one.startswith("$ ")]
            body = "\n".join(one.removeprefix("$ ") for one in lines)
        self._call(block, ["bash", "-euo", "pipefail", "-c", self.placed(body)])

    def run_python(self, block: Block, code: str) -> None:
        """Run all Python of a page up to a block.

        Raises:
            AssertionError: If it fails.
        """
        self._call(block, [sys.executable, "-W", "error", "-c", self.placed(code)])

    def _call(self, block: Block, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            timeout=500,
        )
        said = f"{done.stdout}{done.stderr}"
        self.output = said.replace(f"{self.folder}/", "/")
        assert not done.returncode, f"{block}: {command[-1]}\n{said[-3000:]}"


def read(block: Block) -> object:
    """Read a block of data.

    Raises:
        ValueError: If it is not what its language says.
    """
    match block.language:
        case "toml":
            return tomllib.loads(block.body)
        case "json":
            return json.loads(block.body)
        case "yaml":
            return yaml.safe_load(block.body)
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign] # as its documentation says
    found.read_string(block.body)
    return found


def parse(block: Block) -> None:
    """Check a block that is not run as far as that is possible.

    Raises:
        SyntaxError: If it is not Python.
        AssertionError: If it is no script of bash.
    """
    if block.language == "python" and block.reason != "excerpt":
        ast.parse(block.body)
    if block.language in ("sh", "console") and block.reason != "excerpt":
        body = (
            block.body.replace("$ ", "") if block.language == "console" else block.body
        )
        done = subprocess.run(
            ["bash", "-n", "-c", body], check=False, capture_output=True, text=True
        )
        assert not done.returncode, f"{block}: {done.stderr}"


def words(command: str) -> list[str]:
    """Return the words of a command line; one that is not whole has none."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _forget_failures(store: Path) -> None:
    """Take back that slots could not be written: pages tell of disks that work."""
    for index in store.rglob("*"):
        name = IndexName.parse(index.name)
        if name is None:
            continue
        with index.open("r+b", buffering=0) as file:
            contents = read_contents(file.fileno(), name, 2**62)
            if contents is not None and len(contents.failed):
                slots = contents.failed["slot"].astype(np.int64)
                erase_records(file.fileno(), slots)
