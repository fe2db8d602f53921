"""The core's wheel with its library in C, and without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "kvdock/native/_pages.so"
NAMES = ("CC", "KVDOCK_PURE", "KVDOCK_WHEEL_PLATFORM")
COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler is here")

Build = Callable[..., tuple[Path, str]]


def copy_of_core(folder: Path) -> Path:
    """Copy what is built, with a library as an editable install leaves it."""
    shutil.copytree(
        ROOT / "core", folder, ignore=shutil.ignore_patterns("tests", "__pycache__")
    )
    (folder / "src" / LIBRARY).write_bytes(b"stale")
    return folder


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build as pip does, with the hatchling that is installed here."""
    out = tmp_path / "out"

    def build(kind: str, core: Path, **variables: str) -> tuple[Path, str]:
        kept = {name: one for name, one in os.environ.items() if name not in NAMES}
        hook = f"from hatchling.build import build_{kind} as build"
        done = subprocess.run(
            [sys.executable, "-c", f"{hook}; print(build({str(out)!r}))"],
            cwd=core,
            env=kept | variables,
            capture_output=True,
            check=False,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return out / done.stdout.split()[-1], done.stderr

    out.mkdir()
    return build


def libraries(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".so" in name]


def tags(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("/WHEEL"))
        return re.findall(
            r"^(?:Tag|Root-Is-Purelib): (.+)$",
            archive.read(name).decode(),
            re.MULTILINE,
        )


def installed(wheel: Path, folder: Path) -> Path:
    """Install a wheel in a clean environment; return where its package is imported."""
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-index", *quiet, str(wheel)],
        check=True,
        timeout=100,
    )
    # What kvdock needs is behind it on the path, and so is the checkout.
    ours = [path for path in sys.path if path.endswith("site-packages")]
    script = (
        f"import site\nfor path in {ours!r}: site.addsitedir(path)\n"
        "import kvdock\nprint(kvdock.__file__)"
    )
    done = subprocess.run(
        [python, "-I", "-c", script], capture_output=True, check=True, text=True
    )
    found = Path(done.stdout.strip()).parent
    assert found.is_relative_to(folder)
    return found


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"PATH": "/nowhere"}, "no C compiler"),
        ({"KVDOCK_PURE": "1"}, "KVDOCK_PURE is set"),
        ({"CC": "false"}, "false ended with status 1"),
        ({"CC": "/nowhere/cc -m64"}, "/nowhere/cc"),
    ],
)
def test_without_a_compiler_the_wheel_is_pure_and_says_why(
    build: Build, tmp_path: Path, variables: dict[str, str], why: str
) -> None:
    wheel, said = build("wheel", copy_of_core(tmp_path / "core"), **variables)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert tags(wheel) == ["true", "py3-none-any"]
    assert libraries(wheel) == []
    (line,) = said.splitlines()
    assert line.startswith("kvdock is built without its library in C: ")
    assert why in line


def test_a_pure_wheel_can_be_installed(build: Build, tmp_path: Path) -> None:
    wheel, _ = build("wheel", copy_of_core(tmp_path / "core"), KVDOCK_PURE="1")
    package = installed(wheel, tmp_path / "venv")
    assert not (package.parent / LIBRARY).exists()


@needs_compiler
def test_with_a_compiler_the_wheel_holds_one_library_and_its_platform(
    build: Build, tmp_path: Path
) -> None:
    wheel, said = build("wheel", copy_of_core(tmp_path / "core"))
    assert said == ""
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    assert tags(wheel) == ["false", wheel.stem.split("-", 2)[2]]
    assert libraries(wheel) == [LIBRARY]
    library = installed(wheel, tmp_path / "venv").parent / LIBRARY
    assert library.stat().st_mode & 0o133 == 0, "a file that is read, not run"
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    subprocess.run([sys.executable, "-c", load, library], check=True)


@needs_compiler
def test_an_index_gets_the_platform_that_is_named(build: Build, tmp_path: Path) -> None:
    core = copy_of_core(tmp_path / "core")
    platform = "manylinux_2_17_x86_64"
    wheel, _ = build("wheel", core, KVDOCK_WHEEL_PLATFORM=platform)
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert tags(wheel) == ["false", f"py3-none-{platform}"]


@needs_compiler
def test_the_same_source_in_another_folder_gives_the_same_bytes(
    build: Build, tmp_path: Path
) -> None:
    found = set()
    for name in ("one", "another/folder"):
        wheel, _ = build("wheel", copy_of_core(tmp_path / name))
        assert libraries(wheel)
        found.add(wheel.read_bytes())
        wheel.unlink()
    assert len(found) == 1


def test_the_source_distribution_holds_the_source_in_c_and_no_library(
    build: Build, tmp_path: Path
) -> None:
    sdist, _ = build("sdist", copy_of_core(tmp_path / "core"))
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    assert {"src/kvdock/native/pages.c", "hatch_build.py"} <= set(names)
    assert not [name for name in names if ".so" in name]


@needs_compiler
def test_an_editable_install_keeps_the_library_beside_its_source(
    build: Build, tmp_path: Path
) -> None:
    core = copy_of_core(tmp_path / "core")
    library = core / "src" / LIBRARY
    with library.open("rb") as mapped:
        wheel, _ = build("editable", core)
        assert mapped.read() == b"stale", "a library that is in use is not changed"
    assert libraries(wheel) == []
    assert library.read_bytes().startswith(b"\x7fELF")
    assert library.stat().st_mode & 0o777 == 0o644
    build("editable", core, KVDOCK_PURE="1")
    assert not library.exists(), "an old one would be loaded"
    assert sorted(path.name for path in library.parent.iterdir()) == sorted(
        path.name
        for path in (ROOT / "core/src/kvdock/native").iterdir()
        if path.name not in {"_pages.so", "__pycache__"}
    )
