"""The reference tower as a runner, in any precision. Needs the checkpoint that the bundle was built from."""

from __future__ import annotations

import torch

from turbovit.engines.bundle import Bundle, Engine, Manifest
from turbovit.engines.commands import build_command
from turbovit.engines.errors import CheckpointError
from turbovit.engines.families import family_from_name, load
from turbovit.engines.runner import Runner
from turbovit.export.checkpoint import open_checkpoint
from turbovit.export.precision import in_precision
from turbovit.export.tower import Tower, load_tower, source_from_checkpoint


class TorchRunner(Runner):
    """The tower, eager, with torch's scaled dot product attention; in float32 it is the reference."""

    runtime = "torch"

    def __init__(self, manifest: Manifest, engine: Engine, device: torch.device, tower: Tower):
        super().__init__(manifest, engine, device)
        self.tower = tower

    @classmethod
    def open(cls, bundle: Bundle, engine: Engine, device: torch.device) -> TorchRunner:
        """Load the tower from the checkpoint that the manifest names.

        Raises:
            CheckpointError: it is gone, or is no longer what the bundle was built from.
        """
        source = bundle.manifest.source
        tower_class: type[Tower] = load(family_from_name(bundle.manifest.family).tower)
        checkpoint = open_checkpoint(source.name, tower_class.is_checkpoint_vision)
        spec = tower_class.spec_from_config(checkpoint.config, tower_class.image_processor(checkpoint.folder))
        found = source_from_checkpoint(tower_class, spec, checkpoint)
        if (found.tensors_sha256, found.config) != (source.tensors_sha256, source.config):
            raise CheckpointError(
                f"the vision weights or settings in {source.name} are no longer those of {bundle.path}: sha256 of the "
                f"weights {found.tensors_sha256[:12]}..., expected {source.tensors_sha256[:12]}...; "
                f"build a bundle of them: {build_command(source.name)}"
            )
        tower = in_precision(load_tower(tower_class, spec, checkpoint), engine.precision, engine.fp32_layers)
        return cls(bundle.manifest, engine, device, tower.to(device))

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return None

    @property
    def description(self) -> str:
        precision = "" if self.engine.precision == "fp32" else f"{self.engine.precision} "
        return f"torch {torch.__version__} {precision}on {self.device}"

    def _infer(self, inputs: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        return self.tower.run(inputs)
