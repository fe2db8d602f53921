"""Run the contract on an installed backend and gather what to report.

Behind `kvdock check`. Importing this needs no pytest: the tests run in a
process of their own.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import KvdockError
from kvdock.manifest import API_VERSION
from kvdock.testing.running import Ended, Record, run_tests

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "KVDOCK_CHECKUP"
"""Tells the child process what to check."""


@attrs.frozen(kw_only=True)
class Checkup:
    """All that is to be told about one backend.

    Args:
        name: The backend.
        about: Facts that whoever reads the report needs: versions, settings.
        record: What became of the tests.
        groups: Test name to the title of its group.
    """

    name: str
    about: Mapping[str, str]
    record: Record
    groups: Mapping[str, str]

    @property
    def failed(self) -> tuple[Ended, ...]:
        """Tests that failed, or whose store could not be let go."""
        return tuple(one for one in self.record.ended if one.how == "failed")

    @property
    def passed(self) -> tuple[Ended, ...]:
        """Tests that passed."""
        return tuple(one for one in self.record.ended if one.how == "passed")

    @property
    def skipped(self) -> tuple[Ended, ...]:
        """Tests that the manifest, or what was given, left out."""
        return tuple(one for one in self.record.ended if one.how == "skipped")

    @property
    def ok(self) -> bool:
        """Whether the backend keeps what it declares."""
        record = self.record
        whole = not record.unfinished and not record.broken and bool(self.passed)
        return whole and not self.failed


def check(
    name: str,
    settings: Mapping[str, str],
    *,
    small: Mapping[str, str] | None = None,
    faults: bool = False,
    timeout_s: float = 1800.0,
) -> Checkup:
    """Run the contract on an installed backend.

    Args:
        name: The backend.
        settings: Its settings. A missing folder becomes a temporary one, and
            `{tmp}` in a value stands for a folder that is new for each test.
        small: Further settings that make a store small enough to fill.
        faults: Also drive the core over it with injected faults.
        timeout_s: When to give up on the whole run.

    Raises:
        KvdockError: If what the kit needs is not installed.
    """
    lacking = [word for word in ("pytest", "hypothesis") if not find_spec(word)]
    if lacking:
        raise KvdockError(
            f"the conformance kit needs {' and '.join(lacking)}",
            fix="Install it: pip install 'kvdock[testing]'.",
        )
    words = {"plugin": name, "settings": dict(settings), "small": small}
    targets = ["kvdock.testing.installed::TestContract"]
    if faults:
        targets.append("kvdock.testing.installed::TestFaults")
    record = run_tests(
        # An editable installation lies below a checkout's own conftest.
        ["--noconftest", "--pyargs", *targets],
        environ={VARIABLE: json.dumps(words)},
        timeout_s=timeout_s,
    )
    return Checkup(
        name=name,
        about=_about(name, settings, small),
        record=record,
        groups=_groups(),
    )


def _about(
    name: str, settings: Mapping[str, str], small: Mapping[str, str] | None
) -> dict[str, str]:
    given = [f"{key}={value}" for key, value in settings.items()]
    given += [f"small {key}={value}" for key, value in (small or {}).items()]
    return {
        "backend": name,
        "kvdock": f"{metadata.version('kvdock')}, API {API_VERSION}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "settings": " ".join(given) or "none",
    }


def _groups() -> dict[str, str]:
    # Imported late: this is where pytest comes in.
    from kvdock.testing import contract  # noqa: PLC0415 - needs pytest

    whole = contract.groups(contract.BackendContract)
    return whole | contract.groups(contract.FaultContract)
