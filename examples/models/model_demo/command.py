"""The two demos with models: what they do, one process after or beside another.

Torch is imported in the worker processes alone.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from kvdock.errors import SettingsError
from model_demo.families import Family, Scale

if TYPE_CHECKING:
    from kvdock import Dock
    from model_demo.damage import Target
    from model_demo.records import Job, Role, Served
    from model_demo.report import Outcome, Screen
    from model_demo.verdicts import Result


@attrs.frozen
class Demo(ABC):
    """Models, and what is done with them.

    Args:
        families: Which models.
        scale: Their size.
    """

    families: tuple[Family, ...]
    scale: Scale

    @classmethod
    def of(cls, model: str, size: str) -> Self:
        """Return the demo of the models that words stand for; "" is the default.

        Raises:
            SettingsError: If there is no such model or size.
        """
        try:
            families = tuple(Family) if model in ("", "all") else (Family(model),)
            return cls(families, Scale(size or Scale.DEMO))
        except ValueError as error:
            models = ("all", *Family)
            unknown = size if model in ("", *models) else model
            raise SettingsError(
                f"the demo has no {unknown!r}",
                fix=f"Models: {', '.join(models)}; sizes: {', '.join(Scale)}.",
            ) from error

    def run(
        self,
        directory: Path,
        backend: str,
        reason: str,
        notice: str,
        settings: Mapping[str, object],
        screen: "Screen",
    ) -> "Outcome":
        """Run the demo, which takes tens of seconds.

        Args:
            directory: Where everything is kept; must exist.
            backend: The backend.
            reason: Why this one.
            notice: What was started for it; "" for nothing.
            settings: What was given for it.
            screen: Shows what happens, on this thread.

        Raises:
            TrialFailed: If a process ends without its results.
        """
        from model_demo.report import outcome, show_head
        from model_demo.trial import new_job

        show_head(screen, self.families, self.scale, backend, reason, notice)
        job = new_job(self.families, self.scale, backend, settings, directory)
        try:
            results = self.results(job, screen)
        finally:
            # Hundreds of megabytes that are made again by every trial.
            shutil.rmtree(job.directory / "models", ignore_errors=True)
        return outcome(results, backend, reason, notice)

    @abstractmethod
    def results(self, job: "Job", screen: "Screen") -> "list[Result]":
        """Run the processes, and judge what they did with each model."""


class StoringDemo(Demo):
    """Store the caches of models, restore them in new processes, damage some.

    One process prefills a long prompt, stores the pages of every pool and ends. The
    next restores them and must generate the very same; a third recomputes for
    comparison. Then stored pages are damaged, and the last must notice and repair.
    """

    def choose(self, dock: "Dock", wanted: str) -> tuple[str, str]:
        """Return the backend to use, and why this one."""
        from model_demo.backends import choose_lasting

        return choose_lasting(dock, wanted)

    def results(self, job: "Job", screen: "Screen") -> "list[Result]":
        """Run a process after another, and harm the store before the last."""
        from model_demo import records, report
        from model_demo.damage import damage_store
        from model_demo.trial import run_round
        from model_demo.verdicts import judge_stored

        show = report.show_events(screen)
        runs: dict[Role, dict[Family, Served]] = {}
        damages: dict[Family, tuple[Target, ...]] = {}
        for role in records.STORING:
            if role is records.Role.REPAIR:
                stored = runs[records.Role.OFFLOAD].items()
                damages = {one: damage_store(job, served) for one, served in stored}
                report.show_damage(screen, damages)
            runs |= run_round(job, [role], show)
            # As bulky as the models.
            shutil.rmtree(job.directory / "altered", ignore_errors=True)
        return [judge_stored(one, runs, damages[one]) for one in self.families]


class SendingDemo(Demo):
    """Send the caches of models from a prefill to a decode process."""

    def choose(self, dock: "Dock", wanted: str) -> tuple[str, str]:
        """Return the backend to use, and why this one."""
        from model_demo.backends import choose_sending

        return choose_sending(dock, wanted)

    def results(self, job: "Job", screen: "Screen") -> "list[Result]":
        """Run both processes beside each other."""
        from model_demo.records import SENDING
        from model_demo.report import show_events
        from model_demo.trial import run_round
        from model_demo.verdicts import judge_sent

        screen.say("\nOne process prefills and sends, another one decodes", "strong")
        runs = run_round(job, SENDING, show_events(screen))
        return [judge_sent(one, runs) for one in self.families]
