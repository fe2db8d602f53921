"""Record which engine restored which state from which backend, by running it.

Usage:

    python docs/record_compatibility.py transformers [BACKEND ...]
    python docs/record_compatibility.py sglang RESULTS.xml
    python docs/record_compatibility.py vllm RESULTS.xml

The first runs `examples/models` on each backend. The others read what pytest
wrote of the engine's own tests, `make test-vllm ARGS="--junitxml RESULTS.xml"`, since
an engine lives in an environment of its own. Either adds to compatibility.json, from
which `fill_compatibility.py` makes the page; nothing there is typed.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree as ET

import attrs
from generated import DOCS

RECORD = DOCS / "reference" / "compatibility.json"

WHOLE = "engine"
"""A model ran, ended, and a new process answered the same from what was stored."""
POOLS = "pools"
"""Bytes of the engine's own pools came back in a new attachment; no model ran."""
FAILED = "failed"

EVERY = ("file", "hf3fs", "mooncake", "nixl", "s3")

DEMO = {"mha": ("mha",), "mla": ("mla",), "swa": ("mha", "swa"), "mamba": ("mamba",)}
"""Model of the demo to the states that it has."""


@attrs.frozen
class Suite:
    """Tests of an engine whose results count.

    Args:
        tests: Their names, without parameters.
        states: Parameter to the states that it restores, by its first letters.
        proof: What a pass shows.
        backends: Backends that a parameter names; the first where none does.
    """

    tests: tuple[str, ...]
    states: dict[str, tuple[str, ...]]
    proof: str
    backends: tuple[str, ...] = ("file",)


SUITES = {
    "sglang": (
        Suite(
            (
                "test_the_pools_of_a_model_come_back_from_every_backend_and_can_be_cleared",
            ),
            {
                "sparse": ("mla", "indexer", "draft"),
                "hybrid": ("mha", "swa", "mamba", "draft"),
                "compressed": ("logical", "compressed"),
            },
            POOLS,
            EVERY,
        ),
        Suite(
            ("test_pages_of_every_family_come_back_byte_for_byte_after_a_restart",),
            {
                "mha": ("mha",),
                "asymmetric": ("mha",),
                "packed-draft": ("draft",),
                "k_only": ("k_only",),
                "mla": ("mla",),
                "indexer": ("indexer",),
                "mamba": ("mamba",),
                "swa": ("swa",),
                "draft-": ("draft",),
                "compressed": ("compressed",),
            },
            POOLS,
        ),
        Suite(
            ("test_a_restarted_engine_answers_from_the_store_as_a_warm_one",),
            {
                "llama": ("mha",),
                "latent": ("mla",),
                "window": ("mha", "swa"),
                "recurrent": ("mha", "mamba"),
            },
            WHOLE,
            EVERY,
        ),
    ),
    "vllm": (
        Suite(
            (
                "test_pages_are_restored_in_a_new_process",
                "test_more_families_are_restored_in_a_new_process",
                "test_pages_are_restored_from_every_backend_and_change_the_answer_if_altered",
            ),
            {
                "llama": ("mha",),
                "draft": ("mha", "draft"),
                "swa_full": ("mha", "swa"),
                "swa": ("swa",),
                "mla": ("mla",),
                "mamba2": ("mha", "mamba"),
                "gdn": ("mha", "mamba"),
            },
            WHOLE,
            EVERY,
        ),
    ),
}
"""Each word of a parameter is looked up by the longest name that it begins with."""

Result = tuple[str, str, str]
"""Backend, state, and what was shown."""


def from_demo(backend: str) -> Iterator[Result]:
    """Run the demo's models on a backend."""
    demo = str(DOCS.parent / "examples" / "models")
    done = subprocess.run(  # noqa: S603 - our own example
        [sys.executable, demo, "--size", "tiny", "--backend", backend, "--json"],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for one in found.get("models", ()):
        right = found["ok"] and one["tokens_identical"] and one["hit_tokens"] > 0
        drafts = [pool for pool in one["pools"] if pool.startswith("draft")]
        for state in (*DEMO[one["model"]], *(("draft",) if drafts else ())):
            yield backend, state, WHOLE if right else FAILED


def from_tests(engine: str, path: Path) -> Iterator[Result]:
    """Read the results of an engine's tests; those that were skipped do not count."""
    for case in ET.parse(path).iter("testcase"):  # noqa: S314 - written by our own pytest
        name, _, given = case.attrib["name"].partition("[")
        if case.find("skipped") is not None:
            continue
        passed = case.find("failure") is None and case.find("error") is None
        for suite in SUITES[engine]:
            if name in suite.tests:
                yield from _counted(suite, given.rstrip("]"), passed=passed)


def _counted(suite: Suite, given: str, *, passed: bool) -> Iterator[Result]:
    named = [one for one in suite.backends if re.search(rf"\b{one}\b", given)]
    # A family's name may have a hyphen, so the whole is looked up before its words.
    whole = _state_of(suite, given)
    words = [given] if whole else re.split(r"-(?=[a-z])", given)
    for one in sorted({_state_of(suite, word) for word in words} - {""}):
        for state in suite.states[one]:
            for backend in named or suite.backends[:1]:
                yield backend, state, suite.proof if passed else FAILED


def _state_of(suite: Suite, word: str) -> str:
    begins = [one for one in suite.states if word.startswith(one)]
    return max(begins, key=len, default="")


def merged(old: dict[str, dict[str, str]], results: Sequence[Result]) -> None:
    """Add results: one failure counts more than any pass, an engine more than pools."""
    order = (POOLS, WHOLE, FAILED)
    for backend, state, shown in results:
        mine = old.setdefault(backend, {})
        best = mine.get(state, POOLS)
        mine[state] = max(best, shown, key=order.index)


def main(engine: str, *arguments: str) -> None:
    """Run or read, and write the record of one engine."""
    if engine == "transformers":
        backends = arguments or EVERY
        results = [one for backend in backends for one in from_demo(backend)]
        version = metadata.version("transformers")
    else:
        results = [one for path in arguments for one in from_tests(engine, Path(path))]
        name = "TESTED = ("
        api = DOCS.parent / f"engines/{engine}/src/kvdock_{engine}/engine_api.py"
        version = api.read_text().partition(name)[2].partition(")")[0].split('"')[-2]
    if not results:
        raise SystemExit(f"no result of {engine} in {arguments}")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found: dict[str, dict[str, str]] = {}
    merged(found, results)
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    record[engine] = {"version": version, "date": today, "results": found}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
