"""Every command's tables at three widths: nothing is too long, or silently cut."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from widths import WIDTHS, check_fits

from kvdock import Batch, Operation
from kvdock.journal import JournalRecord
from kvdock.journal.records import encode
from kvdock.namespace import canonical
from kvdock_cli import exposition
from kvdock_cli.commands import doctor, top
from kvdock_cli.commands import list as listing
from kvdock_cli.main import _run
from kvdock_segments import PosixIOEngine, SegmentStore, StoreLocation

PAGE_BYTES = 4096
RECORD = {"schema": 1, "model": "org/a-model-with-a-rather-long-name", "revision": "r"}
POOL = {
    "name": "kv", "kind": "mha", "anchor": True, "required": True, "draft": False,
    "engine_hits": False, "hit_policy": "all_pages", "window_pages": 0,
    "block_pages": 0, "group_pages": 0,
}  # fmt: skip
METRICS = """
kvdock_pool_enabled{backend="file",pool="kv"} 1
kvdock_pool_enabled{backend="",pool="draft"} 0
kvdock_keys_total{backend="file",pool="kv",operation="exists",outcome="ok"} 123456
kvdock_keys_total{backend="file",pool="kv",operation="get",outcome="corrupt"} 12
kvdock_bytes_total{backend="file",pool="kv",operation="get"} 123456789012
kvdock_breaker_state{backend="file",operation="get"} 2
kvdock_breaker_state{backend="file",operation="put"} 1
kvdock_store_bytes{backend="file",state="used"} 98
kvdock_store_bytes{backend="file",state="limit"} 100
kvdock_pool_pages{backend="file",pool="kv",state="all"} 1000
kvdock_pool_pages{backend="file",pool="kv",state="leased"} 10
"""

V3 = ("route", "--model", "deepseek-v3.2", "--draft", "mtp")
COMMANDS = [
    ("list",),
    ("--version",),
    ("list", "file"),
    ("list", "s3"),
    V3,
    (*V3, "--all"),
    (*V3, "--to", "kv=file", "--pages", "100"),
    ("route", "--model", "gpt-oss-120b", "--tp", "4", "--all"),
    ("doctor",),
    ("doctor", "file", "--set", "root=kv", "--set", "free_space=0", "--verbose"),
    ("doctor", "sglang", "--set", "plugin=file", "--set", "root=kv"),
    ("doctor", "vllm", "--set", "plugin=fil", "--set", "host_memory=1 GiB"),
    ("config", "show"),
    ("config", "show", "--origin"),
    ("store", "record", "store"),
    ("store", "diff", "namespaces"),
    ("store", "ls", "store"),
    ("store", "stat", "store"),
    ("store", "verify", "store"),
    ("store", "gc", "store"),
    ("top", "http://engine", "--once"),
    ("why", "--journal", "journal"),
    ("why", "--journal", "journal", "--request", "a-request"),
]

Run = Callable[..., str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command here, on a terminal of some columns or in a pipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    namespaces()
    stored(tmp_path / "store")
    journal(tmp_path / "journal")
    samples = exposition.Samples(METRICS)
    monkeypatch.setattr(top, "fetch", lambda _: samples)
    # Only the text has a width: what it is about is looked at once.
    once(monkeypatch, doctor, "diagnose")
    once(monkeypatch, listing, "try_each")
    once(monkeypatch, doctor, "try_each")

    def command(words: tuple[str, ...], width: int = 0) -> str:
        stream = Terminal() if width else io.StringIO()
        monkeypatch.setenv("COLUMNS", str(width or 80))
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.argv", ["kvdock", *words])
        assert _run(as_json=False) in (0, 1)
        return stream.getvalue()

    return command


def once(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """Let a function of a module answer its first call, and repeat the answer."""
    ask = getattr(module, name)
    answers: list[Any] = []

    def answer(*given: Any, **named: Any) -> Any:
        if not answers:
            answers.append(ask(*given, **named))
        return answers[0]

    monkeypatch.setattr(module, name, answer)


def namespaces() -> None:
    for salt in ("a", "of another tenant"):
        record = canonical(
            {**RECORD, "salt": salt, "pools": {"kv": {"layers": [0, 1]}}}
        )
        folder = Path("namespaces") / hashlib.sha256(record).hexdigest()
        folder.mkdir(0o700, parents=True)
        (folder / "namespace.json").write_bytes(record)
    Path("namespaces").chmod(0o700)


def stored(root: Path) -> None:
    memory = np.zeros((2, PAGE_BYTES), np.uint8)
    at = memory.ctypes.data + np.arange(2).reshape(-1, 1) * PAGE_BYTES
    record = canonical(RECORD)
    namespace = hashlib.sha256(record).hexdigest()
    place = StoreLocation(
        root=root,
        namespace=namespace,
        pool="kv",
        object_bytes=(PAGE_BYTES,),
        record=record,
    )
    with SegmentStore(place, PosixIOEngine()) as opened:
        keys = [f"{namespace}/{number:032x}.kv" for number in range(2)]
        opened.run(Batch(Operation.PUT, keys, at, np.full(at.shape, PAGE_BYTES)))


def journal(folder: Path) -> None:
    about = {"request": "a-request", "pool": "kv", "backend": "file"}
    pages = "a b c"
    lines = [
        {"operation": "attached", "pools": (POOL,), "record": RECORD},
        {
            "operation": "exists",
            "outcomes": (("ok", 1), ("absent", 2)),
            "pages": pages,
            **about,
        },
    ]
    folder.mkdir()
    records = [
        JournalRecord(version=1, at_s=1.0 + at, namespace="2f6c" * 16, **one)  # type: ignore[arg-type] # its fields
        for at, one in enumerate(lines)
    ]
    (folder / "0-1-1.jsonl").write_bytes(encode(records))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_report_fits_every_terminal(run: Run, words: tuple[str, ...]) -> None:
    whole = run(words)
    assert whole.strip()
    for width in WIDTHS:
        check_fits(whole, run(words, width), width)
