"""Run the contract on an installed backend and gather what to report.

Behind `kvdock check`. Importing this needs no pytest: the tests run in a
process of their own.
"""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.config.convert import as_path
from kvdock.config.schema import hide_secrets
from kvdock.errors import KvdockError
from kvdock.plugin.evidence import digest_of, package_of
from kvdock.plugin.manifest import API_VERSION
from kvdock.testing.claims import FAULTS, Claim, Word, claims_of, judged
from kvdock.testing.loading import load_backend
from kvdock.testing.routes import family_routes
from kvdock.testing.scale import Scale
from kvdock.testing.subprocess import (
    TEST_LIMIT_S,
    FinishedRun,
    Progress,
    Record,
    run_tests,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kvdock.plugin.backend import Backend
    from kvdock.routing.plan import Route

VARIABLE = "_KVDOCK_CHECKUP"
"""The variable that names the check to the child process."""

SUITES = "kvdock.testing.installed"
"""The module that has the suites."""


@attrs.frozen(kw_only=True)
class CheckReport:
    """The result of a check of one backend.

    Args:
        about: Facts that a reader needs: versions, settings.
        groups: Test name to the title of its group.
        claims: What its manifest declares.
        proofs: Test name to the capability that the test tries.
        declined: The tests, each with its case, that the manifest leaves out.
        only: The word that chose the tests; "" for all of them.
        quick: Whether the slow ones were left out.
        evidence: What the report is of: the number of the contract, and a digest of the
            plugin's package, "" where it has none.
        routes: Where sample pools of each family would go.
    """

    name: str
    about: Mapping[str, str]
    record: Record
    groups: Mapping[str, str]
    claims: tuple[Claim, ...] = ()
    proofs: Mapping[str, str] = attrs.field(factory=dict)
    declined: frozenset[tuple[str, str]] = frozenset()
    only: str = ""
    quick: bool = False
    evidence: Mapping[str, object] = attrs.field(factory=dict)
    routes: tuple[Route, ...] = ()

    @property
    def failed(self) -> tuple[FinishedRun, ...]:
        """Tests that failed, also while their store was released."""
        return tuple(one for one in self.record.ended if one.how == "failed")

    @property
    def passed(self) -> tuple[FinishedRun, ...]:
        """Tests that passed."""
        return tuple(one for one in self.record.ended if one.how == "passed")

    @property
    def skipped(self) -> tuple[FinishedRun, ...]:
        """Tests that the manifest, or what was given, left out."""
        return tuple(one for one in self.record.ended if one.how == "skipped")

    @property
    def whole(self) -> bool:
        """Return whether every test was run."""
        record = self.record
        return not record.left and not record.broken and bool(self.passed)

    @property
    def words(self) -> tuple[Word, ...]:
        """What became of each word of the manifest, and of each fault."""
        # After a run that broke off, or of a few, what is missing says nothing.
        if not self.whole or self.only or self.quick:
            return ()
        return judged(self.claims, self.proofs, self.record.ended, self.declined)

    @property
    def unproven(self) -> tuple[Word, ...]:
        """Capabilities that are declared and that no test could try."""
        return tuple(word for word in self.words if word.lacking)

    @property
    def ok(self) -> bool:
        """Return whether the backend has proven all that it declares, or was asked."""
        return self.whole and not self.failed and not self.unproven


def check(  # noqa: PLR0913 - what a check depends on
    name: str,
    settings: Mapping[str, object],
    *,
    small: Mapping[str, object] | None = None,
    secrets: Collection[str] = (),
    tiers: Mapping[str, Mapping[str, object]] | None = None,
    faults: bool = False,
    scale: float = 1.0,
    large_objects: bool = True,
    stays_s: float = 3.0,
    only: str = "",
    quick: bool = False,
    timeout_s: float = 1800.0,
    watch: Callable[[Progress], None] | None = None,
) -> CheckReport:
    """Run the contract on an installed backend, or on a chain of tiers.

    Args:
        name: The backend; of a chain the plugin of the nearest tier.
        settings: Its settings. A missing folder becomes a temporary one, and
            `{tmp}` in a value stands for a folder that is new for each test.
        small: Further settings that make a store small enough to fill.
        secrets: Values that the report leaves out.
        tiers: Tier name, near first, to its settings, which replace `settings`; None
            for a backend alone.
        faults: Also drive the core over it with injected faults.
        scale: How many times slower than a local store it is; see `Scale`.
        large_objects: Whether to move objects of 8 MiB and more.
        stays_s: How long to leave pages alone that nothing should evict.
        only: A word in the names of the tests to run, in pytest's spelling; "" for
            all tests.
        quick: Leave out the slow ones.
        timeout_s: When to give up on the whole run.
        watch: Called now and then with how far the run has come.

    Raises:
        KvdockError: If what the kit needs is not installed.
    """
    lacking = [word for word in ("pytest", "hypothesis") if not find_spec(word)]
    if lacking:
        raise KvdockError(
            f"the conformance kit needs {' and '.join(lacking)}",
            fix="Install it: pip install 'kvdock[testing]'.",
        )
    if tiers:
        settings = {
            f"{tier}.{key}": value
            for tier, own in tiers.items()
            for key, value in own.items()
        }
    words = spelled_words(
        name,
        settings,
        small=small,
        tiers=tiers,
        scale=scale,
        large_objects=large_objects,
        stays_s=stays_s,
    )
    suite = "TestTiers" if tiers else "TestContract"
    targets = [f"{SUITES}::{suite}"]
    if faults:
        targets.append(f"{SUITES}::TestFaults")
    chosen = [f"({only})"] if only else []
    chosen += [f"not {name}" for name in _slow()] if quick else []
    record = run_tests(
        # An editable installation lies below a checkout's own conftest.
        ["--noconftest", "-k", " and ".join(chosen), "--pyargs", *targets],
        environ={VARIABLE: words},
        timeout_s=timeout_s,
        test_limit_s=Scale(scale).seconds(TEST_LIMIT_S),
        watch=watch,
    )
    backend = load_backend(name)
    package = package_of(backend.plugin.candidate.value)
    return CheckReport(
        name=f"the chain {', '.join(tiers)}" if tiers else name,
        about=_about(name, settings, small or {}, secrets),
        record=record,
        groups=_groups(),
        claims=() if tiers else _claims(backend),
        proofs=_proofs(),
        declined=frozenset() if tiers else _declined(backend),
        only=only,
        quick=quick,
        evidence={
            "contract": API_VERSION,
            "digest": digest_of(package) if package else "",
        },
        routes=() if tiers else family_routes(backend),
    )


def spelled_words(
    name: str,
    settings: Mapping[str, object],
    *,
    small: Mapping[str, object] | None = None,
    tiers: Mapping[str, Mapping[str, object]] | None = None,
    scale: float = 1.0,
    large_objects: bool = True,
    stays_s: float = 3.0,
) -> str:
    """Spell what to check for the process that runs the tests; see `check`."""
    words = {
        "plugin": name,
        "settings": dict(settings),
        "small": small,
        "tiers": tiers or {},
        "scale": Scale(scale).factor,
        "large_objects": large_objects,
        "stays_s": stays_s,
    }
    return json.dumps(words, default=str)


def resolve_settings(
    cls: type | None, given: Mapping[str, object], folder: Path
) -> dict[str, object]:
    """Fill in folders: those that are missing, and `{tmp}` where it is said."""
    found = {
        key: value.replace("{tmp}", str(folder)) if isinstance(value, str) else value
        for key, value in given.items()
    }
    for field in attrs.fields(cls) if cls else ():
        if field.default is attrs.NOTHING and _is_path(field):
            found.setdefault(field.name, str(folder / field.name))
    return found


def with_scratch_paths(
    cls: type | None, given: Mapping[str, object]
) -> dict[str, object]:
    """Spell paths whole: the tests run in a folder of their own."""
    found = dict(given)
    for field in attrs.fields(cls) if cls else ():
        value = found.get(field.name)
        if isinstance(value, str) and "{tmp}" not in value and _is_path(field):
            found[field.name] = str(as_path(value).absolute())
    return found


def _is_path(field: attrs.Attribute[object]) -> bool:
    return str(getattr(field.type, "__name__", field.type)).endswith("Path")


def _about(
    name: str,
    settings: Mapping[str, object],
    small: Mapping[str, object],
    secrets: Collection[str],
) -> dict[str, str]:
    named = [*settings.items(), *((f"small {key}", small[key]) for key in small)]
    given = [f"{key}={hide_secrets(str(value), secrets)}" for key, value in named]
    return {
        "backend": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "kvdock": f"{metadata.version('kvdock')}, API {API_VERSION}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "settings": " ".join(given) or "none",
    }


def _claims(backend: Backend) -> tuple[Claim, ...]:
    """Return what is declared, and the faults of the store."""
    return (*claims_of(backend.manifest), *(Claim(fault, "") for fault in FAULTS))


def _groups() -> dict[str, str]:
    # Imported late: this is where pytest comes in.
    from kvdock.testing import contract  # noqa: PLC0415 - needs pytest

    whole = contract.groups(contract.BackendContract)
    whole |= contract.groups(contract.TierContract)
    return whole | contract.groups(contract.FaultContract)


def _slow() -> list[str]:
    from kvdock.testing import contract  # noqa: PLC0415 - needs pytest

    suites = (contract.BackendContract, contract.TierContract, contract.FaultContract)
    return [name for suite in suites for name in contract.slow_tests(suite)]


def _declined(backend: Backend) -> frozenset[tuple[str, str]]:
    from kvdock.testing import cases, contract  # noqa: PLC0415 - needs pytest

    chosen = cases.selection(contract.BackendContract, backend.manifest)
    return frozenset(
        (name, case.id) for name, each in chosen.items() for case in each if case.skip
    )


def _proofs() -> dict[str, str]:
    from kvdock.testing import contract  # noqa: PLC0415 - needs pytest

    return contract.proofs(contract.BackendContract)
