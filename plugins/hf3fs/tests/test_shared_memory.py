"""Memory of iovs: made, shared by pools, and released with the last of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdock import Block, Dock
from kvdock.errors import KvdockError, RegionError
from kvdock.testing.open_files import open_files
from kvdock_hf3fs import library
from kvdock_hf3fs.shared_memory import IOVS, Mapping

MIB = 1 << 20
SHM = Path("/dev/shm")  # noqa: S108 - where shared memory lies

pytestmark = pytest.mark.usefixtures("fake")


def links(mount: Path) -> list[Path]:
    return list((mount / "3fs-virt/iovs").iterdir())


def mine() -> list[Path]:
    """Return the shared memory of this process that has a name."""
    return list(SHM.glob(f"kvdock-hf3fs-{os.getpid()}-*"))


def mapped(address: int) -> bool:
    return f"\n{address:x}-" in Path("/proc/self/maps").read_text()


def test_memory_lives_as_long_as_the_loan_and_its_pools(mount: Path) -> None:
    before = open_files()
    loan = IOVS.allocate(library.load(), str(mount), MIB)
    address = loan.buffer.ctypes.data
    # The fake, which is the daemon, has one descriptor of its own.
    assert len(open_files() - before) == 1
    assert not mine(), "nothing has a name"
    loan.buffer[:] = 7
    pools = [IOVS.hold([Block(address + start, 1000)]) for start in (0, MIB - 1000)]
    assert len(links(mount)) == 1, "one iov serves several pools"
    loan.give_back()
    del loan
    IOVS.leave(pools[0])
    assert mapped(address)
    IOVS.leave(pools[1])
    assert not mapped(address)
    assert not links(mount)
    assert not len(IOVS)


def test_memory_that_is_still_looked_at_stays_mapped(mount: Path) -> None:
    loan = IOVS.allocate(library.load(), str(mount), MIB)
    view = loan.buffer[10:20]
    address = loan.buffer.ctypes.data
    loan.give_back()
    del loan
    view[:] = 3
    assert mapped(address)
    del view
    assert not mapped(address)


def test_memory_from_elsewhere_is_rejected_with_what_to_do() -> None:
    other = np.zeros(100, np.uint8)
    with pytest.raises(RegionError, match="not in an iov") as raised:
        IOVS.hold([Block(other.ctypes.data, 100)])
    assert "Dock.allocate" in raised.value.fix
    assert IOVS.hold([Block(1, 0)]) == []


def test_the_limit_counts_all_memory_of_the_process(mount: Path) -> None:
    usrbio = library.load()
    loan = IOVS.allocate(usrbio, str(mount), MIB, limit=2 * MIB)
    with pytest.raises(RegionError, match="iov_limit"):
        IOVS.allocate(usrbio, str(mount), MIB + 1, limit=2 * MIB)
    loan.give_back()
    IOVS.allocate(usrbio, str(mount), MIB + 1, limit=2 * MIB).give_back()


def test_a_full_dev_shm_is_an_error_and_not_a_signal(mount: Path) -> None:
    before = open_files()
    # Far beyond any memory: asking for a little too much could take all there is.
    with pytest.raises(RegionError, match="registers no") as raised:
        IOVS.allocate(library.load(), str(mount), 1 << 60)
    assert "df /dev/shm" in raised.value.fix
    assert not open_files() - before
    assert not mine()


def test_memory_that_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="mapped"):
        Mapping(-1, 4096)


def test_the_dock_lends_memory_of_an_iov_or_plain_memory(root: Path) -> None:
    dock = Dock.load(require=["hf3fs"])
    given = {"root": str(root), "mode": "usrbio"}
    loan = dock.allocate("hf3fs", 5000, given)
    assert len(np.asarray(loan.buffer)) == 5000
    assert len(IOVS) == 1
    loan.give_back()
    assert not len(IOVS)
    plain = dock.allocate("hf3fs", 5000, given | {"mode": "posix"})
    assert not len(IOVS)
    plain.give_back()


def test_without_the_module_nothing_is_chosen_instead(tmp_path: Path) -> None:
    """A process that has no `hf3fs_fuse` refuses, and says what to do."""
    code = (
        "from kvdock import Dock\n"
        "Dock.load(require=['hf3fs'])"
        f".allocate('hf3fs', 4096, {{'root': {str(tmp_path)!r}}})"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "hf3fs_fuse.io cannot be imported" in done.stderr
    assert "mode=posix" in done.stderr


def test_a_root_elsewhere_than_on_3fs_is_named(tmp_path: Path) -> None:
    dock = Dock.load(require=["hf3fs"])
    with pytest.raises(KvdockError, match="not below a mount of 3FS"):
        dock.allocate("hf3fs", 4096, {"root": str(tmp_path / "plain" / "store")})


def test_the_exit_of_a_forked_child_unlinks_nothing_of_its_parent(mount: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from kvdock_hf3fs import library\n"
        "from kvdock_hf3fs.shared_memory import IOVS\n"
        "from kvdock_hf3fs.rings import RingPool\n"
        f"mount = {str(mount)!r}\n"
        "usrbio = library.load()\n"
        "loan = IOVS.allocate(usrbio, mount, 4096)\n"
        "pool = RingPool(usrbio, mount, 8, 8, read=False)\n"
        "pool.give_back(pool.take(time.monotonic() + 9))\n"
        "here = sorted(Path(mount, '3fs-virt/iovs').iterdir())\n"
        "assert len(here) == 2\n"
        "if not os.fork():\n"
        "    sys.exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "assert sorted(Path(mount, '3fs-virt/iovs').iterdir()) == here\n"
        "pool.close()\n"
        "loan.give_back()\n"
        "assert not list(Path(mount, '3fs-virt/iovs').iterdir())\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
