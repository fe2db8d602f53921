from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tried import try_installed_once

from kvdock.errors import SettingsError
from kvdock_cli.commands.doctor import doctor

if TYPE_CHECKING:
    from tiny import Shelf

REGISTER = "def kvdock_register_pool(pool, region, config)"
BROKEN = {
    "import_error": ("from kvdock import", "import nowhere\nfrom kvdock import"),
    "wrong_api": ("api=API_VERSION", "api=99"),
    "misspelt_hook": (REGISTER, "def kvdock_regster_pool(pool, region, config)"),
    "invented_argument": (REGISTER, "def kvdock_register_pool(pool, regoin, config)"),
    "no_manifest": ("@hookimpl\ndef kvdock_manifest()", "def something()"),
    "raising_manifest": ("return Manifest(", "1 / 0\n    return Manifest("),
    "unmarked_hook": (f"@hookimpl\n{REGISTER}", REGISTER),
    "other_name": ('name="NAME"', 'name="another"'),
    "no_grade": ("KindSupport()", "KindSupport(draft=True)"),
    "no_scope": ("kinds=", "sharing='galaxy', kinds="),
}
STAGES = {
    "import_error": "import",
    "a_class": "import",
    "wrong_api": "manifest",
    "no_manifest": "manifest",
    "raising_manifest": "manifest",
    "other_name": "manifest",
    "no_grade": "manifest",
    "no_scope": "manifest",
    "misspelt_hook": "validate",
    "invented_argument": "validate",
    "unmarked_hook": "validate",
    "twice": "discover",
}
HOOK = "@hookimpl\ndef kvdock_batch_io"
PROBE = """
@hookimpl
def kvdock_probe(config):
    BODY


@hookimpl
def kvdock_batch_io"""
SETTINGS = (
    "import attrs\n"
    "from kvdock.config import option\n"
    "@attrs.frozen\n"
    "class Settings:\n"
    "    root: str = option(help='Where.')\n"
    "from kvdock import"
)


