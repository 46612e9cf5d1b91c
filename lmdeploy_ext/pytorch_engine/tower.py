"""What stands in LMDeploy's models where their vision halves stood, and the construction of a model around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.engines.errors import InputError
from turbovit.lmdeploy_ext.bundle_choice import bundle_folder
from turbovit.lmdeploy_ext.pytorch_engine import adapter


class LeftOut(nn.Identity):
    """Stands where a part is that the engine does itself, such as a projector; takes no weights."""

    _is_dummy_mod = True  # LMDeploy's loader passes over the weights of such modules


class CompiledTower(nn.Module):
    """Stands where a vision tower is, and has the engine behind it; takes no weights.

    Args:
        dtype: of the language model, which features are given in.
    """

    _is_dummy_mod = True

    def __init__(self, encoder: Encoder, dtype: torch.dtype):
        super().__init__()
        self.encoder = encoder
        self.dtype = dtype

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [rows, tokens, hidden] of uint8 rows [rows, 3, height, width], all of one group."""
        return self.encoder.run_rows(pixel_values, None)["features"].to(self.dtype)


class PixelInputs:
    """LMDeploy's input processor of a family, for pixels as an engine takes them.

    Args:
        stock: LMDeploy's own.
    """

    def __init__(self, stock: Any):
        self.stock = stock
        self.stock.dtype = torch.uint8  # what it casts pixels to

    def preprocess_input(self, input_ids: list[int], input_multimodals: Any = None, **kwargs: Any) -> Any:
        """As LMDeploy's own.

        Raises:
            InputError: pixels are normalised already: what made them is not turbovit's vision model.
        """
        for entry in input_multimodals or ():
            for name in ("pixel_values", "pixel_values_videos"):
                if name in entry and entry[name].dtype != torch.uint8:
                    raise InputError(
                        f"the compiled vision tower got {name} of {entry[name].dtype}, expected torch.uint8: call "
                        f"turbovit.lmdeploy_ext.install() in the process that takes the requests too"
                    )
        return self.stock.preprocess_input(input_ids, input_multimodals, **kwargs)


class CompiledTowerModel:
    """The compiled half of a model; `models.model_class` puts it in front of LMDeploy's class.

    Attributes:
        tower_class: what stands where the vision tower is.
        tower: what LMDeploy's constructor makes the vision tower with, as ``module:class`` or ``module:class.method``
            below `lmdeploy.pytorch.models`.
        left_out: what else belongs to the vision half, named likewise.
        vision_prefixes: what the names of the vision half's weights begin with, as they arrive in `load_weights`.
    """

    tower_class: ClassVar[type[CompiledTower]] = CompiledTower
    tower: ClassVar[str]
    left_out: ClassVar[tuple[str, ...]] = ()
    vision_prefixes: ClassVar[tuple[str, ...]]

    input_processor: Any  # set by LMDeploy's class

    def __init__(self, config: Any, ctx_mgr: Any, dtype: torch.dtype, device: torch.device, **kwargs: Any):
        tower = self.tower_class(encoder_of(config, device), dtype)
        stand_ins: dict[str, Callable[..., nn.Module]] = {self.tower: lambda *_, **__: tower}
        with adapter.constructed_as({**stand_ins, **dict.fromkeys(self.left_out, LeftOut)}):
            super().__init__(config, ctx_mgr, dtype=dtype, device=device, **kwargs)  # type: ignore[call-arg]
        self.input_processor = PixelInputs(self.input_processor)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the language half's; those of the vision half are in the engine."""
        language = ((name, weight) for name, weight in weights if not name.startswith(self.vision_prefixes))
        super().load_weights(language)  # type: ignore[misc]


def encoder_of(config: Any, device: torch.device | None) -> Encoder:
    """The engine for a model, on the device that the model is on.

    Args:
        config: the model's Hugging Face config, which knows the folder that it was read from.

    Raises:
        BundleError: no bundle fits the checkpoint.
        RuntimeUnavailableError: no engine of the bundle runs on the device.
    """
    target = torch.device("cuda" if device is None else device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())  # each worker has its own
    return open_encoder(bundle_folder(config._name_or_path), device=str(target))
