"""Every command rejects bad input with the same codes, and in kvdock's own words."""

from __future__ import annotations

import gzip
import re
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvdock_cli.main import _run

if TYPE_CHECKING:
    from pathlib import Path

Run = Callable[..., tuple[object, str]]

MODEL = ("--model", "llama-3.1-8b")
GONE = "{dir}/gone"
EMPTY = "{dir}/empty"
FILE = "{dir}/file"
BINARY = "{dir}/binary"
SERVER = "127.0.0.1:{closed}"

WRONG_USE = [
    # An option, an argument, or a value of another kind.
    ("list", "x"),
    ("list", "--nope"),
    ("new",),
    ("doctor", "--timeout", "soon"),
    ("doctor", "file", "--set", "root"),
    ("route", *MODEL, "--tp", "2.5"),
    ("route", *MODEL, "--tp", "x"),
    ("route", *MODEL, "--tp", "\udcff"),
    ("route", *MODEL, "--rank", "99999999999999999999"),
    ("route", *MODEL, "--dtype", "f99"),
    ("route", *MODEL, "--layout", "x"),
    ("route", *MODEL, "--context", "x"),
    ("route", *MODEL, "--pp-layers", "x"),
    ("route", *MODEL, "--to", "kv"),
    ("route", *MODEL, "--need", "nope"),
    ("route", "--pool", "family=mha"),
    ("route", "--pool", "nope"),
    ("check", "file", "--scale", "x"),
    ("completion", "tcsh"),
    ("demo", "--set", "quota"),
    ("bench", "file", "--page", "x"),
    ("bench", "file", "--batch", "x"),
    ("bench", "file", "--set", f"root={EMPTY}", "--recompute", "nan"),
    ("config", "init", "file", "--config", "{dir}/new.txt"),
    ("config", "init", "metrics", "--config", "{dir}/new.toml"),
    ("store", "gc", EMPTY, "--older", "x"),
    ("store", "gc", EMPTY, "--to", "x"),
    ("top", "http://[::1", "--once"),
    ("top", "http://a host/", "--once"),
    ("top", "http://127.0.0.1:1/a b", "--once"),
    ("top", "http://..", "--once"),
    ("top", "http://127.0.0.1:1", "--interval", "0"),
    # A name that nothing has.
    ("nope",),
    ("list", "nope"),
    ("doctor", "nope"),
    ("check", "nope"),
    ("bench", "nope"),
    ("demo", "--backend", "nope"),
    ("route", "--model", "nope"),
    ("route", *MODEL, "--backend", "nope"),
    ("route", *MODEL, "--to", "kv=nope"),
    ("route", *MODEL, "--to", "nope=file"),
    ("config", "nope"),
    ("store", "nope"),
    # A path that is missing, or is not what the command takes.
    ("route", "--model", "{dir}/gone.toml"),
    ("config", "show", "--config", "{dir}/gone.toml"),
    ("config", "show", "--config", "{dir}/folder.toml"),
    ("config", "show", "--config", "{dir}/binary.toml"),
    ("config", "show", "--config", "{dir}/tiers.toml"),
    ("store", "record", GONE),
    ("store", "record", EMPTY),
    ("store", "diff", GONE, GONE),
    ("store", "diff", EMPTY),
    ("store", "ls", GONE),
    ("store", "ls", "a" * 300),
    ("why", "--journal", "a/" * 3000),
    ("simulate", "{dir}/two.jsonl", "--block-tokens", "9" * 60),
    ("simulate", "{dir}/two.jsonl", "--block-tokens", "0"),
    ("simulate", "{dir}/deep.jsonl"),
    ("simulate", "{dir}/range.jsonl"),
    ("simulate", "{dir}/times.jsonl"),
    ("simulate", "{dir}/torn.jsonl.gz"),
    ("prefetch", "http://127.0.0.1:1", "--prompts", FILE, "--within", "-1"),
    ("audit", "http://127.0.0.1:1", "--prompts", FILE, "--within", "nan"),
    ("audit", "http://[::1", "--prompts", FILE),
    ("store", "ls", FILE),
    ("store", "stat", GONE),
    ("store", "verify", GONE),
    ("store", "gc", GONE),
    ("store", "clear", GONE),
    ("why", "--journal", GONE),
    ("why", "--journal", FILE),
    ("why", "--journal", EMPTY),
    ("why", "--journal", EMPTY, "--request", "r"),
    ("why", "--journal", EMPTY, "--hashes", GONE),
    ("why", "--journal", EMPTY, "--hashes", EMPTY),
    ("why", "--journal", EMPTY, "--hashes", BINARY),
    ("demo", "--dir", FILE),
    ("new", "plenty", "--into", FILE),
    ("new", "plenty", "--into", "{dir}/file/below"),
    # A file of hashes that cannot be read, or that has none.
    ("store", "rm", EMPTY, "--hashes", GONE, "--yes"),
    ("store", "rm", EMPTY, "--hashes", EMPTY, "--yes"),
    ("store", "copy", EMPTY, "{dir}/copied", "--hashes", BINARY),
    ("store", "copy", EMPTY, "{dir}/copied", "--hashes", "{dir}/none"),
    ("store", "expire", EMPTY, "--after", "1 h", "--hashes", "{dir}/none"),
    ("store", "retain", EMPTY, "--keep", "1 h", "--set", "quota=0", "--hashes", GONE),
    # A namespace that the store does not hold.
    ("store", "stat", EMPTY, "--namespace", "abc"),
    ("store", "clear", EMPTY, "abc", "--yes"),
    ("store", "verify", EMPTY, "--namespace", "abc"),
    ("store", "gc", EMPTY, "--namespace", "abc"),
]