Ask = Callable[..., tuple[dict[str, Any], int]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return the command as it runs in this process: object and exit code."""
    try_installed_once(monkeypatch)

    def run(*name: str, **options: Any) -> tuple[dict[str, Any], int]:
        code = doctor(*name, json=True, **{"no_self_test": True, **options})
        return json.loads(capsys.readouterr().out), code

    return run


def findings(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the findings of one section."""
    (found,) = [one for one in data["sections"] if one["name"] == name]
    return list(found["findings"])


def probing(shelf: Shelf, name: str, body: str, *edits: tuple[str, str]) -> None:
    shelf.add_backend(name, (HOOK, PROBE.replace("BODY", body)), *edits)


def test_each_way_of_being_broken_has_a_problem_of_its_own(shelf: Shelf) -> None:
    for name, edit in BROKEN.items():
        shelf.add_backend(name, edit)
    shelf.add("a_class", "class Plugin: pass", attribute="Plugin")
    shelf.add("twice", "")
    shelf.add("twice", "", distribution="kvdock-rival")
    probing(shelf, "good", "return ()")
    done = shelf.kvdock("doctor", "--json")
    assert done.stderr == ""
    data = json.loads(done.stdout)
    assert done.returncode == 1
    stages = {problem["name"]: problem["stage"] for problem in data["problems"]}
    assert stages == STAGES
    assert len(data["problems"]) == len(STAGES) + 1
    for problem in data["problems"]:
        assert problem["version"] == "1.2.3"
        assert problem["distribution"].startswith("kvdock-")
        assert problem["entry_point"].startswith("kvdock_")
        assert problem["cause"]
        assert problem["fix"]
    assert findings(data, "good") == [
        {"state": "ok", "what": "nothing to complain of", "hint": ""}
    ]


def test_the_text_of_a_problem_says_whose_it_is_and_what_to_do(shelf: Shelf) -> None:
    shelf.add("bad", "import nowhere")
    done = shelf.kvdock("doctor", "bad")
    assert done.returncode == 1
    assert done.stdout == (
        "backend bad: broken\n"
        "  distribution  kvdock-bad 1.2.3\n"
        "  entry point   kvdock_bad\n"
        "  stage         import\n"
        "  cause         ModuleNotFoundError: No module named 'nowhere'\n"
        "  fix           Reinstall kvdock-bad, or install what it needs.\n"
        "\n"
        "1 problem found\n"
    )


def test_a_broken_command_is_a_problem_as_well(shelf: Shelf, ask: Ask) -> None:
    shelf.add("greet", "import nowhere", group="kvdock.commands", attribute="greet")
    data, code = ask("greet")
    assert (code, data["problems"][0]["group"]) == (1, "kvdock.commands")


@pytest.mark.slow
def test_a_broken_observer_is_a_problem_as_well(shelf: Shelf, ask: Ask) -> None:
    shelf.add("mine", "import nowhere", group="kvdock.observers", attribute="it")
    shelf.add("other", "it = 3", group="kvdock.observers", attribute="it")
    data, code = ask()
    mine, other = (one for one in data["problems"] if one["name"] in ("mine", "other"))
    assert (code, mine["stage"], other["stage"]) == (1, "import", "manifest")
    assert mine["group"] == "kvdock.observers"
    data, code = ask("mine")
    assert (code, len(data["problems"])) == (1, 1)


OBSERVER = """
import attrs
from kvdock import Observer
from kvdock.config import option

@attrs.frozen
class Settings:
    rate: float = option(1.0, help="How often.")

observer = Observer(name="mine", summary="s", settings=Settings, build=lambda _: 0)
"""


@pytest.mark.slow
def test_the_settings_of_an_observer_are_looked_at(
    ask: Ask, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add("mine", OBSERVER, group="kvdock.observers", attribute="observer")
    data, code = ask("mine", set_=["rate=0.5"])
    assert (data["sections"][0]["findings"][0]["state"], code) == ("ok", 0)
    monkeypatch.setenv("KVDOCK_OBSERVERS__MINE__RATE", "often")
    data, code = ask()
    (found,) = findings(data, "mine")
    assert (found["state"], code) == ("problem", 1)
    assert "rate: 'often' is not a number" in found["what"]


@pytest.mark.parametrize(
    ("body", "state", "what", "hint"),
    [
        ("return [Finding(True, 'up', 'unseen')]", "ok", "up", ""),
        ("return [Finding(False, 'down', 'Up!')]", "problem", "down", "Up!"),
        ("yield Finding(True, 'up'); 1 / 0", "problem",
         "ZeroDivisionError: division by zero", ""),
        ("import time; time.sleep(60)", "problem", "no answer within 0.5 s",
         "Look for what it waits for, or raise --timeout."),
    ],
    ids=["ok", "problem", "raises", "hangs"],
)  # fmt: skip
def test_what_a_probe_finds_is_told(
    shelf: Shelf, ask: Ask, body: str, state: str, what: str, hint: str
) -> None:
    probing(shelf, "good", body, ("from kvdock import", "from kvdock import Finding, "))
    data, code = ask("good", timeout=0.5)
    assert data["sections"][0]["findings"] == [
        {"state": state, "what": what, "hint": hint}
    ]
    assert code == (0 if state == "ok" else 1)


def needing_settings(shelf: Shelf) -> None:
    probing(
        shelf,
        "good",
        "return [Finding(True, config.settings.root)]",
        ("from kvdock import", SETTINGS),
        ("from kvdock import A", "from kvdock import Finding, A"),
        ('summary="a backend"', 'summary="a backend", settings=Settings'),
    )


def test_a_probe_gets_the_settings_that_are_given(shelf: Shelf, ask: Ask) -> None:
    needing_settings(shelf)
    data, code = ask("good", set_=["root=/here=there"])
    assert (data["sections"][0]["findings"][0]["what"], code) == ("/here=there", 0)


@pytest.mark.parametrize("name", [("good",), pytest.param((), marks=pytest.mark.slow)])
def test_a_probe_gets_what_the_file_and_the_environment_say(
    shelf: Shelf,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: tuple[str, ...],
) -> None:
    needing_settings(shelf)

    def found() -> tuple[str, str]:
        data, _ = ask(*name)
        (one,) = findings(data, "good")
        return one["state"], one["what"]

    file = tmp_path / "kvdock.toml"
    file.write_text('[backends.good]\nroot = "/of/the/file"\n')
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    assert found() == ("ok", "/of/the/file")
    monkeypatch.setenv("KVDOCK_BACKENDS__GOOD__ROOT", "/of/the/environment")
    assert found() == ("ok", "/of/the/environment")
    data, _ = ask("good", set_=["root=/given"])
    assert data["sections"][0]["findings"][0]["what"] == "/given"


@pytest.mark.slow
def test_settings_that_are_configured_and_wrong_are_a_problem(
    shelf: Shelf, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    needing_settings(shelf)
    monkeypatch.setenv("KVDOCK_BACKENDS__GOOD__ROTO", "/x")
    data, code = ask()
    (found,) = findings(data, "good")
    assert (found["state"], code) == ("problem", 1)
    assert "unknown setting 'roto'" in found["what"]


def test_without_its_settings_a_backend_is_skipped_until_it_is_named(
    shelf: Shelf,
    ask: Ask,
) -> None:
    needing_settings(shelf)
    data, _ = ask()
    assert findings(data, "good") == [
        {
            "state": "skipped",
            "what": "backend 'good': setting 'root' is missing",
            "hint": "Write `kvdock doctor good --set KEY=VALUE`; `kvdock list good` "
            "lists its settings.",
        }
    ]
    with pytest.raises(SettingsError, match="setting 'root' is missing"):
        ask("good")


def test_a_backend_without_a_probe_is_skipped(shelf: Shelf, ask: Ask) -> None:
    shelf.add_backend("good")
    data, code = ask("good")
    assert data["sections"][0]["findings"][0]["state"] == "skipped"
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("god",), "there is nothing called 'god' to examine. Did you mean 'good'?"),
        (("good", "--set", "x"), "--set 'x' is not KEY=VALUE."),
        (("good", "--set", "x=1", "--set", "x=2"), "--set x is given twice"),
        (("good", "--set", "x=1"), "backend 'good': unknown setting 'x'. "),
        (("--set", "x=1"), "settings are given, but no backend to give them to. "),
    ],
    ids=["name", "no-value", "twice", "unknown", "nobody"],
)
def test_a_wrong_question_is_a_usage_error(
    shelf: Shelf, arguments: tuple[str, ...], message: str
) -> None:
    shelf.add_backend("good")
    done = shelf.kvdock("doctor", *arguments)
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith(f"kvdock: {message}")


