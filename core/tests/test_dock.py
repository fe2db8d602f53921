from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from kvdock import (
    Capability,
    Dock,
    DType,
    Finding,
    KvdockError,
    NoRoute,
    PoolSpec,
    RouteRequirements,
    Shard,
    Support,
)
from kvdock.config.core import Integrity
from kvdock.errors import PluginError, SettingsError
from kvdock.plugin.backend import run_probe
from kvdock.plugin.discovery import Candidate
from kvdock.pools import Part

if TYPE_CHECKING:
    from tiny import Shelf

KV = PoolSpec(
    name="kv",
    kind="mha",
    parts=[Part("k", DType.F16, [2, 8], shard_axis=0)],
    layers=(0, 1),
    page_tokens=4,
    anchor=True,
)
HOOK = "@hookimpl\ndef kvdock_batch_io"


def candidate(name: str) -> Candidate:
    return Candidate(
        name=name,
        value=f"kvdock_{name}",
        distribution=f"kvdock-{name}",
        version="1.2.3",
    )


def dock(shelf: Shelf, name: str, extra: str) -> Dock:
    shelf.add_backend(name, (HOOK, f"@hookimpl\n{extra}\n\n{HOOK}"))
    return Dock.of([candidate(name)], require=[name])


def test_a_broken_plugin_is_one_warning_line(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.add("bad", "import nowhere")
    shelf.add_backend("good")
    loaded = Dock.of([candidate("bad"), candidate("good")])
    assert list(loaded.backends) == ["good"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kvdock", logging.WARNING)
    assert record.getMessage() == str(loaded.problems[0])


def test_a_broken_plugin_that_is_required_raises(shelf: Shelf) -> None:
    shelf.add("bad", "import nowhere")
    with pytest.raises(PluginError, match="No module named 'nowhere'"):
        Dock.load(require=["bad"])


def test_a_plugin_that_is_not_allowed_cannot_be_required(shelf: Shelf) -> None:
    shelf.add_backend("good")
    shelf.add_backend("better")
    with pytest.raises(PluginError, match="no backend 'better' is installed"):
        Dock.load(require=["better"], environ={"KVDOCK_PLUGINS": "good"})


def test_a_backend_that_fails_to_judge_is_refused_and_stops_no_other(
    shelf: Shelf,
) -> None:
    shelf.add_backend("good")
    dock(
        shelf,
        "bad",
        "def kvdock_check_capability(capability, pool, shard):\n    1 / 0",
    )
    plan = Dock.of([candidate("bad"), candidate("good")]).plan([KV], Shard())
    assert plan.anchor.backend == "good"
    (refused,) = [one for one in plan.anchor.options if one.backend == "bad"]
    assert refused.reason == (
        "bad failed to judge store: ZeroDivisionError: division by zero"
    )


def test_a_judgement_that_is_no_verdict_refuses_the_pool(shelf: Shelf) -> None:
    loaded = dock(
        shelf,
        "bad",
        "def kvdock_check_capability(capability, pool, shard):\n    return True",
    )
    said = loaded.backends["bad"].check_capability(Capability.STORE, KV, Shard())
    assert said is not None
    assert (said.support, said.reason) == (
        Support.NO,
        "bad judged store with True: not a Verdict",
    )
    with pytest.raises(NoRoute, match="not a Verdict"):
        loaded.plan([KV], Shard())


def raising() -> Iterator[Finding]:
    yield Finding(ok=True, what="first")
    raise RuntimeError("then not")


def refusing() -> Iterable[Finding]:
    raise KvdockError("no server", fix="Start one.")


def leaving() -> Iterable[Finding]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("ask", "finding"),
    [
        (raising, Finding(ok=False, what="RuntimeError: then not")),
        (refusing, Finding(ok=False, what="no server", hint="Start one.")),
        (leaving, Finding(ok=False, what="SystemExit: 3")),
        (
            lambda: ["x"],
            Finding(ok=False, what="'x' is not a Finding", hint="Return Findings."),
        ),
        (lambda: 7, Finding(ok=False, what="TypeError: 'int' object is not iterable")),
    ],
    ids=["late", "refusal", "exit", "no-finding", "no-findings"],
)
def test_a_probe_that_goes_wrong_is_a_finding(ask: object, finding: Finding) -> None:
    assert run_probe(ask) == (finding,)  # type: ignore[arg-type] # wrong on purpose


def test_settings_of_a_backend_without_any_are_refused(shelf: Shelf) -> None:
    shelf.add_backend("good")
    backend = Dock.of([candidate("good")]).backends["good"]
    assert backend.settings(None) is None
    with pytest.raises(SettingsError, match="backend 'good': unknown setting 'root'"):
        backend.settings({"root": "/"})


def test_one_suffix_may_be_given_as_text(shelf: Shelf) -> None:
    shelf.add_backend("good", ("return key_suffixes(pool, shard)", "return '.x'"))
    backend = Dock.of([candidate("good")]).backends["good"]
    assert backend.key_suffix(KV, Shard()) == (".x",)


SETTINGS = (
    "import attrs\n"
    "from kvdock import Capability, HostMemory, Support, Verdict\n"
    "@attrs.frozen\n"
    "class Settings:\n"
    "    shared: bool = False\n"
)
JUDGES = (
    "def kvdock_check_capability(capability, settings):\n"
    "    if capability is Capability.HOST_ALLOCATOR and not (\n"
    "        settings and settings.shared\n"
    "    ):\n"
    "        return Verdict(Support.NATIVE, 'any')\n"
    "    return None\n"
    "@hookimpl\n"
    "def kvdock_allocate(nbytes, config):\n"
    "    if not config.settings.shared:\n"
    "        return None\n"
    "    return HostMemory(bytearray(nbytes), lambda: None)"
)
DECLARES = (
    'summary="a backend",',
    'summary="a backend", settings=Settings, host_allocator=Support.NATIVE,',
)
MOVES = ("kinds={", "zero_copy=Support.NATIVE, kinds={")


@pytest.fixture
def sharer(shelf: Shelf) -> Dock:
    """A backend that brings memory only with some settings."""
    shelf.add_backend(
        "sharer",
        ("@hookimpl\ndef kvdock_manifest", f"{SETTINGS}@hookimpl\ndef kvdock_manifest"),
        DECLARES,
        MOVES,
        (HOOK, f"@hookimpl\n{JUDGES}\n\n{HOOK}"),
    )
    return Dock.of([candidate("sharer")], require=["sharer"])


@pytest.fixture
def two(shelf: Shelf, sharer: Dock) -> Dock:
    """The same beside one without settings."""
    shelf.add_backend("other")
    assert list(sharer.backends) == ["sharer"]
    return Dock.of([candidate("sharer"), candidate("other")])


def test_a_plan_may_hang_on_the_settings_of_a_backend(sharer: Dock) -> None:
    usual = sharer.plan([KV], Shard()).anchor
    assert "allocator" not in usual.reason
    given: dict[str, dict[str, object]] = {
        "sharer": {"shared": True},
        "absent": {"any": 1},
    }
    shared = sharer.plan([KV], Shard(), settings=given).anchor
    assert shared.reason.startswith("staged (not in memory of sharer's allocator)")
    for settings, allocate in ((given, True), (None, False)):
        needs = RouteRequirements(allocator=None, integrity=Integrity.OFF)
        found = sharer.plan([KV], Shard(), needs=needs, settings=settings).anchor
        assert found.allocate == allocate
    with pytest.raises(SettingsError, match="unknown setting 'sharde'"):
        sharer.plan([KV], Shard(), ["sharer"], settings={"sharer": {"sharde": True}})


def test_settings_of_a_backend_that_is_not_asked_for_do_not_stop_the_others(
    two: Dock,
) -> None:
    wrong: dict[str, dict[str, object]] = {"sharer": {"sharde": True}}
    for prefer, overrides in ((["other"], {}), ([], {"kv": "other"})):
        plan = two.plan([KV], Shard(), prefer, overrides=overrides, settings=wrong)
        assert plan.anchor.backend == "other"
        assert "sharde" not in plan.explain()
    for prefer, overrides in ((["sharer"], {}), ([], {"kv": "sharer"})):
        with pytest.raises(SettingsError, match="unknown setting 'sharde'"):
            two.plan([KV], Shard(), prefer, overrides=overrides, settings=wrong)


def test_a_backend_whose_settings_are_wrong_is_left_out_with_the_reason(
    two: Dock, sharer: Dock, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: dict[str, dict[str, object]] = {"sharer": {"sharde": True}}
    plan = two.plan([KV], Shard(), settings=wrong)
    assert plan.anchor.backend == "other"
    assert "not chosen: backend 'sharer': unknown setting 'sharde'" in plan.explain()
    with pytest.raises(NoRoute, match="sharer: backend 'sharer': unknown setting"):
        sharer.plan([KV], Shard(), settings=wrong)
    assert len(caplog.records) == 2


def test_memory_comes_from_the_backend_where_it_brings_some(sharer: Dock) -> None:
    own = sharer.allocate("sharer", 5000, {"shared": True})
    assert type(own.buffer) is bytearray
    plain = sharer.allocate("sharer", 5000)
    assert type(plain.buffer) is not bytearray
    for memory in (own, plain):
        view = memoryview(memory.buffer)
        assert (view.nbytes, view.readonly) == (5000, False)
        view.release()
        memory.give_back()


def test_memory_is_refused_where_nobody_has_it(sharer: Dock) -> None:
    with pytest.raises(PluginError, match="Did you mean 'sharer'"):
        sharer.allocate("sharre", 4096)
    with pytest.raises(KvdockError, match="0 bytes are not memory"):
        sharer.allocate("sharer", 0)
    with pytest.raises(SettingsError, match="unknown setting"):
        sharer.allocate("sharer", 4096, {"root": "/"})
