"""What the command line of an engine lacks, so that its storage is kvdock.

An adapter offers a function `(command, settings) -> Launch` as an entry point of
`kvdock.commands` with the name `run.ENGINE`. It is called in a process without the
engine, before the engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from kvdock.plugin.hookspecs import Finding


@attrs.frozen(kw_only=True)
class Launch:
    """What is to be added to a command that starts an engine.

    Args:
        flags: Words to add to the command.
        variables: Variables of the environment to set.
        findings: What was found out about the engine, its plugins and the settings; the
            engine is not to be started where one is a problem.
    """

    flags: Sequence[str]
    variables: Mapping[str, str]
    findings: Sequence[Finding]
