"""Golden texts of every report; a change of one is a change to what people see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
from golden import check_report, check_text

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
from kvdock_cli.commands import version
from kvdock_cli.reports import doctor, manifest, route
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
STATES = [
    (
        ALPHA.candidate,
        [
            Finding(ok=True, what="the directory is there", hint="unseen"),
            Finding(ok=False, what="it is full", hint="Delete something."),
        ],
    ),
    (
        BETA.candidate,
        [
            Finding(
                ok=True, what="setting 'x' is missing", hint="Give it.", skipped=True
            )
        ],
    ),
    (attrs.evolve(BETA.candidate, name="engine", group="kvdock.doctors"), []),
]
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
    ("kvdock", "0.1.0", "kvdock", "/lib/kvdock/__init__.py"),
    ("backend alpha", "1.2.3", "kvdock-alpha", ALPHA.path),
]
# Of all kinds the text says in one line what JSON repeats for each.
SHORT = attrs.evolve(
    ALPHA, manifest=attrs.evolve(ALPHA.manifest, kinds={PoolKind.MHA: WHOLE})
)
REPORTS = {
    "list": listing.report(LISTING),
    "show-alpha": manifest.report(ALPHA),
    "show-beta": manifest.report(BETA),
    "doctor": doctor.report(STATES, [BROKEN], ["delta"]),
    "route": route.report(PLAN),
    "version": version.report(PARTS_OF_KVDOCK),
}
OBJECTS = {
    **REPORTS,
    "list": listing.report(attrs.evolve(LISTING, plugins=[SHORT])),
    "show-alpha": manifest.report(SHORT),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_text_is_the_golden_one_and_fits(name: str) -> None:
    check_report(GOLDEN / f"{name}.txt", REPORTS[name])


JSON = sorted(OBJECTS.keys() - {"show-beta"})


@pytest.mark.parametrize("name", JSON)
def test_the_object_is_the_golden_one(name: str) -> None:
    check_text(GOLDEN / f"{name}.json", json.dumps(OBJECTS[name].as_data(), indent=2))


def keys_of(value: object) -> set[str]:
    """Return the keys of an object and of the objects in it."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set()


@pytest.mark.parametrize("name", JSON)
def test_every_key_of_an_object_is_documented(name: str) -> None:
    shown: Any = json.loads((GOLDEN / f"{name}.json").read_text())
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
    assert doctor.report().text() == "no problem found"
    assert doctor.report(STATES[1:]).ok
    assert not doctor.report(STATES).ok
    assert not doctor.report(problems=[BROKEN]).ok


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
