"""What people run today: transformers' own towers, eager, compiled and exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2VisionModel
from turbovit.engines.errors import RuntimeUnavailableError, UnsupportedModelError
from turbovit.export.tower import Tower

Outputs = dict[str, Tensor]
Run = Callable[[], Outputs]


class TransformersTower(nn.Module):
    """A vision tower of transformers with its projector, from normalised float pixels to our outputs.

    It starts from the floats that transformers' processor gives: the time that making them takes is not counted
    against it.
    """

    model: Any

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def arguments(self, inputs: Mapping[str, Tensor], normalised: Tensor) -> tuple[Tensor, ...]:
        """Its arguments for an engine's inputs."""
        return (normalised,)


class _Gemma3(TransformersTower):
    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.get_image_features(pixels).pooler_output


class _Llama4(TransformersTower):
    def forward(self, pixels: Tensor) -> Tensor:
        features = self.model.vision_model(pixels).last_hidden_state
        return self.model.multi_modal_projector(features)


class _Qwen3VL(TransformersTower):
    def arguments(self, inputs: Mapping[str, Tensor], normalised: Tensor) -> tuple[Tensor, ...]:
        rows, columns = (inputs["patch_position"].max(0).values + 1).tolist()
        grids = torch.tensor([[1, rows, columns]] * len(normalised))
        return normalised.flatten(0, 1), grids

    def forward(self, patches: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        output = self.model.model.visual(patches, grid_thw=grids)
        frames = len(grids)
        return tuple(x.unflatten(0, (frames, -1)) for x in (output.pooler_output, *output.deepstack_features))


class _Whole(TransformersTower):
    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixels)


def _from_transformers(name: str, checkpoint: Path) -> nn.Module:
    import transformers

    model_class = getattr(transformers, name)
    model = model_class.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    for part in ("language_model", "lm_head"):
        for owner in (model, getattr(model, "model", None)):
            if owner is not None and hasattr(owner, part):
                setattr(owner, part, None)  # not measured, and large
    return model


# transformers has no DeepSeek-VL2: there it is its SigLIP, with the original's projector behind it.
_TOWERS: dict[str, tuple[Callable[[Path], nn.Module], type[TransformersTower]]] = {
    "gemma3": (partial(_from_transformers, "Gemma3ForConditionalGeneration"), _Gemma3),
    "llama4": (partial(_from_transformers, "Llama4ForConditionalGeneration"), _Llama4),
    "qwen3_vl": (partial(_from_transformers, "Qwen3VLForConditionalGeneration"), _Qwen3VL),
    "qwen3_vl_moe": (partial(_from_transformers, "Qwen3VLMoeForConditionalGeneration"), _Qwen3VL),
    "deepseek_vl2": (DeepseekVL2VisionModel.from_checkpoint, _Whole),
}


def transformers_tower(family: str, checkpoint: Path) -> TransformersTower:
    """The family's own tower with a checkpoint's weights, in float32, attention by sdpa.

    Raises:
        UnsupportedModelError: there is none of this family.
    """
    if family not in _TOWERS:
        raise UnsupportedModelError(f"transformers has no vision tower for {family}; it has for {', '.join(_TOWERS)}")
    load, tower = _TOWERS[family]
    return tower(load(checkpoint)).eval().requires_grad_(False)


def normalised_pixels(tower: Tower, inputs: Mapping[str, Tensor]) -> Tensor:
    """The floats that the family's processor gives, from an engine's uint8 pixels."""
    with torch.no_grad():
        return tower.normalise(inputs["pixels"])  # type: ignore[operator]  # every tower has one


