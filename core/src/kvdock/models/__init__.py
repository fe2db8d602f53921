"""Model descriptions and the pools that a deployment gets from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.models.assembly import Assembly as Assembly
    from kvdock.models.assembly import Deployment as Deployment
    from kvdock.models.assembly import assemble as assemble
    from kvdock.models.description import DraftDescription as DraftDescription
    from kvdock.models.description import ModelDescription as ModelDescription
    from kvdock.models.description import load_model as load_model
    from kvdock.models.description import parse_description as parse_description
    from kvdock.models.description import shipped_models as shipped_models
    from kvdock.models.memory_budget import HostBudget as HostBudget

__getattr__, __dir__, __all__ = lazy_names(__name__)
