"""`kvdock why` on journals of whole engines: the first sentence names the cause."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from test_families import on_files
from test_storage_faults import flip_every_page
from vllm_lives import Lives, prompts

pytestmark = pytest.mark.slow

EVICTED = "it was stored, and made way for other pages since."
ELSEWHERE = "it is stored in another namespace ("
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SHARED = Path("/dev/shm")  # noqa: S108 - where vLLM adds what ranks have computed


def kvdock(*words: object) -> tuple[int, str]:
    """Run a command; return its exit code and what it prints."""
    command = [str(Path(sys.executable).with_name("kvdock")), *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ended.stderr, ended.stderr
    return ended.returncode, ended.stdout


def why(journal: Path, number: int = -1) -> tuple[int, str]:
    """Ask for one of a journal's requests; return the first sentences."""
    listed = json.loads(kvdock("why", "--journal", journal, "--json")[1])
    found = sorted(listed["requests"], key=lambda one: one["at"])[number]
    code, said = kvdock("why", "--journal", journal, "--request", found["request"])
    return code, " ".join(said.partition("\n\n")[0].split())


def stored_in(folder: Path, **core: Any) -> dict[str, Any]:
    """Return the settings of a store with a journal beside it."""
    (folder / "store").mkdir(exist_ok=True)
    settings = on_files(folder / "store")
    settings["core"] = {**settings["core"], "observers": ["journal"], **core}
    journal = {"dir": str(folder / "journal")}
    return {**settings, "observers": {"journal": journal}}


def faulty(folder: Path, operation: str, kind: str = "drop", **core: Any) -> Any:
    wrap = {"name": "faults", "kinds": [kind], "operations": [operation]}
    return {**stored_in(folder, **core), "wrap": [wrap | {"hang": "4 s"}]}


def without(pool: str) -> Callable[[Path], None]:
    """Return what deletes a pool from a store."""

    def delete(folder: Path) -> None:
        gone = [one for one in (folder / "store").rglob(pool) if one.is_dir()]
        assert gone
        for one in gone:
            shutil.rmtree(one)

    return delete


def damaged(folder: Path) -> None:
    flip_every_page(folder / "store")


def untouched(folder: Path) -> None:
    del folder


def elsewhere(folder: Path) -> dict[str, Any]:
    place = {"plugin": "file", "root": str(folder / "other"), "free_space": "1 MiB"}
    settings = stored_in(folder)
    del settings["plugin"], settings["root"], settings["free_space"]
    return {**settings, "backends": {"other": place}, "tiers": ["other"]}


@attrs.frozen
class Case:
    """What is done to a store and to an engine, and what is then said.

    Args:
        said: In the first sentence.
        storage: Returns the settings of the engine that asks.
        harm: What is done to the store before.
        family: The model.
        more: Of the phase.
    """

    said: str
    storage: Callable[[Path], dict[str, Any]] = stored_in
    harm: Callable[[Path], None] = untouched
    family: str = "llama"
    more: dict[str, Any] = attrs.field(factory=dict)


CASES = {
    "all": Case("All "),
    "salt": Case(
        ELSEWHERE + "salt_sha256 differs).",
        lambda folder: {**stored_in(folder), "salt": "a secret"},
    ),
    "flag": Case(ELSEWHERE, more={"engine": {"dtype": "bfloat16"}}),
    "evicted": Case(EVICTED, harm=without("kv*")),
    "window": Case("pool swa lacks page ", harm=without("swa*"), family="swa_full"),
    "damaged": Case("its bytes were wrong and it was deleted.", harm=damaged),
    "expired": Case(
        "its time was over: ",
        lambda folder: stored_in(folder, retention={"max_age": "1 s"}),
    ),
    "ranks": Case(
        "parallel_config.tensor_parallel_size is 1 here and 2 there",
        family="llama_2",
    ),
    "tier": Case("it is stored in a tier that was not asked.", elsewhere),
    "never": Case(
        "no process has stored it, as far back as the journal goes.",
        more={"prompts": [[3 * one % 200 + 5 for one in range(100)]]},
    ),
    "breaker": Case(
        "its backend was cut off after failures.",
        lambda folder: faulty(
            folder, "exists", breaker={"failures": 1, "backoff": "60 s"}
        ),
        more={"rounds": 2, "later_prompts": prompts(100)[1:]},
    ),
    "failed": Case("the call failed.", lambda folder: faulty(folder, "exists")),
    "late": Case(
        "the call did not end by its deadline.",
        lambda folder: faulty(
            folder, "get", "hang", deadlines={"get": "1 s", "close": "1 s"}
        ),
    ),
}
"""Of a prompt that another engine has stored."""


@pytest.fixture(scope="module")
def asked(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Store with some engines, and ask with others; a folder for each case."""
    first = tmp_path_factory.mktemp("first")
    storage, before = stored_in(first), set(SHARED.glob("vllm_dist_*"))
    ranks = {"engine": TWO_RANKS}
    try:
        lives.run(
            "why-store",
            [
                lives.phase("llama", "llama", storage),
                lives.phase("swa_full", "swa_full", storage),
                lives.phase("llama_2", "llama_2", storage, **ranks),
            ],
        )
    finally:
        for path in set(SHARED.glob("vllm_dist_*")) - before:
            path.unlink()
    folders, phases = {}, []
    for name, case in CASES.items():
        folders[name] = folder = first.with_name(f"why-{name}")
        shutil.copytree(first, folder)
        case.harm(folder)
        one = lives.phase(case.family, name, case.storage(folder))
        phases.append({**one, "prompts": one["prompts"][:1], **case.more})
    lives.run("why-ask", phases)
    return folders


@pytest.mark.parametrize("name", CASES)
def test_the_first_sentence_names_it(asked: dict[str, Path], name: str) -> None:
    code, said = why(asked[name] / "journal")
    assert CASES[name].said in said
    assert code == (1 if name != "all" else 0)


def test_a_store_without_room_and_a_queue_that_is_full(
    lives: Lives, tmp_path: Path
) -> None:
    """What is not taken: the engine that asks for it says why it is not there."""
    many = [[(7 * n + 11 * at) % 500 + 4 for n in range(100)] for at in range(4)]
    few = {"transfers": {"writers": 1, "queue": 1}}
    full, busy = tmp_path / "full", tmp_path / "busy"
    for folder in (full, busy):
        folder.mkdir()
    slow = faulty(busy, "put", "delay", **few)
    slow["wrap"][0]["delay"] = "3 s"
    no_room = {**stored_in(full, calls={"capacity_interval": "100 ms"})}
    no_room["free_space"] = "1000 TiB"
    given: dict[str, Any] = {"prompts": many}
    later = {"rounds": 2, "later_prompts": many[1:]}
    phases = [
        lives.phase("llama", "full", no_room, prompts=many[:1], **later),
        lives.phase("llama", "asks full", stored_in(full), prompts=many[1:2]),
        lives.phase("llama", "busy", slow, **given),
        *(
            lives.phase("llama", f"asks busy {at}", stored_in(busy), prompts=[one])
            for at, one in enumerate(many)
        ),
    ]
    lives.run("why-not-taken", phases)
    assert "its store was full when it was to be stored." in why(full / "journal")[1]
    said = [why(busy / "journal", at)[1] for at in range(-len(many), 0)]
    wanted = "it was not moved, because too many transfers waited."
    assert any(wanted in one for one in said), said
