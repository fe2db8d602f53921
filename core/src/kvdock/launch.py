"""What adapters say about the command line of an engine, before the engine starts.

An adapter offers two functions as entry points of `kvdock.commands`:

- `run.ENGINE`, `(command, settings) -> Launch`: what the command lacks, so that its
  storage is kvdock. It is called in a process without the engine.
- `route.ENGINE`, `(command, settings) -> NamespacePlan`: whose pages the engine
  would find. It imports the engine, and loads no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from kvdock.namespace import Record
    from kvdock.plugin.hookspecs import Finding


def split_command(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the program, or the package that a Python runs, and its arguments.

    >>> split_command(["/usr/bin/python3", "-m", "vllm.entrypoints.cli", "serve", "m"])
    ('vllm', ['serve', 'm'])
    """
    words = list(command)
    if "-m" in words[:-1]:
        place = words.index("-m") + 1
        return words[place].partition(".")[0], words[place + 1 :]
    return Path(words[0]).name, words[1:]


@contextmanager
def parsing_by(engine: str) -> Iterator[None]:
    """Let an engine read its own command.

    Raises:
        KvdockError: If it rejects the command.
    """
    try:
        yield
    except KvdockError:
        raise
    except SystemExit as error:
        raise KvdockError(
            f"{engine} cannot read the command; what it said stands above",
            fix="Correct the command.",
        ) from error
    except Exception as error:
        raise KvdockError(
            f"{engine} rejects the command: {type(error).__name__}: {error}",
            fix="Run this where the engine would run: in its image, on such a host.",
        ) from error


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


@attrs.frozen(kw_only=True)
class NamespacePlan:
    """The namespaces that an engine would use, as far as its command says.

    Args:
        records: The record of each namespace without its pools, by what has its pages:
            "target", and "draft" where a draft model has a namespace of its own.
        loaded: Fields that are known, or are others, once the engine has loaded its
            model, by their names in `flatten_record` or the beginnings of those.
    """

    records: Mapping[str, Record]
    loaded: Sequence[str]
