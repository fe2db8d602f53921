"""Entry points read from folders are those that the standard library finds."""

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdock.plugin.installed import EntryPoint, read_entry_points

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\nSummary: Sums up.\n"
POINTS = """
# [kvdock.nothing]
[kvdock.backends]
one = one_package.plugin : attribute
two=two_package:made [extra]

[other]
three = three
"""
Install = Callable[..., Path]


class AnotherFinder:
    """A finder that may announce distributions, and has none."""

    def find_distributions(self, _: object) -> tuple[()]:
        return ()

    def find_spec(self, *_: object) -> None:
        return None


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution into a folder of the path."""

    def install(
        folder: str, points: str = POINTS, place: str = "entry_points.txt", **files: str
    ) -> Path:
        where, _, name = folder.rpartition("/")
        root = tmp_path / where
        info = root / name
        info.mkdir(parents=True)
        (info / place).write_text(points)
        for file, text in files.items():
            (info / file).write_text(text)
        if str(root) not in sys.path:
            monkeypatch.syspath_prepend(root)
        return info

    return install


def both(monkeypatch: pytest.MonkeyPatch) -> tuple[set[EntryPoint], set[EntryPoint]]:
    """Return what is read from folders, and what the standard library finds."""
    folders = set(read_entry_points(""))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [*sys.meta_path, AnotherFinder()])
        return folders, set(read_entry_points(""))


def test_they_are_those_of_the_standard_library(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = METADATA.format(name="Odd.Name")
    install("a/odd_name-1.2.3.dist-info", METADATA=f"{about}\nName: no header\n")
    install("a/egg-1-py3.11.egg-info", **{"PKG-INFO": METADATA.format(name="egg")})
    install("a/without-1.dist-info", points="")
    install("a/plain", METADATA=about)
    # Later on the path, so that it is not what an import would find.
    install("b/Odd.Name-9.dist-info", METADATA=about.replace("1.2.3", "9"))
    monkeypatch.setattr(sys, "path", [*sys.path[1:], sys.path[0], "", "/nowhere"])
    folders, standard = both(monkeypatch)
    assert folders == standard
    ours = {one for one in folders if one.distribution == "Odd.Name"}
    assert {one.version for one in ours} == {"1.2.3"}
    assert (
        EntryPoint(
            group="kvdock.backends",
            name="one",
            value="one_package.plugin : attribute",
            distribution="Odd.Name",
            version="1.2.3",
            summary="Sums up.",
        )
        in ours
    )
    assert len(ours) == 3
    assert any(one.distribution == "egg" for one in folders)


def test_a_broken_installation_still_has_its_entry_points(install: Install) -> None:
    install("a/broken-1.dist-info")
    found = [one for one in read_entry_points("kvdock.") if one.distribution == "?"]
    assert [(one.name, one.version) for one in found] == [("one", "?"), ("two", "?")]


def test_an_archive_on_the_path_is_read_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "zipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped-1.dist-info/METADATA", METADATA.format(name="zipped"))
        file.writestr("zipped-1.dist-info/entry_points.txt", POINTS)
    monkeypatch.syspath_prepend(archive)
    found = [
        one for one in read_entry_points("kvdock.") if one.distribution == "zipped"
    ]
    assert sorted(one.name for one in found) == ["one", "two"]
