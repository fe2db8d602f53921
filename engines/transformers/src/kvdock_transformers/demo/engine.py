"""A prompt and its models, as one process of a demo works on them."""

from pathlib import Path

import attrs
import torch

from kvdock import Namespace
from kvdock_transformers import models
from kvdock_transformers.families import WORKLOADS, Family, Scale, Workload
from kvdock_transformers.paged import PagedModel
from kvdock_transformers.speculation import Generation, generate, generate_with_draft


@attrs.frozen(eq=False)
class Engine:
    """A prompt, its models, and how they work on it."""

    family: Family
    scale: Scale
    workload: Workload
    target: PagedModel
    draft: PagedModel | None

    @classmethod
    def load(cls, directory: Path, scale: Scale, family: Family) -> "Engine":
        """Load the models of a family, and warm them up.

        Args:
            directory: Where `models.save` has written them.
            scale: Their size.
            family: Which.
        """
        workload = WORKLOADS[scale]
        prompt = models.prompt_token_ids(family, workload.prompt_tokens)
        target, draft = models.load(directory)
        shape = (prompt, workload.page_tokens, workload.chunk_tokens)
        engine = cls(
            family,
            scale,
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

    def generate(self, chunk_tokens: int, new_tokens: int, *, keep: bool) -> Generation:
        """Compute what the caches lack of the prompt, then generate.

        The draft catches up only after the first token: nothing before that
        token needs it, with a store or without.
        """
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
