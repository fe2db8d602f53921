"""A prompt and its models, as one process of a demo works on them."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from kvdock import Namespace
from kvdock_transformers.paged import PagedModel
from model_demo import models
from model_demo.families import WORKLOADS, Family, Scale, Workload
from model_demo.generation import Generation, generate, generate_with_draft
from model_demo.records import Job, PoolRecord, Served

Emit = Callable[[Mapping[str, object]], None]
"""Called with an event for the orchestrating process."""


@attrs.frozen(eq=False)
class Engine:
    """A prompt, its models, and how they work on it."""

    family: Family
    scale: Scale
    workload: Workload
    target: PagedModel
    draft: PagedModel | None

    @classmethod
    def make(cls, job: Job, family: Family, emit: Emit) -> "Engine":
        """Make the models of a family, for all processes, and load them."""
        emit({"event": "step", "step": "making the model"})
        models.save(models.build(family, job.scale), job.directory / "models" / family)
        return cls.load(job, family)

    @classmethod
    def load(cls, job: Job, family: Family) -> "Engine":
        """Load the models of a family, and warm them up."""
        workload = WORKLOADS[job.scale]
        prompt = models.prompt_token_ids(family, workload.prompt_tokens)
        target, draft = models.load(job.directory / "models" / family)
        shape = (prompt, workload.page_tokens, workload.chunk_tokens)
        engine = cls(
            family,
            job.scale,
            workload,
            PagedModel(target, *shape),
            None if draft is None else PagedModel(draft, *shape, draft=True),
        )
        for model in engine.models:
            model.warm_up()
        return engine

    @property
    def models(self) -> tuple[PagedModel, ...]:
        """The target, then the draft where there is one."""
        return (self.target, self.draft) if self.draft else (self.target,)

    def namespace(self, salt: str) -> Namespace:
        """Return what the bytes of this engine's pages depend on.

        Args:
            salt: Keeps the pages of a trial apart from all others.
        """
        recipe = f"seed {models.SEED}, {self.scale}, torch {torch.__version__}"
        return Namespace(
            model=f"kvdock-demo-{self.family}",
            revision=recipe,
            draft_model=f"kvdock-demo-{self.family}-draft" if self.draft else "",
            salt=salt,
        )

    def prefill(self) -> None:
        """Compute the full pages of the prompt, and copy them to host memory."""
        for model in self.models:
            model.prefill(
                self.workload.prefix_tokens, self.workload.chunk_tokens, keep=True
            )

    def rebuild(self, pages: int, draft_pages: int) -> None:
        """Replace the caches by what host memory holds of the prompt's first pages."""
        self.target.rebuild(pages)
        if self.draft:
            self.draft.rebuild(draft_pages)

    def generate(
        self, *, chunk_tokens: int = 0, new_tokens: int = 0, keep: bool = False
    ) -> Generation:
        """Compute what the caches lack of the prompt, then generate.

        The draft catches up only after the first token: nothing before that
        token needs it, with a store or without.
        """
        chunk_tokens = chunk_tokens or self.workload.chunk_tokens
        new_tokens = new_tokens or self.workload.new_tokens
        prefix = self.workload.prefix_tokens
        self.target.prefill(prefix, chunk_tokens, keep=keep)
        prompt, draft = self.target.prompt, self.draft
        if draft is None:
            return generate(self.target.running, prompt, new_tokens)
        return generate_with_draft(
            self.target.running,
            draft.running,
            prompt,
            new_tokens,
            self.workload.draft_tokens,
            before_draft=lambda: draft.prefill(prefix, chunk_tokens, keep=keep),
        )

    def served(
        self,
        job: Job,
        made: Generation,
        start_s: float,
        pools: Mapping[str, PoolRecord],
        **figures: Any,
    ) -> Served:
        """Write the logits down, and return the results of this process."""
        path = job.directory / "logits" / f"{self.family}-{job.role}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, made.logits.numpy())
        return Served(
            family=self.family,
            prompt_tokens=self.workload.prompt_tokens,
            page_tokens=self.workload.page_tokens,
            ttft_s=made.first_token_at_s - start_s,
            token_ids=made.token_ids,
            logits_path=str(path),
            proposed=made.proposed,
            accepted=made.accepted,
            pools=pools,
            **{"computed_tokens": self.workload.prompt_tokens, **figures},
        )


def flip_signs(model: PagedModel, pool: str) -> None:
    """Replace every number in a pool's host memory by its negative."""
    for view in model.hosts[pool].parts().values():
        view.neg_()
