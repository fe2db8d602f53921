"""Doctor and bench try backends out in a store of an engine, and leave nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import threefs
from object_server import ObjectServer

from kvdock import Attachment, Dock, DType, Namespace, PoolSpec, Region, Shard
from kvdock.pools import Part, Per
from kvdock_cli.commands.bench import bench
from kvdock_cli.commands.doctor import doctor

threefs.use()

LOCAL: Mapping[str, tuple[str, dict[str, object]]] = {
    "file": ("file", {}),
    "nixl": ("nixl", {}),
    "hf3fs": ("hf3fs", {}),
    "hf3fs, posix": ("hf3fs", {"mode": "posix"}),
}
Given = Mapping[str, object]


def words(settings: Given) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in settings.items())


def store_pages(backend: str, settings: Given) -> None:
    """Let an engine attach and store two pages."""
    import numpy as np

    part = Part("kv", DType.U8, (4096,), per=Per.PAGE)
    pool = PoolSpec(
        name="kv", kind="mla", parts=(part,), layers=(0,), page_tokens=1, anchor=True
    )
    dock = Dock.load(require=(backend,))
    plan = dock.plan([pool], Shard(), (backend,), settings={backend: settings})
    region = Region.of(pool, Shard(), [np.ones((2, 4096), np.uint8)], pages=2)
    with Attachment.open(
        dock, plan, Namespace(model="m"), {"kv": region}, {backend: settings}
    ) as cache:
        assert cache.put(["aa" * 32, "bb" * 32], {"kv": np.arange(2)}).pages == 2


def contents(folder: Path) -> dict[str, str]:
    """Return all that is below a folder, with a digest of each file.

    Links of 3FS's rings are left out: they end with their process.
    """
    return {
        str(one.relative_to(folder)): hashlib.sha256(one.read_bytes()).hexdigest()
        if one.is_file()
        else "folder"
        for one in folder.rglob("*")
        if "3fs-virt" not in one.parts
    }


def try_out(backend: str, settings: Given) -> None:
    """Run what stores pages of its own."""
    given = words(settings)
    assert doctor(backend, set_=given) == 0
    assert bench(backend, set_=given, page=("4 KiB",), batch=(2,), threads=(1,)) == 0


@pytest.mark.parametrize(
    "name",
    [
        "file",
        *(pytest.param(one, marks=pytest.mark.slow) for one in LOCAL if one != "file"),
    ],
)
def test_a_trial_of_a_backend_leaves_no_file_in_its_root_and_makes_none(
    name: str, tmp_path: Path
) -> None:
    backend, more = LOCAL[name]
    mount = threefs.mounted(tmp_path / "mount") if name == "hf3fs" else tmp_path
    before = contents(mount)
    settings = {"root": str(mount / "far" / "root"), "free_space": "0", **more}
    try_out(backend, settings)
    assert contents(mount) == before
    store_pages(backend, settings)
    before = contents(mount)
    assert before
    try_out(backend, settings)
    assert contents(mount) == before


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    one = ObjectServer("kv").start()
    yield one
    one.stop()


@pytest.mark.slow
def test_a_trial_of_a_bucket_leaves_no_object_in_it(server: ObjectServer) -> None:
    settings = server.settings()
    try_out("s3", settings)
    assert not server.objects
    store_pages("s3", settings)
    before = dict(server.objects)
    assert len(before) == 3, "two pages and the record of their namespace"
    try_out("s3", settings)
    assert server.objects == before
