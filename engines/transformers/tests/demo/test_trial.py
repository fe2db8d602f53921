"""The whole trial: in one process to be quick, and as the command runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvdock import KvdockError
from kvdock.errors import PluginError, SettingsError
from kvdock_transformers.demo.command import (
    Model,
    Size,
    cleaning_up_when_terminated,
    demo,
)
from kvdock_transformers.demo.damage import Harm
from kvdock_transformers.demo.presentation import as_object
from kvdock_transformers.demo.records import Job, Phase, Served, to_json
from kvdock_transformers.demo.serving import serve
from kvdock_transformers.demo.trial import damage_store
from kvdock_transformers.demo.verdicts import judge
from kvdock_transformers.errors import TrialFailed
from kvdock_transformers.families import Family, Scale

app = typer.Typer()
app.command("demo")(demo)


@app.command("other")
def other() -> None:
    """Make the app one of several commands, as the real one is."""


@pytest.mark.parametrize("family", list(Family))
def test_every_model_passes_every_check(family: Family, tmp_path: Path) -> None:
    runs: dict[Phase, Served] = {}
    for phase in Phase:
        job = Job(
            phase=phase,
            families=(family,),
            scale=Scale.TINY,
            backend="file",
            directory=tmp_path,
            salt="a trial",
            threads=1,
            settings={"free_space": 0},
        )
        if phase is Phase.REPAIR:
            damage = damage_store(job, runs[Phase.OFFLOAD])
        wire = json.dumps(to_json(serve(job, family, lambda _event: None)))
        runs[phase] = Served(**json.loads(wire))
    result = judge(family, runs, damage)
    assert [check for check in result.checks if not check.holds] == []
    assert json.loads(as_object([result]))["models"][0]["hit_tokens"] == 128


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
        phase=Phase.OFFLOAD,
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
    assert {harm for _, _, harm in damage.done} == set(Harm)
    assert [contents(other) for other in others] == [kept, kept]
    assert contents(store) != kept


@pytest.mark.slow
def test_the_command_ends_in_one_json_object(tmp_path: Path) -> None:
    arguments = ["demo", "--model", "mha", "--size", "tiny", "--json"]
    arguments += ["--dir", str(tmp_path), "--set", "free_space=0"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["ok"]
    assert summary["schema"] == "kvdock.demo/1"
    (model,) = summary["models"]
    assert model["tokens_identical"]
    assert model["damage_survived"]
    assert model["max_abs_diff"] == 0.0
    assert set(model["pools"]) == {"kv", "draft"}
    assert 0 < model["draft_acceptance_before"] == model["draft_acceptance_after"] < 1
    (trial,) = tmp_path.iterdir()
    assert not (trial / "models").exists(), "what is bulky is cleared away"


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_backend_without_files_brings_its_server_and_is_harmed_by_hooks() -> None:
    library = pytest.importorskip("kvdock_mooncake.library")
    try:
        library.load()
    except KvdockError as error:
        pytest.skip(f"{error}")
    arguments = ["demo", "--model", "mha", "--size", "tiny", "--json"]
    ran = CliRunner().invoke(
        app, [*arguments, "--backend", "mooncake", "--set", "replicas=1"]
    )
    assert ran.exit_code == 0, ran.output
    assert "tarted a local master" in " ".join(ran.stderr.split())
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["ok"]
    (model,) = summary["models"]
    assert model["damage_survived"]
    assert model["damaged_pages"] == 5
    assert 0 < model["draft_acceptance_before"] == model["draft_acceptance_after"] < 1


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["--backend", "no_such"], PluginError, "no_such"),
        (["--dir", __file__], SettingsError, "--dir"),
        (["--set", "no_such=1"], SettingsError, "no_such"),
        (["--set", "root=/x"], SettingsError, "--dir"),
        (["--set", "quota"], SettingsError, "KEY=VALUE"),
        (["--set", "quota=1", "--set", "quota=2"], SettingsError, "twice"),
    ],
)
def test_bad_input_is_refused_by_name(
    arguments: list[str], kind: type[KvdockError], words: str
) -> None:
    """The command line makes a line, an object and an exit code of errors."""
    ran = CliRunner().invoke(app, ["demo", *arguments])
    assert isinstance(ran.exception, kind)
    assert words in str(ran.exception)


def test_a_disk_without_room_is_an_error_before_any_model_is_made() -> None:
    floor = ["--backend", "file", "--set", "free_space=1024 TiB"]
    ran = CliRunner().invoke(app, ["demo", *floor])
    said = str(ran.exception)
    assert isinstance(ran.exception, KvdockError)
    assert "cannot store pages here: 0 B to use" in said
    assert "--dir" in said


def test_a_trial_that_fails_raises_to_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise TrialFailed("a process ended")

    monkeypatch.setattr("kvdock_transformers.demo.trial.run_trial", fail)
    ran = CliRunner().invoke(app, ["demo", "--json", "--set", "free_space=0"])
    assert isinstance(ran.exception, TrialFailed)
    assert ran.stdout == ""


def test_sigterm_cleans_up_and_is_as_it_was_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def interrupted() -> None:
        with (
            cleaning_up_when_terminated(),
            tempfile.TemporaryDirectory(dir=tmp_path),
        ):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        interrupted()
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_commands_words_are_those_of_the_models() -> None:
    assert {*Model} - {Model.ALL} == {*Family}
    assert {*Size} == {*Scale}


def test_loading_the_command_imports_nothing_heavy() -> None:
    code = "import sys, kvdock_transformers.demo.command; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code]).decode().split())
    assert not loaded & {"torch", "transformers", "numpy", "rich"}
