"""Golden texts of every report; a change of one is a change to what people see.

With TESTS_OF_KVDOCK_GOLDEN=write in the environment they are written anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from kvdock import (
    Capability,
    Finding,
    HitPolicy,
    KindSupport,
    Layout,
    Manifest,
    Plan,
    PluginProblem,
    PoolKind,
    PoolSpec,
    Route,
    RouteOption,
    Scope,
    Shard,
    Support,
    Verdict,
)
from kvdock.config import option, size
from kvdock.plugin import Candidate, LoadedPlugin, LoadStage
from kvdock.pools import ObjectUnit, Part
from kvdock.routing.verdicts import TransferMode
from kvdock_cli.reports import doctor, manifest, route, version
from kvdock_cli.reports import list as listing
from kvdock_cli.reports._tables import columns, plain

GOLDEN = Path(__file__).with_name("golden")
DOCUMENTATION = (
    Path(__file__).parents[2] / "docs" / "reference" / "cli-json.md"
).read_text()


@attrs.frozen
class Settings:
    root: Path = option(help="Where pages are kept.")
    quota_bytes: int = size(64 << 30, help="When to make room.")
    hosts: tuple[str, ...] = option((), help="Servers to ask.")
    names: list[str] = attrs.field(
        default=attrs.Factory(lambda self: [str(self.root)], takes_self=True),
        metadata={"help": "Derived."},
    )
    token: str = attrs.field(factory=str)


def plugin(name: str, **declared: Any) -> LoadedPlugin:
    return LoadedPlugin(
        candidate=Candidate(
            name=name,
            value=f"kvdock_{name}.plugin",
            distribution=f"kvdock-{name}",
            version="1.2.3",
        ),
        manifest=Manifest(name=name, api=2, **declared),
        path=f"/lib/kvdock_{name}/plugin.py",
        manager=cast("Any", None),
        implemented=frozenset({"kvdock_manifest", "kvdock_batch_io"}),
    )


WHOLE = KindSupport(
    hit_policies=HitPolicy,
    split_heads=Support.NATIVE,
    draft=Support.NATIVE,
    multi_buffer=Support.EMULATED,
)
ALPHA = plugin(
    "alpha",
    summary="takes everything",
    kinds=dict.fromkeys(PoolKind, WHOLE),
    zero_copy=Support.NATIVE,
    durability=Scope.HOST,
    sharing=Scope.CLUSTER,
    settings=Settings,
)
ONE: Any = {Layout.PAGE_FIRST}  # typed by its converter as a type variable
BETA = plugin(
    "beta",
    summary="says little",
    kinds={
        PoolKind.MHA: KindSupport(draft=Support.NO, layouts=ONE),
        PoolKind.MLA: KindSupport(),
    },
    max_object_bytes=1 << 20,
    max_batch_keys=128,
)
BROKEN = PluginProblem(
    name="gamma",
    group="kvdock.backends",
    distribution="kvdock-gamma",
    version="0.9",
    entry_point="kvdock_gamma",
    stage=LoadStage.IMPORT,
    cause="ModuleNotFoundError: No module named 'gamma'",
    fix="Reinstall kvdock-gamma, or install what it needs.",
)
LISTING = listing.Listing(plugins=[ALPHA, BETA], problems=[BROKEN], hidden=["delta"])
DIAGNOSIS = doctor.Diagnosis(
    problems=[BROKEN],
    sections=[
        doctor.Section(
            ALPHA.candidate,
            [
                Finding(ok=True, what="the directory is there", hint="unseen"),
                Finding(ok=False, what="it is full", hint="Delete something."),
            ],
        ),
        doctor.Section(
            BETA.candidate,
            [
                Finding(
                    ok=True,
                    what="setting 'x' is missing",
                    hint="Give it.",
                    skipped=True,
                )
            ],
        ),
        doctor.Section(
            attrs.evolve(BETA.candidate, name="engine", group="kvdock.doctors"),
            [],
        ),
    ],
    hidden=["delta"],
)
PARTS = [Part(name, "bf16", (8, 128), shard_axis=0) for name in ("k", "v")]
KV = PoolSpec(
    name="kv", kind="mha", parts=PARTS, layers=range(4), page_tokens=64, anchor=True
)
DRAFT = attrs.evolve(KV, name="draft", anchor=False, draft=True, required=False)
CAN = (Capability.STORE, Verdict(Support.NATIVE, "it can"))
CANNOT = (Capability.DRAFT, Verdict(Support.UNDECLARED, "it does not say"))
ALPHA_OPTION = RouteOption("alpha", (CAN,), TransferMode.ZERO_COPY, ObjectUnit.PAGE)
# By hand: what the router would say is for the router's own tests.
PLAN = Plan(
    Shard(),
    (
        Route(
            KV,
            (ALPHA_OPTION,),
            "as it should be",
            (
                ALPHA_OPTION,
                RouteOption(
                    "beta", (CAN, CANNOT), TransferMode.STAGED, ObjectUnit.PART
                ),
            ),
        ),
        Route(
            DRAFT,
            (),
            "alpha: it does not say",
            (
                RouteOption(
                    "alpha", (CAN, CANNOT), TransferMode.ZERO_COPY, ObjectUnit.PAGE
                ),
            ),
        ),
        Route(
            attrs.evolve(DRAFT, name="other"),
            (),
            "this stage has none of it",
            absent=True,
        ),
    ),
)
PARTS_OF_KVDOCK = [
    version.Part("kvdock", "0.1.0", "kvdock", "/lib/kvdock/__init__.py"),
    version.Part("backend alpha", "1.2.3", "kvdock-alpha", ALPHA.path),
]
TEXTS: dict[str, Callable[[], str]] = {
    "list.txt": lambda: listing.report(LISTING).text(),
    "show-alpha.txt": lambda: manifest.report(ALPHA).text(),
    "show-beta.txt": lambda: manifest.report(BETA).text(),
    "doctor.txt": lambda: doctor.report(DIAGNOSIS).text(),
    "route.txt": lambda: route.report(PLAN).text(),
    "version.txt": lambda: version.report(PARTS_OF_KVDOCK).text(),
}
OBJECTS: dict[str, Callable[[], dict[str, object]]] = {
    "list.json": lambda: listing.report(LISTING).as_data(),
    "show-alpha.json": lambda: manifest.report(ALPHA).as_data(),
    "doctor.json": lambda: doctor.report(DIAGNOSIS).as_data(),
    "route.json": lambda: route.report(PLAN).as_data(),
    "version.json": lambda: version.report(PARTS_OF_KVDOCK).as_data(),
}


def check(name: str, shown: str) -> None:
    path = GOLDEN / name
    if os.environ.get("TESTS_OF_KVDOCK_GOLDEN") == "write":
        path.write_text(shown + "\n")
        pytest.fail(f"wrote {path.name}; read what git says of it")
    assert shown + "\n" == path.read_text()


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_golden_one(name: str) -> None:
    check(name, TEXTS[name]())


@pytest.mark.parametrize("name", OBJECTS)
def test_the_object_is_the_golden_one(name: str) -> None:
    check(name, json.dumps(OBJECTS[name](), indent=2))


def keys_of(value: object) -> set[str]:
    """Return the keys of an object and of the objects in it."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set()


