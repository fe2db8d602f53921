from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny import Shelf

from kvdock.errors import PluginError, SettingsError
from kvdock.plugin import discovery
from kvdock.plugin.discovery import Candidate, LoadStage
from kvdock.plugin.loading import load_all
from kvdock.plugin.trial import try_each

if TYPE_CHECKING:
    from pathlib import Path

    from tiny import Shelf

REGISTER = "def kvdock_register_pool(pool, region, config)"
UNMARKED = "def kvdock_allocate(nbytes): 0\n\n\n"
TOUCH = "@hookimpl\ndef kvdock_touch(keys): 0\n\n\n"
NUMBER = "from kvdock import API_VERSION"
SUMMARY = 'summary="a backend",'
MANIFEST = 'return Manifest(\n        name="NAME", api=API_VERSION, summary="a backend"'

BROKEN = {
    "imports_nothing": (
        [("from kvdock import", "import nowhere\nfrom kvdock import")],
        LoadStage.IMPORT,
        "ModuleNotFoundError: No module named 'nowhere'",
        "Reinstall kvdock-bad",
    ),
    "names_no_module": (
        [("from kvdock import", "import kvdock_bad.deeper\nfrom kvdock import")],
        LoadStage.IMPORT,
        (
            "ModuleNotFoundError: No module named 'kvdock_bad.deeper'; 'kvdock_bad' is "
            "not a package"
        ),
        "Reinstall kvdock-bad",
    ),
    "misspelt_field": (
        [(SUMMARY, 'summary="a backend", durabilty="host",')],
        LoadStage.MANIFEST,
        (
            "its manifest raised TypeError: Manifest.__init__() got an unexpected "
            "keyword argument 'durabilty'"
        ),
        "Did you mean 'durability'?",
    ),
    "exits": (
        [("from kvdock import", "raise SystemExit(3)\nfrom kvdock import")],
        LoadStage.IMPORT,
        "SystemExit: 3",
        "Reinstall kvdock-bad",
    ),
    "wrong_api_number": (
        [("api=API_VERSION", "api=99")],
        LoadStage.MANIFEST,
        "it is written for API 99, this kvdock speaks 2",
        "Upgrade kvdock, or install an older kvdock-bad.",
    ),
    "old_api_number": (
        [("api=API_VERSION", "api=1")],
        LoadStage.MANIFEST,
        "it is written for API 1, this kvdock speaks 2",
        "Upgrade kvdock-bad, or install an older kvdock.",
    ),
    "misspelt_hook": (
        [(REGISTER, "def kvdock_regster_pool(pool, region, config)")],
        LoadStage.VALIDATE,
        "unknown hook 'kvdock_regster_pool'",
        "Did you mean 'kvdock_register_pool'?",
    ),
    "method_of_a_store": (
        [(f"@hookimpl\n{REGISTER}", f"{TOUCH}@hookimpl\n{REGISTER}")],
        LoadStage.VALIDATE,
        "unknown hook 'kvdock_touch'",
        "Make it the method 'touch' of what kvdock_register_pool returns.",
    ),
    "invented_argument": (
        [(REGISTER, "def kvdock_register_pool(pool, regoin, config)")],
        LoadStage.VALIDATE,
        (
            "hook 'kvdock_register_pool' takes 'regoin', which its specification "
            "does not have"
        ),
        "Did you mean 'region'?",
    ),
    "default_argument": (
        [(REGISTER, "def kvdock_register_pool(pool, region, config=None)")],
        LoadStage.VALIDATE,
        (
            "hook 'kvdock_register_pool' gives 'config' a default, so it would "
            "never be passed"
        ),
        "Remove the default.",
    ),
    "any_arguments": (
        [(REGISTER, "def kvdock_register_pool(*arguments)")],
        LoadStage.VALIDATE,
        "hook 'kvdock_register_pool' takes '*arguments', which is never passed",
        "Use plain arguments",
    ),
    "memory_of_nobody": (
        [
            (NUMBER, f"{NUMBER}, Support"),
            (SUMMARY, f"{SUMMARY} host_allocator=Support.NATIVE,"),
        ],
        LoadStage.VALIDATE,
        "its manifest declares host_allocator, and it has no kvdock_allocate",
        "Add the hook, or declare host_allocator=Support.NO.",
    ),
    "no_manifest": (
        [("@hookimpl\ndef kvdock_manifest()", "def something()")],
        LoadStage.MANIFEST,
        "it has no manifest",
        "Add a function kvdock_manifest()",
    ),
    "unmarked_manifest": (
        [("@hookimpl\ndef kvdock_manifest()", "def kvdock_manifest()")],
        LoadStage.MANIFEST,
        "its kvdock_manifest() is not marked",
        "Mark it with @hookimpl.",
    ),
    "raising_manifest": (
        [("return Manifest(", "1 / 0\n    return Manifest(")],
        LoadStage.MANIFEST,
        "its manifest raised ZeroDivisionError: division by zero",
        "upgrade kvdock-bad or kvdock.",
    ),
    "refused_manifest": (
        [('{"mha": KindSupport()}', "{}")],
        LoadStage.MANIFEST,
        "its manifest is refused: backend 'bad' takes no kind of pool",
        "Correct what kvdock_manifest() returns.",
    ),
    "manifest_of_another_kind": (
        [(MANIFEST, 'return dict(\n        name="NAME"')],
        LoadStage.MANIFEST,
        "its manifest is a dict",
        "Return a kvdock.Manifest.",
    ),
    "manifest_of_another_name": (
        [('name="NAME"', 'name="other"')],
        LoadStage.MANIFEST,
        "its manifest says 'other', its entry point 'bad'",
        "Give both the same name.",
    ),
    "missing_required_hook": (
        [(f"@hookimpl\n{REGISTER}", "def something(pool)")],
        LoadStage.VALIDATE,
        "the required hook 'kvdock_register_pool' is missing",
        "Add it.",
    ),
    "unmarked_required_hook": (
        [(f"@hookimpl\n{REGISTER}", REGISTER)],
        LoadStage.VALIDATE,
        "the hook 'kvdock_register_pool' is not marked",
        "Mark it with @hookimpl.",
    ),
    "unmarked_optional_hook": (
        [(f"@hookimpl\n{REGISTER}", f"{UNMARKED}@hookimpl\n{REGISTER}")],
        LoadStage.VALIDATE,
        "the hook 'kvdock_allocate' is not marked",
        "Mark it with @hookimpl.",
    ),
    "asynchronous_hook": (
        [("def kvdock_batch_io", "async def kvdock_batch_io")],
        LoadStage.VALIDATE,
        "hook 'kvdock_batch_io' is asynchronous, but hooks are not awaited",
        "Define it with `def`",
    ),
    "wrapper": (
        [(f"@hookimpl\n{REGISTER}", f"@hookimpl(wrapper=True)\n{REGISTER}")],
        LoadStage.VALIDATE,
        "hook 'kvdock_register_pool' is marked as a wrapper",
        "use a plain @hookimpl.",
    ),
}  # fmt: skip
"""What was changed in a whole backend, and what is to be said about it."""


