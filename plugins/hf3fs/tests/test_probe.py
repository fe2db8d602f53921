"""What `kvdock doctor hf3fs` finds, and what it says to do."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvdock import AttachConfig, Dock, Finding
from kvdock.errors import PluginError
from kvdock.self_test import PATIENCE_S, Trial, try_backend
from kvdock_hf3fs import library, probe
from kvdock_hf3fs.shared_memory import IOVS


def found(**settings: Any) -> Sequence[Finding]:
    backend = Dock.load(require=["hf3fs"]).backends["hf3fs"]
    given = backend.settings({"free_space": 0, **settings}) if settings else None
    return backend.probe(AttachConfig(settings=given))


def tried(**settings: Any) -> Trial:
    backend = Dock.load(require=["hf3fs"]).backends["hf3fs"]
    return try_backend(backend, {"free_space": 0, **settings}, timeout_s=PATIENCE_S)


def wrong_of(trial: Trial) -> Finding:
    assert all(finding.ok for finding in trial.probed)
    return next(finding for finding in trial.moved if not finding.ok)


def failed(findings: Sequence[Finding]) -> Finding:
    (one,) = [finding for finding in findings if not finding.ok]
    return one


@pytest.mark.usefixtures("fake")
def test_a_mount_that_works_is_tried_with_pages_through_rings(
    root: Path, mount: Path
) -> None:
    trial = tried(root=str(root))
    said = [one.what for one in trial.short if one.ok]
    assert "tests/fake/hf3fs_fuse/io.py" in said[0], "it names the module's file"
    assert str(mount) in said[1]
    assert "self test: a page of each kind" in said[-1]
    assert len(said) == len(trial.short)
    assert not root.exists()
    assert not len(IOVS)


def test_without_settings_the_root_is_missing() -> None:
    assert "no root" in failed(found()).what


def test_a_missing_module_is_named_with_how_to_get_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MODULE", "no_such_module.io")
    one = failed(found(root=root))
    assert "no_such_module.io cannot be imported" in one.what
    assert "mode=posix" in one.hint


@pytest.mark.usefixtures("fake")
def test_a_root_elsewhere_is_not_on_3fs(tmp_path: Path, mount: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    assert "not below a mount" in failed(found(root=elsewhere)).what
    some = [one.what for one in found(root=elsewhere, mount=str(mount)) if not one.ok]
    assert "not on the 3FS" in some[0]


def test_memory_that_the_daemon_does_not_see_is_found(
    fake: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file")

    monkeypatch.setattr(fake, "make_iovec", unseen)
    one = failed(tried(root=str(root)).findings)
    assert "self test, attaching" in one.what
    assert "registers no" in one.what
    assert "sees the same /dev/shm" in one.hint


def test_other_bytes_that_come_back_are_found(fake: Any, root: Path) -> None:
    fake.KNOBS.result = lambda one: one.nbytes // 2 if one.read else None
    assert "a page was not read back" in wrong_of(tried(root=str(root))).what
    fake.KNOBS.result = lambda _: -errno.EACCES
    assert "a page was not stored" in wrong_of(tried(root=str(root))).what


def test_a_daemon_that_answers_nothing_does_not_hang_the_doctor(
    fake: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PATIENCE_S", 0.5)
    fake.KNOBS.lose = lambda _: True
    assert failed(tried(root=str(root)).findings).what == "no answer within 0.5 s"


def test_mode_posix_says_what_is_lost_and_what_must_be_guaranteed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_type_of", lambda _: "ext4")
    said = [one.what for one in found(root=tmp_path / "store", mode="posix") if one.ok]
    assert "no RDMA" in said[0]
    assert "rename and O_EXCL atomic across hosts" in said[1]
    assert "is of this host" in said[2]
    monkeypatch.setattr(probe, "_type_of", lambda _: "nfs4")
    said = [one.what for one in found(root=tmp_path / "store", mode="posix") if one.ok]
    assert "nfs4 must" in said[1]
    assert not [one for one in said if "of this host" in one]


def test_the_type_of_a_file_system_is_read_from_the_mounts(tmp_path: Path) -> None:
    assert probe._type_of(Path("/proc/self")) == "proc"
    assert probe._type_of(tmp_path)


def test_a_root_that_others_may_write_is_rejected(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    assert "others could plant pages" in failed(found(root=root, mode="posix")).what


def test_the_plan_names_a_missing_module(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attached import planned

    monkeypatch.setattr(library, "MODULE", "no_such_module.io")
    with pytest.raises(PluginError, match="no_such_module"):
        library.load()
    with pytest.raises(Exception, match="no_such_module"):
        planned({"root": str(root)}, lent=True)