@pytest.mark.parametrize("name", OBJECTS)
def test_every_key_of_an_object_is_documented(name: str) -> None:
    shown: Any = json.loads((GOLDEN / name).read_text())
    assert f"`{shown['schema']}`" in DOCUMENTATION
    shown.pop("shard", None)
    for backend in (*shown.get("backends", ()), shown.get("backend", {})):
        # Its own fields are the manifest's, which document themselves.
        for field in attrs.fields_dict(Manifest):
            if field != "settings":
                backend.pop(field, None)
    assert not {key for key in keys_of(shown) if f"`{key}`" not in DOCUMENTATION}


def test_a_listing_of_nothing_says_what_to_install() -> None:
    empty = listing.Listing(plugins=[])
    assert (
        listing.report(empty).text()
        == "No backend is installed. Try: pip install kvdock-file"
    )
    assert listing.report(empty).as_data()["ok"] is True


def test_a_listing_of_what_cannot_be_used_does_not_advise_to_install() -> None:
    text = listing.report(listing.Listing(plugins=[], hidden=["delta"])).text()
    assert (
        text
        == "No backend can be used.\n\nLeft out by KVDOCK_PLUGINS or KVDOCK_DENY: delta"
    )


def test_a_diagnosis_is_fine_unless_something_is_wrong() -> None:
    unseen = Finding(ok=True, what="x", skipped=True)
    skipped = doctor.Section(ALPHA.candidate, [unseen])
    assert doctor.Diagnosis(sections=[skipped]).ok
    assert doctor.report(doctor.Diagnosis()).text() == "no problem found"
    assert not doctor.Diagnosis(problems=[BROKEN]).ok
    assert not DIAGNOSIS.ok


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Support.UNDECLARED, "?"),
        (frozenset({"b", "a"}), ["a", "b"]),
        ((1, None, True), [1, None, True]),
        ({PoolKind.MHA: 1.5}, {"mha": 1.5}),
        (Path("/x"), "/x"),
        (int, "int"),
        (
            Finding(ok=True, what="x"),
            {
                "ok": True,
                "what": "x",
                "hint": "",
                "warning": False,
                "skipped": False,
            },
        ),
    ],
)
def test_records_become_plain_values(value: object, expected: object) -> None:
    assert plain(value) == expected


def test_no_rows_make_no_columns() -> None:
    assert columns([]) == []
