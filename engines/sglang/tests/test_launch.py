"""What is added to a command of SGLang's, where SGLang need not be installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvdock_sglang.launch import launch

COMMAND = ("python", "-m", "sglang.launch_server", "--model-path", "M")


def settings(tmp_path: Path) -> dict[str, str]:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    return {"plugin": "file", "root": str(root), "free_space": "0"}


def test_a_command_gets_the_cache_its_storage_and_a_page_size(tmp_path: Path) -> None:
    given = settings(tmp_path)
    made = launch(COMMAND, {**given, "prefetch_threshold": "16"})
    pairs = " ".join(made.flags)
    assert pairs.startswith(
        "--enable-hierarchical-cache --hicache-storage-backend dynamic"
    )
    assert pairs.endswith(
        "--hicache-storage-prefetch-policy wait_complete --page-size 64"
    )
    place = made.flags.index("--hicache-storage-backend-extra-config")
    extra = json.loads(made.flags[place + 1])
    assert extra["class_name"] == "KvdockStorage"
    assert {key: extra[key] for key in given} == given
    assert extra["prefetch_threshold"] == 16
    assert not [one for one in made.findings if "start SGLang like this" in one.what]


def test_what_the_user_has_said_stays(tmp_path: Path) -> None:
    words = ("--page-size=32", "--enable-hierarchical-cache")
    made = launch((*COMMAND, *words), settings(tmp_path))
    assert not {"--page-size", "--enable-hierarchical-cache"} & {*made.flags}


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (("--hicache-storage-backend", "file"), {}, "says file"),
        (("--hicache-storage-backend-extra-config", "{}"), {}, "already"),
        (("--hicache-mem-layout", "page_firts"), {}, "is not known to kvdock"),
        ((), {"quotta": "1"}, "unknown setting 'quotta'"),
        ((), {"core": "{"}, "is not JSON"),
    ],
)
def test_what_the_engine_would_refuse_is_a_problem(
    tmp_path: Path, words: tuple[str, ...], more: dict[str, str], said: str
) -> None:
    made = launch((*COMMAND, *words), {**settings(tmp_path), **more})
    assert [one for one in made.findings if not one.ok and said in one.what]


def test_a_whole_configuration_is_taken_as_well(tmp_path: Path) -> None:
    given = json.dumps(settings(tmp_path))
    made = launch(COMMAND, {"config": given, "description": "llama-3.1-8b"})
    place = made.flags.index("--hicache-storage-backend-extra-config")
    assert json.loads(made.flags[place + 1])["plugin"] == "file"
