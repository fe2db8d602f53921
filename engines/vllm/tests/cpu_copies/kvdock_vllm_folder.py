"""A trainer in a folder, for tests: vLLM's own transfers of weights are for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import base
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class Nothing(base.WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """There is nothing to connect."""


@dataclass
class Part(base.WeightTransferUpdateInfo):  # type: ignore[misc]  # same
    """The first layer of a checkpoint, or everything else."""

    folder: str
    first: bool


class FromFolder(base.WeightTransferEngine[Nothing, Part]):  # type: ignore[misc]  # same
    """Loads tensors as a trainer's are loaded, from files."""

    init_info_cls = Nothing
    update_info_cls = Part

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """There is nothing to connect."""

    def start_weight_update(self) -> None:
        """Weights are loaded in place."""

    def finish_weight_update(self) -> None:
        """All of them are there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part; a CPU is not waited for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Part) -> None:
        """Load a part, so that a half of an update leaves weights of two kinds."""
        found = load_file(Path(update_info.folder) / "model.safetensors")
        initialize_layerwise_reload(self.model)
        self.model.load_weights(
            (name, weights)
            for name, weights in found.items()
            if (".layers.0." in name) == update_info.first
        )
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is nothing to end."""
