"""Find and build what is not a backend: observers and wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import attrs

from kvdock.config.schema import NoSettings, structure
from kvdock.errors import KvdockError, PluginError, did_you_mean
from kvdock.plugin.discovery import (
    BrokenPlugin,
    Candidate,
    LoadStage,
    PluginProblem,
    import_entry_point,
)
from kvdock.plugin.loading import load_each


@attrs.frozen(kw_only=True)
class Extension:
    """A record that an entry point names; a subclass for each group of them.

    Args:
        summary: What it does, in one line.
        settings: The attrs class of its settings; it has none by default.
        build: Makes the object from such settings.
        needs: What to install for it, or "".
    """

    name: str
    summary: str
    settings: type = NoSettings
    build: Callable[[Any], Any]
    needs: str = ""

    @classmethod
    def load(
        cls, candidates: Sequence[Candidate]
    ) -> tuple[dict[str, Self], tuple[PluginProblem, ...]]:
        """Load entry points one by one; a broken one never stops the others."""
        return load_each(candidates, cls._loaded)

    @classmethod
    def find(cls, name: str, candidates: Sequence[Candidate]) -> Self:
        """Load one by name.

        Raises:
            PluginError: If none of that name is installed, or it cannot be used.
        """
        found, problems = cls.load([one for one in candidates if one.name == name])
        if problems:
            raise BrokenPlugin(problems[0])
        if name not in found:
            known = {one.name for one in candidates}
            raise PluginError(
                f"no {cls.__name__.lower()} {name!r} is installed",
                fix=did_you_mean(name, known)
                or f"Installed: {', '.join(sorted(known)) or 'none'}.",
            )
        return found[name]

    @classmethod
    def _loaded(cls, candidate: Candidate) -> Self:
        found = import_entry_point(candidate)
        if not isinstance(found, cls) or found.name != candidate.name:
            named = f"kvdock.plugin.{cls.__name__} of that name"
            raise BrokenPlugin(
                candidate.problem(
                    LoadStage.MANIFEST,
                    f"it is {found!r}, and not a {named}",
                    f"Point its entry point at a {named}.",
                )
            )
        return found

    def built(self, given: Mapping[str, object], what: str) -> Any:  # noqa: ANN401 - what `build` makes
        """Build it with settings.

        Raises:
            PluginError: If it cannot be used.
            SettingsError: If the settings are wrong.
        """
        options: object = structure(self.settings, given, where=what)
        try:
            return self.build(options)
        except ImportError as error:
            fix = f"pip install '{self.needs}'" if self.needs else ""
            raise PluginError(f"{what} cannot be used: {error}", fix=fix) from error
        except KvdockError:
            raise  # it says itself what is wrong, and what to do
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise PluginError(f"{what} cannot be used: {why}") from error
