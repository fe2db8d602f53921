"""The trial of stored pages in one process, to be quick."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdock.errors import SettingsError
from model_demo import trial
from model_demo.command import SendingDemo, StoringDemo
from model_demo.damage import Harm, damage_store
from model_demo.families import Family, Scale
from model_demo.records import STORING, WIRE, Job, Role, Served, TrialFailed
from model_demo.report import outcome
from model_demo.storing import serve
from model_demo.verdicts import judge_stored


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one is Family.MHA else pytest.mark.slow)
        for one in Family
    ],
)
def test_every_model_passes_every_check(family: Family, tmp_path: Path) -> None:
    runs: dict[Role, dict[Family, Served]] = {}
    for role in STORING:
        job = Job(
            role=role,
            families=(family,),
            scale=Scale.TINY,
            backend="file",
            directory=tmp_path,
            salt="a trial",
            threads=1,
            settings={"free_space": 0},
        )
        if role is Role.REPAIR:
            damage = damage_store(job, runs[Role.OFFLOAD][family])
        served = serve(job, family, lambda _event: None)
        wire = json.dumps(WIRE.unstructure(served))
        runs[role] = {family: WIRE.structure(json.loads(wire), Served)}
        assert runs[role][family] == served
        wire = json.dumps(WIRE.unstructure(job))
        assert WIRE.structure(json.loads(wire), Job) == job
    result = judge_stored(family, runs, damage)
    assert [check for check in result.checks if not check.holds] == []
    found = json.loads(json.dumps(outcome([result], "file", "why", "").data))
    assert found["models"][0]["hit_tokens"] == 128


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_pages_in_the_folder_of_a_server_are_damaged_as_well(tmp_path: Path) -> None:
    """As the demo of hf3fs has it, whose root lies on a mount that is brought."""
    job = Job(
        role=Role.OFFLOAD,
        families=(Family.MLA,),
        scale=Scale.TINY,
        backend="file",
        directory=tmp_path / "trial",
        salt="a trial",
        threads=1,
        settings={"free_space": 0, "root": str(tmp_path / "mount" / "store")},
    )
    job.directory.mkdir()
    served = serve(job, Family.MLA, lambda _event: None)
    # The same pages in another namespace of that root, as runs on altered pages have.
    (store,) = (tmp_path / "mount" / "store").glob(
        f"{served.pools['kv'].keys[0][:64]}*"
    )
    others = (store.with_name("0" * 64), store.with_name("f" * 64))
    for other in others:
        shutil.copytree(store, other)
    kept = contents(others[0])
    damage = damage_store(job, served)
    assert {harm for _, _, harm in damage} == set(Harm)
    assert [contents(other) for other in others] == [kept, kept]
    assert contents(store) != kept


class Screen:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown: list[str] = []

    def say(self, text: str, tone: str = "") -> None:
        assert tone in ("", "strong", "bad", "good")
        self.said.append(text)

    def progress(self, what: str, done: int = 0, total: int = 0) -> None:
        assert done <= total
        self.shown.append(what)


def test_words_stand_for_models_and_others_are_refused_by_name() -> None:
    assert StoringDemo.of("", "") == StoringDemo(tuple(Family), Scale.DEMO)
    assert StoringDemo.of("all", "tiny").families == tuple(Family)
    assert SendingDemo.of("mla", "tiny") == SendingDemo((Family.MLA,), Scale.TINY)
    for model, size in (("gpt", "tiny"), ("mla", "huge")):
        with pytest.raises(SettingsError, match=r"gpt|huge") as caught:
            StoringDemo.of(model, size)
        assert "mamba; sizes: demo, tiny" in caught.value.fix


def test_a_process_that_ends_without_results_is_named_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trial, "_WORKER", "kvdock_transformers.no_such_module")
    screen = Screen()
    with pytest.raises(TrialFailed, match="the offload process failed: it ended") as e:
        StoringDemo.of("mla", "tiny").run(tmp_path, "file", "why", "", {}, screen)
    assert "no_such_module" in e.value.fix
    assert screen.said[0].endswith("Backend file: why.")


def test_loading_the_command_imports_nothing_heavy() -> None:
    code = "import sys, model_demo.command; print(*sys.modules)"
    done = subprocess.check_output(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1]
    )
    loaded = set(done.decode().split())
    assert not loaded & {"torch", "transformers", "numpy", "rich", "typer"}