DOCTOR = """
from kvdock import Finding
def examine(settings):
    yield Finding(ok=settings != {"fail": "yes"}, what=f"given {dict(settings)}")
"""


@pytest.mark.slow
def test_another_distribution_adds_a_section(shelf: Shelf, ask: Ask) -> None:
    shelf.add("engine", DOCTOR, group="kvdock.doctors", attribute="examine")
    data, _ = ask()
    section = next(one for one in data["sections"] if one["name"] == "engine")
    states = [finding["state"] for finding in section["findings"]]
    assert (states, section["group"]) == (["ok"], "kvdock.doctors")
    data, code = ask("engine", set_=["fail=yes"])
    assert code == 1
    assert data["sections"][0]["findings"][0]["what"] == "given {'fail': 'yes'}"


def test_settings_of_a_section_are_not_those_of_an_instance(
    shelf: Shelf, ask: Ask
) -> None:
    shelf.add("engine", DOCTOR, group="kvdock.doctors", attribute="examine")
    given = {"plugin": "file", "host_memory": "1 GiB"}
    data, code = ask("engine", set_=[f"{key}={value}" for key, value in given.items()])
    assert code == 0
    (section,) = data["sections"]
    assert section["findings"][0]["what"] == f"given {given}"


def test_a_section_may_bear_the_name_of_a_backend(shelf: Shelf, ask: Ask) -> None:
    shelf.add_backend("good")
    shelf.add(
        "good",
        DOCTOR,
        group="kvdock.doctors",
        attribute="examine",
        distribution="kvdock-good-doctor",
    )
    data, _ = ask("good")
    groups = [section["group"] for section in data["sections"]]
    assert groups == ["kvdock.backends", "kvdock.doctors"]


