"""Precisions of a tower: which weights become half precision, which stay in float32, and whether float16 can hold it.

float16 ends at 65,504, bfloat16 has float32's range. Which of the two fits is decided by the largest magnitudes that
the float32 reference tower has on the samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from turbovit.engines.errors import BuildError
from turbovit.engines.runner import PRECISION_DTYPES
from turbovit.export.layers import LayerNorm, RMSNorm, ScaledDotProduct
from turbovit.export.tower import Tower

T = TypeVar("T", bound=Tower)
Ranges = dict[str, float]

FLOAT16_LIMIT = 65504.0
# The samples are a few images: what others may bring is given this much room.
MARGIN = 8
_NORMS = (LayerNorm, RMSNorm)
_HALF = (torch.float16, torch.bfloat16)
_SHOWN = 3


@dataclass(frozen=True)
class Choice:
    """A precision and why it was taken, in words."""

    precision: str
    reason: str


def fp32_layers(tower: Tower, patterns: Sequence[str]) -> tuple[str, ...]:
    """The paths of the tower's layers that `patterns` name, each without what lies inside it.

    Args:
        patterns: paths such as ``blocks.3.mlp``, or globs (``blocks.2?``, ``projector*``).

    Raises:
        BuildError: a pattern names nothing; lists what there is.
    """
    paths = _layers(tower)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise BuildError(f"no layer is called {pattern!r}; available: {', '.join(_described(paths))}")
    named = {path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)}
    if named.issuperset(name for name, _ in tower.named_children() if name in paths):
        raise BuildError("these layers are all of the tower: take fp32 instead")
    return tuple(sorted((path for path in named if not any(above in named for above in _above(path))), key=_natural))


def is_within(path: str, layers: Iterable[str]) -> bool:
    """Whether a module or parameter is one of `layers`, or lies inside one."""
    return f"{path}.".startswith(tuple(f"{layer}." for layer in layers))


def in_precision(tower: T, precision: str, raised: Sequence[str] = ()) -> T:
    """Convert the tower's weights in place. Norms, and the layers `raised`, keep theirs in float32.

    A layer computes in the dtype of its weights (see `turbovit.export.layers`), so that nothing else has to change.

    Args:
        precision: ``fp32``, ``fp16`` or ``bf16``.
        raised: paths as `fp32_layers` gives them.
    """
    dtype = PRECISION_DTYPES[precision]
    kept = [name for name, module in tower.named_modules() if isinstance(module, _NORMS)] + list(raised)
    for name, parameter in tower.named_parameters():
        if not is_within(name, kept):
            parameter.data = parameter.data.to(dtype)
    tower.dtype = dtype
    return tower


@contextlib.contextmanager
def recorded_ranges(tower: Tower) -> Iterator[Ranges]:
    """Record the largest magnitude of every layer's input and output, and of attention's scores, while it runs.

    The scores are those before scaling, or a bound for them where that is far from float16's limit.

    Yields:
        The magnitudes by ``blocks.3.mlp.up output`` and the like; filled by each run of the tower.
    """
    ranges: Ranges = {}

    def record(key: str, dtype: torch.dtype, magnitude: Callable[[], float]) -> None:
        ranges[key] = max(ranges.get(key, 0.0), magnitude())

    with _every_value(tower, record):
        yield ranges


def choice_from_ranges(
    ranges: Mapping[str, float], tower: Tower, precision: str, raised: Sequence[str], *, bfloat16: bool = True
) -> Choice:
    """Which half precision a tower takes, or why it cannot have the one asked for.

    float16 has three more bits of mantissa, and every GPU has it: it is taken wherever its range is enough.

    Args:
        ranges: what `recorded_ranges` gave for the float32 tower.
        tower: of the same spec; changed: converted to half precision and moved to the meta device.
        precision: ``auto``, ``fp16`` or ``bf16``.
        raised: the layers that stay in float32, as `fp32_layers` gives them.
        bfloat16: whether the GPUs to build for have it (compute capability 7.5 has not).

    Raises:
        BuildError: float16 was asked for, or is all there is, and cannot hold the tower; names layers and magnitudes.
    """
    if precision == "bf16":
        if not bfloat16:
            raise BuildError("GPUs of compute capability 7.5 have no bfloat16: take fp16, or other GPUs")
        return Choice("bf16", "asked for")
    computed = _known(ranges, _half_values(in_precision(tower, "fp16", raised)))
    near = [f"{key} reaches {value:.4g}" for key, value in computed.items() if value > FLOAT16_LIMIT / MARGIN]
    limit = f"{FLOAT16_LIMIT / MARGIN:.0f} (float16 ends at {FLOAT16_LIMIT:.0f}, and a factor of {MARGIN} is kept free)"
    if not near:
        largest = max(computed, key=lambda key: computed[key])
        held = f"float16 holds every layer: {largest} reaches {computed[largest]:.4g}, allowed are {limit}"
        return Choice("fp16", held if precision == "auto" else f"asked for; {held}")
    more = f" and {len(near) - _SHOWN} more" if len(near) > _SHOWN else ""
    why = f"{', '.join(near[:_SHOWN])}{more}, allowed are {limit}"
    if precision == "auto" and bfloat16:
        return Choice("bf16", f"float16 cannot hold the tower: {why}")
    otherwise = "take bf16" if bfloat16 else "leave out compute capability 7.5, which has no bfloat16,"
    raise BuildError(
        f"float16 cannot hold the tower: {why}; {otherwise} or keep the layer that it starts in in float32 with "
        f"--fp32-layers"
    )


def _known(ranges: Mapping[str, float], keys: Sequence[str]) -> dict[str, float]:
    unknown = [key for key in keys if key not in ranges]
    if unknown:
        raise BuildError(
            f"the bundle has no magnitude of {unknown[0]}: another version of turbovit built it; delete it and build "
            f"it again, or choose another folder"
        )
    return {key: ranges[key] for key in keys}


def _half_values(tower: Tower) -> list[str]:
    """Which of the values that `recorded_ranges` names are in half precision, in order, by a run without numbers.

    The tower is moved to the meta device.
    """
    found: list[str] = []

    def record(key: str, dtype: torch.dtype, magnitude: Callable[[], float]) -> None:
        if dtype in _HALF:
            found.append(key)

    sample = tower.to("meta").samples(0)[0]
    with _every_value(tower, record):
        tower.run({name: tensor.to("meta") for name, tensor in sample.inputs.items()})
    return found


@contextlib.contextmanager
def _every_value(tower: Tower, record: Callable[[str, torch.dtype, Callable[[], float]], None]) -> Iterator[None]:
    """Call `record` with the name of every value between layers, its dtype, and how to find its largest magnitude."""

    def hook_for(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(module, ScaledDotProduct):
                record(f"{path} q.k", inputs[0].dtype, partial(_largest_score, *inputs[:2]))
                return
            # A linear layer casts its input to the dtype of its weights, which is that of its output.
            given = output.dtype if isinstance(module, nn.Linear) else inputs[0].dtype
            for kind, value, dtype in (("input", inputs[0], given), ("output", output, output.dtype)):
                if value.is_floating_point():
                    record(f"{path} {kind}", dtype, partial(_largest, value))

        return hook

    def outputs_hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        values = output if isinstance(output, tuple) else (output,)
        for name, value in zip(tower.output_names, values, strict=True):
            record(name, value.dtype, partial(_largest, value))

    handles = [module.register_forward_hook(hook_for(path)) for path, module in tower.named_modules() if path]
    handles.append(tower.register_forward_hook(outputs_hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(value: Tensor) -> float:
    """Without a copy of the values. What is not finite counts as float32's largest, which JSON can hold."""
    low, high = value.aminmax()
    return float(torch.nan_to_num(torch.maximum(-low, high), nan=torch.finfo(torch.float32).max))


