"""Stores, files and the process beside a backend: it leaves all of them alone."""

from __future__ import annotations

import gc
import locale
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from kvdock.testing.cases import contract_test, one_sample
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdock.testing.harness import Harness

PAGES = page_hashes(5)

BACK_S = 5.0
"""How long puts may fail once files can be written again."""

OTHERS_MAY_USE = 0o006
OTHERS_MAY_ENTER = 0o001


def process_state() -> dict[str, object]:
    """Return what is one for the whole process and belongs to the engine."""
    mask = os.umask(0o022)
    os.umask(mask)
    root = logging.getLogger()
    return {
        "the umask": mask,
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "the working directory": Path.cwd(),
        "the switch interval": sys.getswitchinterval(),
        "the recursion limit": sys.getrecursionlimit(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the garbage collector": gc.isenabled(),
        "the hook of exceptions": sys.excepthook,
        "the level of the root logger": root.level,
    }


def open_to_others(folder: Path) -> list[Path]:
    """Return the files below a folder that other users of the host can use."""
    if not folder.is_dir() or not folder.stat().st_mode & OTHERS_MAY_ENTER:
        return []
    found = []
    for path in folder.iterdir():
        if path.is_dir():
            found += open_to_others(path)
        elif path.stat().st_mode & OTHERS_MAY_USE:
            found.append(path)
    return found


class NeighbourTests:
    """Other stores, users and the engine's process are left alone."""

    @pytest.fixture
    def elsewhere(
        self,
        harness: Harness,
        config: Mapping[str, object],
        small: Mapping[str, object] | None,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Mapping[str, object]:
        """Return the settings of another store, in a folder that is new, or skip."""
        places = places_of(harness.backend.manifest.settings, config)
        if not places:
            pytest.skip("its settings name no folder, so there is one store")
        if small is not None and all(small.get(p) != config[p] for p in places):
            return small
        folder = tmp_path_factory.mktemp("elsewhere")
        return {**config, **{place: folder / place for place in places}}

    @pytest.fixture
    def beside(
        self, harness: Harness, elsewhere: Mapping[str, object]
    ) -> Iterator[Harness]:
        """Attach pools to that other store."""
        beside = harness.over(elsewhere)
        try:
            yield beside
        finally:
            beside.close()

    @contract_test(one_sample)
    def test_two_stores_of_one_process_are_two(
        self, harness: Harness, beside: Harness, case: Sample
    ) -> None:
        one = harness.rig(case.pool())
        two = beside.rig(case.pool(), like=one)
        one.stored(PAGES[:3])
        assert not two.exists(PAGES).any(), "pages of one store are found in another"
        two.stored(PAGES[2:], seed=1)
        one.loaded(PAGES[:3])
        two.loaded(PAGES[2:], seed=1)
        assert not one.exists(PAGES[3:]).any(), "pages of one store are in another"

    @contract_test(one_sample)
    def test_other_users_of_the_host_cannot_read_pages(
        self, beside: Harness, elsewhere: Mapping[str, object], case: Sample
    ) -> None:
        beside.rig(case.pool()).stored(PAGES)
        for place in places_of(beside.backend.manifest.settings, elsewhere):
            found = open_to_others(Path(str(elsewhere[place])))
            assert not found, (
                f"{len(found)} files are open to other users, the first is {found[0]}: "
                "pages hold what users of the engine have written"
            )

    @contract_test(one_sample)
    def test_the_state_of_the_process_stays_the_hosts(
        self, harness: Harness, case: Sample
    ) -> None:
        before = process_state()
        setup = harness.rig(case.pool())
        setup.kept(PAGES)
        during = process_state()
        setup.release()
        after = process_state()
        os.umask(int(str(before["the umask"])))
        socket.setdefaulttimeout(before["the default timeout of sockets"])  # type: ignore[arg-type] # as it was
        changed = [
            name for name in before if not before[name] == during[name] == after[name]
        ]
        assert not changed, f"it changes {', '.join(changed)} of the engine's process"


def places_of(schema: type | None, given: Mapping[str, object]) -> list[str]:
    """Return the settings that name a folder of pages, and are given."""
    fields = attrs.fields(schema) if schema else ()
    paths = [one for one in fields if str(given.get(one.name) or "").startswith("/")]
    marked = [one for one in paths if one.metadata.get("place")]
    return [one.name for one in marked or paths]
