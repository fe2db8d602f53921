"""`kvdock route --namespace`, with a stand-in for an engine's adapter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvdock import DType, Namespace, PoolKind, PoolSpec
from kvdock.namespace import canonical, namespace_digest, namespace_record
from kvdock.pools import Part
from kvdock_cli.reports.store import SHORT

if TYPE_CHECKING:
    from pathlib import Path

    from tiny import Shelf

ADAPTER = """
import json
from kvdock import Namespace
from kvdock.launch import NamespacePlan, split_command
from kvdock.namespace import namespace_record

def plan_namespace(command, settings):
    print("modules of the engine are loaded")
    _, words = split_command(command)
    said = dict(word.removeprefix("--").split("=") for word in words)
    namespace = Namespace(model=said.pop("model"), page_format=json.dumps(said))
    return NamespacePlan(
        records={"target": namespace_record(namespace, ())},
        loaded=("pools", "page_format.layers"),
    )
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    return root


def put_record(root: Path, model: str = "org/Model", **page_format: str) -> str:
    """Put the record of a namespace where a store would; return its digest."""
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MLA,
        parts=(Part("kv", DType.BF16, (576,)),),
        layers=range(61),
        page_tokens=64,
        anchor=True,
    )
    loaded = {**page_format, "layers": "60 of attention"}
    record = namespace_record(
        Namespace(model=model, page_format=json.dumps(loaded, sort_keys=True)), [pool]
    )
    folder = root / namespace_digest(record)
    folder.mkdir(mode=0o700)
    (folder / "namespace.json").write_bytes(canonical(record))
    return folder.name


@pytest.fixture
def motor(shelf: Shelf) -> Shelf:
    shelf.add(
        "route.motor", ADAPTER, group="kvdock.commands",
        attribute="plan_namespace", distribution="kvdock-motor",
    )  # fmt: skip
    return shelf


def compare(
    shelf: Shelf, against: Path, command: str = "motor --model=org/Model --dtype=fp8"
) -> tuple[int, dict[str, Any]]:
    done = shelf.kvdock(
        "route", "--namespace", "--json", "--set", "plugin=file",
        "--against", str(against), "--", *command.split(),
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


def test_equal_settings_find_the_namespace_that_is_stored(
    motor: Shelf, store: Path
) -> None:
    put_record(store, dtype="bf16")
    digest = put_record(store, dtype="fp8")
    code, found = compare(motor, store)
    assert (code, found["ok"]) == (0, True)
    nearest = found["compared"]["target"]
    assert (nearest["namespace"], nearest["differences"]) == (digest, [])
    # What the engine knows once it has loaded the model is apart.
    assert {one["field"].partition(".")[0] for one in nearest["loaded"]} == {
        "pools",
        "page_format",
    }


def test_a_field_that_separates_is_named(motor: Shelf, store: Path) -> None:
    put_record(store, "org/Other", dtype="bf16")
    digest = put_record(store, dtype="bf16")
    code, found = compare(motor, store)
    assert (code, found["ok"]) == (1, False)
    nearest = found["compared"]["target"]
    assert nearest["namespace"] == digest
    assert nearest["differences"] == [
        {"field": "page_format.dtype", "left": "bf16", "right": "fp8"}
    ]
    done = motor.kvdock(
        "route", "--namespace", "--set", f"root={store}", "--set", "plugin=file",
        "--", "motor", "--model=org/Model", "--dtype=fp8",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == (
        f"target: a new namespace. The nearest, {digest[:SHORT]}, differs in what "
        "follows.\n"
        "  field              there  command\n"
        "  page_format.dtype  bf16   fp8\n"
        "  Its pools are compared when the engine has loaded the model, and:\n"
        "    field               there            command\n"
        "    page_format.layers  60 of attention  -\n"
    )


def test_two_commands_are_compared_by_what_the_first_one_printed(
    motor: Shelf, tmp_path: Path
) -> None:
    done = motor.kvdock(
        "route", "--namespace", "--json", "--set", "plugin=file",
        "--set", f"root={tmp_path / 'nothing'}",
        "--", "motor", "--model=org/Model", "--dtype=fp8",
    )  # fmt: skip
    old = json.loads(done.stdout)
    assert (done.returncode, old["compared"]) == (0, {"target": None})
    printed = tmp_path / "old.json"
    printed.write_text(json.dumps(old))
    code, same = compare(motor, printed)
    assert (code, same["compared"]["target"]["differences"]) == (0, [])
    code, other = compare(motor, printed, "motor --model=org/Model --dtype=bf16")
    assert code == 1
    assert other["compared"]["target"]["differences"][0]["field"] == (
        "page_format.dtype"
    )


def test_a_file_that_is_something_else_is_said(motor: Shelf, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    for text in ("{", "[]", '{"records": 1}', '{"records": {"target": {}}}'):
        wrong.write_text(text)
        code, found = compare(motor, wrong)
        assert code == 2
        assert (
            "is not what `kvdock route --namespace --json` prints"
            in (found["error"]["what"])
        )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--namespace",), "--namespace needs the command of an engine"),
        (("--namespace", "--", "kettle"), "no installed adapter knows"),
        (
            ("--namespace", "--against", "/no/such/store", "--", "motor"),
            "there is neither a store nor a file",
        ),
        (("--against", "x"), "--against and --set are for --namespace"),
        (("--", "motor"), "--against and --set are for --namespace"),
    ],
)
def test_bad_words_say_what_to_write(
    motor: Shelf, words: tuple[str, ...], what: str
) -> None:
    done = motor.kvdock("route", *words)
    assert done.returncode == 2
    assert what in done.stderr.replace("\n  ", " ")