def _largest_score(query: Tensor, key: Tensor) -> float:
    """The largest magnitude of query.key [batch, heads, tokens, size], or a bound for it that is small enough."""
    bound = _largest(query.norm(dim=-1).amax(-1) * key.norm(dim=-1).amax(-1))
    if bound <= FLOAT16_LIMIT / MARGIN:
        return bound
    heads = zip(query.flatten(0, 1), key.flatten(0, 1), strict=True)  # one at a time: all scores would be gigabytes
    return max(_largest(q @ k.T) for q, k in heads)


def _layers(tower: Tower) -> list[str]:
    """Paths of what has weights: modules but for norms, which are in float32 anyway, and the tower's own parameters."""
    modules = [
        path
        for path, module in tower.named_modules()
        if path and not isinstance(module, _NORMS) and next(module.parameters(), None) is not None
    ]
    return modules + [name for name, _ in tower.named_parameters(recurse=False)]


def _above(path: str) -> list[str]:
    """``a.b.c`` -> ``a``, ``a.b``."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _natural(path: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def _described(paths: Sequence[str]) -> list[str]:
    """The paths of one layer of each kind: numbers as the range they take."""
    numbers: dict[str, set[int]] = {}
    for path in paths:
        parts = path.split(".")
        kind = ".".join("*" if part.isdigit() else part for part in parts)
        numbers.setdefault(kind, set()).update(int(part) for part in parts if part.isdigit())
    return [
        kind.replace("*", f"{{{min(found)}..{max(found)}}}" if len(found) > 1 else str(min(found))) if found else kind
        for kind, found in numbers.items()
    ]