def every() -> tuple[Candidate, ...]:
    """Return what a shelf holds: what is really installed stays out of it."""
    return tuple(
        one
        for one in discovery.list_entry_points()
        if one.value.startswith(("kvdock_good", "kvdock_bad"))
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_has_its_own_problem_and_stops_no_other(
    shelf: Shelf, name: str
) -> None:
    edits, stage, cause, fix = BROKEN[name]
    shelf.add_backend("good")
    shelf.add_backend("bad", *edits)
    plugins, (problem,) = load_all(every())
    assert list(plugins) == ["good"]
    assert (problem.name, problem.group) == ("bad", "kvdock.backends")
    assert (problem.distribution, problem.version) == ("kvdock-bad", "1.2.3")
    assert problem.entry_point == "kvdock_bad"
    assert problem.stage is stage
    assert problem.cause == cause
    assert fix in problem.fix


def test_of_two_plugins_with_one_name_neither_is_used(shelf: Shelf) -> None:
    source = shelf.add_backend("bad")
    shelf.add_backend("good")
    text = (shelf.root / "kvdock_bad.py").read_text()
    shelf.add("bad", text, distribution="kvdock-bad-rival")
    plugins, problems = load_all(every())
    assert list(plugins) == ["good"]
    assert [problem.distribution for problem in problems] == [
        source,
        "kvdock-bad-rival",
    ]
    for problem in problems:
        assert problem.stage is LoadStage.DISCOVER
        assert problem.cause == (
            "the name is claimed by kvdock-bad (kvdock_bad) and "
            "kvdock-bad-rival (kvdock_bad_rival)"
        )


def test_a_class_is_no_plugin(shelf: Shelf) -> None:
    shelf.add("bad", "class Plugin: pass", attribute="Plugin")
    _, (problem,) = load_all(every())
    assert problem.stage is LoadStage.IMPORT
    assert problem.cause == "Plugin is a class"


def test_an_instance_is_a_plugin_as_good_as_a_module(shelf: Shelf) -> None:
    source = (
        "import types, kvdock_good\n"
        "class Plugin:\n"
        "    kvdock_register_pool = staticmethod(kvdock_good.kvdock_register_pool)\n"
        "    kvdock_key_suffix = staticmethod(kvdock_good.kvdock_key_suffix)\n"
        "    kvdock_batch_io = staticmethod(kvdock_good.kvdock_batch_io)\n"
        "    kvdock_manifest = staticmethod(kvdock_good.kvdock_manifest)\n"
        "one = types.SimpleNamespace(two=Plugin())\n"
    )
    shelf.add_backend("good")
    shelf.add("good", source, module="kvdock_badge", attribute="one.two")
    candidate = Candidate(
        name="good", value="kvdock_badge:one.two", distribution="d", version="1"
    )
    plugins, problems = load_all([candidate])
    assert not problems
    assert plugins["good"].path == str(shelf.root / "kvdock_badge.py")


def test_an_object_that_resists_inspection_is_a_problem_of_its_own(
    shelf: Shelf,
) -> None:
    source = (
        "class Plugin:\n"
        "    def __dir__(self):\n"
        "        raise RuntimeError('not now')\n"
        "plugin = Plugin()\n"
    )
    shelf.add("bad", source, attribute="plugin")
    shelf.add_backend("good")
    plugins, (problem,) = load_all(every())
    assert list(plugins) == ["good"]
    assert problem.cause == "RuntimeError: not now"


def test_a_distribution_without_metadata_is_still_named_by_its_plugin(
    shelf: Shelf,
) -> None:
    shelf.add_backend("bad", ("from kvdock", "import nowhere\nfrom kvdock"))
    (shelf.root / "kvdock_bad-1.2.3.dist-info" / "METADATA").write_text("")
    shelf.add_backend("good")
    plugins, (problem,) = load_all(every())
    assert list(plugins) == ["good"]
    assert (problem.name, problem.distribution, problem.version) == ("bad", "?", "?")


def test_what_a_plugin_prints_is_kept_from_standard_output(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf.add_backend(
        "good",
        ("from kvdock import", "print('imported')\nfrom kvdock import"),
        ("    return Manifest(", "    print('asked')\n    return Manifest("),
    )
    plugins, problems = load_all(every())
    assert (list(plugins), problems) == (["good"], ())
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "imported\nasked\n")


def test_discovery_imports_no_plugin(shelf: Shelf) -> None:
    shelf.add_backend("good")
    assert "good" in {candidate.name for candidate in discovery.list_entry_points()}
    assert "kvdock_good" not in sys.modules


def test_discovery_records_an_oracle_without_importing_it(shelf: Shelf) -> None:
    shelf.add("proven", "", oracle="kvdock_nowhere.oracle:oracle")
    shelf.add("silent", "")
    found = {one.name: one.oracle for one in discovery.list_entry_points()}
    assert found["proven"] == "kvdock_nowhere.oracle:oracle"
    assert found["silent"] == ""


@pytest.mark.parametrize(
    ("attribute", "module"), [("", "kvdock_bad_one"), ("no_such_plugin", "")]
)
def test_an_entry_point_that_names_nothing_is_not_what_is_to_be_installed(
    shelf: Shelf, attribute: str, module: str
) -> None:
    shelf.add("bad", "", attribute=attribute, module=module)
    if module:
        (shelf.root / f"{module}.py").unlink()
    _, (problem,) = load_all(every())
    assert "correct the entry point in the pyproject.toml of kvdock-bad" in problem.fix


def test_who_asks_for_an_unknown_backend_hears_what_announces_one() -> None:
    with pytest.raises(PluginError, match=r"entry point in the group kvdock\.backends"):
        discovery.require(["zzz"], ["file"], ())


def test_a_busy_host_gives_an_import_more_time(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add("bad", "import threading; threading.Event().wait()")
    monkeypatch.setenv("KVDOCK_IMPORT_S", "0.5")
    (problem,) = try_each(every()).values()
    assert problem.cause == "its import took more than 0.5 s"
    assert "give it more time with KVDOCK_IMPORT_S" in problem.fix
    monkeypatch.setenv("KVDOCK_IMPORT_S", "soon")
    with pytest.raises(SettingsError, match="KVDOCK_IMPORT_S='soon' is not a time"):
        try_each(every())


def test_an_oracle_of_another_distribution_does_not_count(shelf: Shelf) -> None:
    """What the core stores must not depend on a package of tests."""
    shelf.add("good", "")
    shelf.add(
        "good", "", group="kvdock.oracles", distribution="good-tests", attribute="a"
    )
    found = {one.name: one.oracle for one in discovery.list_entry_points()}
    assert found["good"] == ""


def test_a_missing_plugin_that_is_required_names_the_nearest(shelf: Shelf) -> None:
    shelf.add_backend("good")
    plugins, problems = load_all(every())
    with pytest.raises(PluginError, match=re.escape("Did you mean 'good'?")):
        discovery.require(["god"], plugins, problems)
    with pytest.raises(PluginError, match="Try: pip install kvdock-hf3fs"):
        discovery.require(["hf3fs"], {}, ())
    # Only kvdock's own: the name may be a typing error, or a stranger's package.
    with pytest.raises(PluginError, match=r"Installed: \w+\. A backend"):
        discovery.require(["zzz"], plugins, problems)


def test_an_allow_list_keeps_the_others_from_being_imported(shelf: Shelf) -> None:
    shelf.add_backend("good")
    shelf.add_backend("bad", ("from kvdock", "import nowhere\nfrom kvdock"))
    kept, hidden = discovery.selection({"KVDOCK_PLUGINS": "good"}).of(every())
    assert [candidate.name for candidate in kept] == ["good"]
    assert [candidate.name for candidate in hidden] == ["bad"]
    assert discovery.selection({}).of(every()) == (every(), ())


@pytest.mark.parametrize(
    ("environ", "kept"),
    [
        ({"KVDOCK_PLUGINS": "Kvdock_Good"}, ["good"]),
        ({"KVDOCK_DENY": "kvdock-bad"}, ["good"]),
        ({"KVDOCK_DENY": "bad"}, ["good"]),
        ({"KVDOCK_PLUGINS": "good,bad", "KVDOCK_DENY": "kvdock.bad"}, ["good"]),
        ({"KVDOCK_PLUGINS": "good", "KVDOCK_DENY": "good"}, []),
    ],
)
@pytest.mark.parametrize("group", discovery.GROUPS)
def test_a_distribution_is_allowed_and_denied_in_every_group(
    shelf: Shelf, environ: dict[str, str], kept: list[str], group: str
) -> None:
    shelf.add("good", "def good(): 0", group=group)
    shelf.add("bad", "def bad(): 0", group=group)
    ours = {"kvdock-good", "kvdock-bad"}
    usable = discovery.usable_entry_points(group, environ)
    assert [one.name for one in usable if one.distribution in ours] == kept


def test_what_is_no_plugin_needs_no_allowance() -> None:
    own = Candidate(name="metrics", value="m:o", distribution="kvdock", version="1")
    assert discovery.selection({"KVDOCK_PLUGINS": ""}).admits(own)
    assert not discovery.selection({"KVDOCK_DENY": "metrics"}).admits(own)


def test_a_name_on_the_allow_list_that_nobody_has_is_a_problem(shelf: Shelf) -> None:
    shelf.add_backend("good")
    chosen = discovery.selection({"KVDOCK_PLUGINS": "good,god,kvdock-good,metrics"})
    (problem,) = discovery.missing_allowed(every(), chosen)
    assert (problem.name, problem.stage) == ("god", LoadStage.DISCOVER)
    assert problem.cause == "KVDOCK_PLUGINS names it, but it is not installed"
    assert problem.fix == "Did you mean 'good'?"
    assert not discovery.missing_allowed(every(), discovery.selection({}))


@pytest.mark.parametrize(
    "raised", ["GeneratorExit()", "type('Stop', (BaseException,), {})('no')"]
)
def test_no_exception_of_an_import_hurts_the_other_plugins(
    shelf: Shelf, raised: str
) -> None:
    shelf.add_backend("good")
    shelf.add_backend("bad", ("from kvdock", f"raise {raised}\nfrom kvdock"))
    plugins, (problem,) = load_all(every())
    assert list(plugins) == ["good"]
    assert (problem.name, problem.stage) == ("bad", LoadStage.IMPORT)


@pytest.mark.parametrize(
    ("crash", "cause"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "(SIGSEGV)"),
        ("import os; os._exit(7)", "(status 7)"),
        pytest.param(
            "import threading; threading.Event().wait()",
            "more than 2 s",
            marks=pytest.mark.slow,
        ),
        ("print('noise'); raise KeyboardInterrupt", "(SIGINT)"),
    ],
)
def test_a_plugin_that_ends_its_process_is_named_and_the_others_are_tried(
    shelf: Shelf, crash: str, cause: str
) -> None:
    shelf.add_backend("good")
    shelf.add_backend("bad", ("from kvdock", f"{crash}\nfrom kvdock"))
    found = try_each(every(), 2.0 if "Event" in crash else 60.0)
    assert [one.name for one in found] == ["bad"]
    (problem,) = found.values()
    assert problem.stage == LoadStage.IMPORT
    assert cause in problem.cause
    assert "KVDOCK_DENY=kvdock-bad" in problem.fix


def test_an_interrupt_ends_the_trials_at_once(shelf: Shelf, tmp_path: Path) -> None:
    began = tmp_path / "began"
    hang = (
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(began)!r}).write_text(str(os.getpid()))\n"
        "threading.Event().wait()\n"
    )
    shelf.add_backend("bad", ("from kvdock", f"{hang}from kvdock"))
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.01):
            if began.exists() and began.read_text():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    # Workers of pytest-xdist ignore this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    began_s = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            try_each(every(), 90.0)
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began_s < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)


def test_a_trial_says_what_loading_would_say(shelf: Shelf) -> None:
    shelf.add_backend("bad", ("from kvdock", "import nowhere\nfrom kvdock"))
    _, (wanted,) = load_all(every())
    assert list(try_each(every(), 60.0).values()) == [wanted]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("", set()),
        ("a", {"a"}),
        (" a , b,,", {"a", "b"}),
    ],
)
def test_the_allow_list_is_names_with_commas(
    value: str | None, names: set[str] | None
) -> None:
    environ = {} if value is None else {"KVDOCK_PLUGINS": value}
    assert discovery.selection(environ).allowed == names