class LinearPatches(nn.Module):
    """A patch convolution, whose stride is its kernel, as the matrix product that it is."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d):
        super().__init__()
        if tuple(convolution.stride) != tuple(convolution.kernel_size):
            raise ValueError(f"{convolution} is no patch embedding: its patches overlap")
        self.kernel = tuple(convolution.kernel_size)
        self.linear = nn.Linear(convolution.weight[0].numel(), convolution.out_channels, convolution.bias is not None)
        self.linear.weight = nn.Parameter(convolution.weight.flatten(1), requires_grad=False)
        if convolution.bias is not None:
            self.linear.bias = nn.Parameter(convolution.bias, requires_grad=False)
        self.weight = convolution.weight  # towers look at its dtype

    def forward(self, x: Tensor) -> Tensor:
        counts = [size // side for size, side in zip(x.shape[2:], self.kernel, strict=True)]
        axes = len(counts)
        for axis in reversed(range(axes)):
            x = x.narrow(axis + 2, 0, counts[axis] * self.kernel[axis])  # as a convolution, it leaves out the rest
            x = x.unflatten(axis + 2, (counts[axis], self.kernel[axis]))
        grid, inner = [2 + 2 * axis for axis in range(axes)], [3 + 2 * axis for axis in range(axes)]
        patches = x.permute(0, *grid, 1, *inner).flatten(axes + 1)  # [batch, *counts, channels * kernel]
        return self.linear(patches).movedim(-1, 1)


def with_linear_patches(tower: TransformersTower) -> int:
    """Replace every patch convolution in place; gives how many there were."""
    found = [
        (parent, name, child)
        for parent in tower.modules()
        for name, child in parent.named_children()
        if isinstance(child, (nn.Conv2d, nn.Conv3d))
    ]
    for parent, name, convolution in found:
        setattr(parent, name, LinearPatches(convolution))
    return len(found)


def eager_run(tower: Callable[..., Any], arguments: tuple[Tensor, ...], names: tuple[str, ...]) -> Run:
    """A call of the tower, without gradients."""

    def run() -> Outputs:
        with torch.inference_mode():
            return named(tower(*arguments), names)

    return run


def compiled_run(tower: nn.Module, arguments: tuple[Tensor, ...], names: tuple[str, ...]) -> Run:
    """The tower under torch.compile for these shapes.

    Raises:
        RuntimeUnavailableError: it does not compile here; says why.
    """
    compiled = torch.compile(tower, dynamic=False)
    run = eager_run(compiled, arguments, names)
    try:
        run()
    except Exception as error:  # dynamo, inductor and the C++ compiler have errors of their own
        raise RuntimeUnavailableError(f"torch.compile failed: {_first_line(error)}") from error
    return run


def exported_run(tower: nn.Module, arguments: tuple[Tensor, ...], names: tuple[str, ...], folder: Path) -> Run:
    """The tower as `torch.onnx.export` writes it by default, in ONNX Runtime as it opens by default.

    Raises:
        RuntimeUnavailableError: it cannot be exported, or the graph does not load.
    """
    try:
        program = torch.onnx.export(tower, arguments, dynamo=True, verbose=False)
        assert program is not None
        path = folder / "transformers.onnx"
        program.save(path, external_data=True)
    except Exception as error:
        raise RuntimeUnavailableError(f"torch.onnx.export failed: {_first_line(error)}") from error
    return session_run(path, arguments, names)


def session_run(path: Path, arguments: tuple[Tensor, ...], names: tuple[str, ...]) -> Run:
    """A graph in ONNX Runtime, with all settings as they are by default.

    Raises:
        RuntimeUnavailableError: the graph does not load, or ONNX Runtime is not there.
    """
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RuntimeUnavailableError(f"onnxruntime cannot run {path.name}: {_first_line(error)}") from error
    wanted = {entry.name for entry in session.get_inputs()}  # an export drops inputs that became constants
    given = zip((entry.name for entry in session.get_inputs()), arguments, strict=False)
    feeds = {name: tensor.numpy() for name, tensor in given if name in wanted}

    def run() -> Outputs:
        return named(tuple(torch.from_numpy(value) for value in session.run(None, feeds)), names)

    return run


def named(results: Any, names: tuple[str, ...]) -> Outputs:
    """Results by our outputs' names."""
    return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))


def _first_line(error: BaseException) -> str:
    """The first line of what was wrong in the first place: exporters and compilers wrap it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