@pytest.mark.slow
def test_a_broken_section_is_a_problem_and_stops_no_other(
    shelf: Shelf, ask: Ask
) -> None:
    shelf.add("engine", "import nowhere", group="kvdock.doctors", attribute="examine")
    shelf.add("other", "examine = 3", group="kvdock.doctors", attribute="examine")
    data, code = ask()
    assert code == 1
    assert [one["name"] for one in data["problems"]] == ["engine"]
    assert (
        findings(data, "other")[0]["what"] == "TypeError: 'int' object is not callable"
    )


@pytest.mark.parametrize(
    ("tiers", "wrong"),
    [
        ("good, far", {}),
        ("good, fra", {"fra": "tiers names it, and no backend 'fra' is installed"}),
        ("good, bad", {"bad": "its plugin 'god' is not installed"}),
    ],
)
def test_tiers_are_examined_and_name_what_is_there(
    shelf: Shelf,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    tiers: str,
    wrong: dict[str, str],
) -> None:
    probing(shelf, "good", "return ()")
    monkeypatch.setenv("KVDOCK_PLUGINS", "good")
    monkeypatch.setenv("KVDOCK_TIERS", tiers)
    monkeypatch.setenv("KVDOCK_BACKENDS__FAR__PLUGIN", "good")
    if "bad" in tiers:
        monkeypatch.setenv("KVDOCK_BACKENDS__BAD__PLUGIN", "god")
    data, _ = ask()
    found = {one["name"]: one["cause"] for one in data["problems"]}
    assert found == wrong
    named = [section["name"] for section in data["sections"]]
    assert named[:2] == ["good", "far"]


def test_what_opens_stores_is_tried_as_well(shelf: Shelf, ask: Ask) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    shelf.add("far", crash, group="kvdock.stores", attribute="it")
    data, code = ask("far")
    (problem,) = data["problems"]
    assert (code, problem["group"]) == (1, "kvdock.stores")
    assert "SIGSEGV" in problem["cause"]


@pytest.mark.slow
def test_nothing_is_tried_but_what_is_named(
    shelf: Shelf, ask: Ask, tmp_path: Path
) -> None:
    touch = f"import pathlib; pathlib.Path({str(tmp_path / 'tried')!r}).touch()\n"
    probing(shelf, "good", "return ()")
    probing(shelf, "other", "return ()", ("from kvdock", f"{touch}from kvdock"))
    shelf.add("more", f"{touch}raise OSError", group="kvdock.stores", attribute="it")
    shelf.add(
        "engine",
        "def examine(settings):\n    return ()\n",
        group="kvdock.doctors",
        attribute="examine",
    )
    for name in ("good", "engine"):
        data, code = ask(name)
        assert (code, len(data["sections"])) == (0, 1)
    assert not (tmp_path / "tried").exists()
    ask()
    assert (tmp_path / "tried").exists()


def test_what_is_not_allowed_is_not_examined(
    shelf: Shelf, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing(shelf, "good", "1 / 0")
    monkeypatch.setenv("KVDOCK_PLUGINS", "")
    data, _ = ask()
    assert "good" in data["hidden"]
    assert "good" not in {section["name"] for section in data["sections"]}


def test_a_backend_in_order_is_tried_out_with_a_page_of_each_kind(
    shelf: Shelf, ask: Ask, tmp_path: Path
) -> None:
    del shelf
    given = [f"root={tmp_path / 'root'}", "free_space=0"]
    data, code = ask("file", set_=given, no_self_test=False)
    told = [finding["what"] for finding in data["sections"][0]["findings"]]
    assert code == 0
    assert "pool mha: a page was read back by file" in told
    assert "pool mamba: a page was dropped by file" in told


def test_a_self_test_that_passes_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (f"root={tmp_path / 'far' / 'root'}", "free_space=0")
    assert doctor("file", set_=given) == 0
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "self test:" in line
    ]
    assert len(lines) == 1
    assert "was stored, found, read back, compared and dropped" in lines[0]
    assert not list(tmp_path.iterdir())
    doctor("file", set_=given, verbose=True)
    assert "pool mha: a page was found by file" in capsys.readouterr().out
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    assert doctor("file", set_=(f"root={root}", "free_space=0")) == 0
    assert not list(root.iterdir())