PROBLEMS = [
    ("check", "file", "--set", "root={dir}/file"),
    ("bench", "file", "--set", "root={dir}/file"),
    # A server that does not answer ends a check at the probe that failed.
    ("check", "s3", "--set", "url=s3://b", "--set", f"endpoint=http://{SERVER}"),
    ("check", "mooncake", "--set", f"master={SERVER}"),
    ("store", "ls", "s3://b", "--set", f"endpoint=http://{SERVER}"),
    ("store", "ls", "az://b"),
    ("store", "ls", "s3://b", "--set", "ca_bundle={dir}/file"),
    ("top", f"http://{SERVER}", "--once"),
    # JSON that is nested too deeply for its reader.
    ("keys", "list", "{dir}/deep.jsonl"),
    ("audit", f"http://{SERVER}", "--prompts", "{dir}/deep.jsonl"),
]

LIBRARIES = re.compile(
    r"Errno|Value error|Input should|Traceback|\(s\)|pydantic|Generic S3|codec|"
    r"None|retry|not a valid|Error\b"
)
"""Phrases of libraries, and of Python itself."""


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "file").write_text("words\n")
    (tmp_path / "none").write_text("\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "two.jsonl").write_text('{"hash_ids": [1, 2]}\n')
    (tmp_path / "tiers.toml").write_text("[tiers]\nnear = 1\n")
    (tmp_path / "range.jsonl").write_text('{"ranges": [[0, 1000000000000]]}\n')
    (tmp_path / "times.jsonl").write_text('{"hash_ids": [1], "timestamp": 1e308}\n')
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"words" * 99)[:-9])
    for name in ("binary", "binary.toml"):
        (tmp_path / name).write_bytes(b"\xff\xfe\0")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]

    def command(*words: str) -> tuple[object, str]:
        given = [word.format(dir=tmp_path, closed=closed) for word in words]
        monkeypatch.setattr("sys.argv", ["kvdock", *given])
        code = _run(as_json=False)
        said = capsys.readouterr()
        assert not said.out
        (line,) = said.err.splitlines()
        assert line.startswith("kvdock: ")
        return code, line.replace(str(tmp_path), "")

    return command


@pytest.mark.parametrize("words", WRONG_USE, ids=" ".join)
def test_wrong_use_is_a_2_in_our_own_words(run: Run, words: tuple[str, ...]) -> None:
    code, line = run(*words)
    assert code == 2
    assert not LIBRARIES.search(line), line


@pytest.mark.parametrize("words", PROBLEMS, ids=" ".join)
def test_what_is_found_wrong_is_a_1_in_our_own_words(
    run: Run, words: tuple[str, ...]
) -> None:
    code, line = run(*words)
    assert code == 1
    assert not LIBRARIES.search(line), line
    if "{closed}" in words[-1]:
        assert re.search("no connection|answers at|no metrics come", line)
