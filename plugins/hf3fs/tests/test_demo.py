"""What `kvdock demo --backend hf3fs` runs on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvdock.errors import KvdockError
from kvdock_hf3fs import demo


def test_without_a_mount_it_runs_on_a_fake_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = list(sys.path)
    with demo.local_server({"entries": 8}) as (given, notice):
        assert "FAKE" in notice
        assert given["entries"] == 8
        mount = Path(str(given["mount"]))
        assert Path(str(given["root"])).is_relative_to(mount)
        assert (mount / "3fs-virt/iovs").is_dir()
        assert os.environ["PYTHONPATH"] == str(demo.FAKE)
    assert sys.path == before
    assert "PYTHONPATH" not in os.environ
    assert not mount.exists()


def test_a_mount_of_the_users_own_or_mode_posix_needs_no_fake(tmp_path: Path) -> None:
    with demo.local_server({"mode": "posix"}) as found:
        assert found == ({"mode": "posix"}, "")
    with demo.local_server({"mount": str(tmp_path)}) as (given, notice):
        assert not notice
        assert Path(str(given["root"])).parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_wheel_has_no_fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "FAKE", tmp_path / "missing")
    with (
        pytest.raises(KvdockError, match="no fake in an installed wheel") as raised,
        demo.local_server({}),
    ):
        pass
    assert "mode=posix" in raised.value.fix


def test_nothing_but_the_demo_knows_where_the_fake_is() -> None:
    source = Path(demo.__file__).parent
    others = [path for path in source.glob("*.py") if path.name != "demo.py"]
    assert len(others) > 8
    for path in others:
        text = path.read_text()
        assert "fake" not in text.lower(), path
        assert "kvdock_hf3fs.demo" not in text, path