def test_a_warning_is_shown_with_its_hint_and_is_no_failure(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def examine(settings):\n    from kvdock import Finding\n"
    source += "    yield Finding(ok=True, what='slow', hint='Wait.', warning=True)\n"
    shelf.add("engine", source, group="kvdock.doctors", attribute="examine")
    assert doctor("engine") == 0
    shown = capsys.readouterr().out
    assert "  warning  slow\n           Wait.\n" in shown
    assert shown.endswith("no problem, 1 warning found\n")


def test_quotas_that_a_backend_does_not_keep_are_worth_a_warning(
    shelf: Shelf, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[tenants.a]\nsalt = "a"\nquota = "1 GB"\n')
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    keeps = ("api=", "tenant_quotas='native', api=")
    for name, edits in {"forgets": (), "keeps": (keeps,)}.items():
        probing(shelf, name, "return ()", *edits)
        data, code = ask(name)
        shown = [one["what"] for one in findings(data, name) if one["state"] != "ok"]
        assert code == 0
        assert shown == ([] if edits else ["tenants have quotas, and it keeps none"])


def test_a_backend_that_is_installed_and_not_configured_is_no_problem(
    shelf: Shelf, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDOCK_PLUGINS", "good")
    probing(
        shelf,
        "good",
        "return [Finding(False, 'no root', 'Give one.')]",
        ("from kvdock import", SETTINGS.replace("option(help", "option('', help")),
        ("from kvdock import A", "from kvdock import Finding, A"),
        ('summary="a backend"', 'summary="a backend", settings=Settings'),
    )
    data, _ = ask()
    (found,) = findings(data, "good")
    assert (found["state"], found["what"]) == ("skipped", "not configured: no root")
    monkeypatch.setenv("KVDOCK_BACKENDS__GOOD__ROOT", "/x")
    data, _ = ask()
    assert findings(data, "good")[0]["state"] == "problem"


def test_a_backend_that_loses_its_page_is_a_problem(shelf: Shelf, ask: Ask) -> None:
    shelf.add_backend("good")  # its batches answer nothing at all
    data, code = ask("good", no_self_test=False)
    last = data["sections"][0]["findings"][-1]
    assert code == 1
    assert (last["state"], last["what"]) == (
        "problem",
        "pool mha: a page was not stored by good",
    )


@pytest.mark.slow
def test_a_backend_without_a_layout_is_examined_all_the_same(shelf: Shelf) -> None:
    shelf.add_backend("flat", ("KindSupport()", "KindSupport(layouts=())"))
    done = shelf.kvdock("doctor", "flat", "--json")
    (section,) = json.loads(done.stdout)["sections"]
    assert "no answer" not in str(section)
    assert "Traceback" not in done.stderr


def test_what_fails_in_a_trial_is_a_finding(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("kvdock.self_test._move_pages", fails)
    given = (f"root={tmp_path / 'x'}", "free_space=0")
    data, code = ask("file", set_=given, no_self_test=False)
    assert code == 1
    what = data["sections"][0]["findings"][-1]["what"]
    assert what == "RuntimeError: out of luck"


@pytest.mark.parametrize("shared", ["AWS_REGION", "AWS_CA_BUNDLE"])
def test_a_variable_that_many_programs_share_configures_no_backend(
    shelf: Shelf, ask: Ask, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    settings = SETTINGS.replace("import option", "import Alias, option").replace(
        "option(help='Where.')",
        f"option('', help='Where.', alias=Alias(env={shared!r}))",
    )
    body = "return [Finding(ok=False, what='no root is configured')]"
    probing(
        shelf, "good", body,
        ("from kvdock import", settings + " Finding,"),
        ('summary="a backend"', 'summary="a backend", settings=Settings'),
    )  # fmt: skip
    monkeypatch.setenv("KVDOCK_PLUGINS", "good")
    monkeypatch.setenv(shared, "x")
    data, code = ask()
    assert code == 0, data
    (finding,) = data["sections"][0]["findings"]
    assert finding["state"] == "skipped"


def test_an_observer_that_an_engine_would_not_find_is_a_problem(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDOCK_CORE__OBSERVERS", "metric")
    monkeypatch.setenv("KVDOCK_PLUGINS", "")
    data, code = ask()
    assert code == 1
    (problem,) = data["problems"]
    assert "no observer 'metric' is installed" in problem["cause"]
    assert problem["fix"] == "Did you mean 'metrics'?"
