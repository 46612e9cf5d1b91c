"""How much memory an engine will need, from the tower's sizes alone: before anything is exported or compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.errors import BuildError
from turbovit.engines.profiles import text_from_profile
from turbovit.engines.runner import DTYPES, PRECISION_DTYPES
from turbovit.engines.shapes import resolve
from turbovit.export.layers import Attention
from turbovit.export.precision import is_within
from turbovit.export.tower import Tower

GIB = 2**30
_FLOAT32 = 4
# TensorRT-RTX 1.7 compiling full-size towers in float16 took 3.7 to 4.0 times the weights, this included.
_COMPILER_WEIGHTS = 4
_COMPILER_BASE = GIB // 2


@dataclass(frozen=True)
class Estimate:
    """Bytes on the GPU for one run at a profile's largest shapes."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations

    def __str__(self) -> str:
        return (
            f"{self.total / GIB:.1f} GiB ({self.weights / GIB:.1f} weights, {self.activations / GIB:.1f} activations)"
        )


def weight_bytes(tower: Tower, precision: str, fp32_layers: Sequence[str] = ()) -> int:
    """Bytes of the tower's weights in a precision; the tower needs none itself (it may be on the meta device)."""
    item = PRECISION_DTYPES[precision].itemsize
    return sum(
        parameter.numel() * (_FLOAT32 if is_within(name, fp32_layers) else item)
        for name, parameter in tower.named_parameters()
    )


def estimate(tower: Tower, profile: Profile, precision: str, fp32_layers: Sequence[str] = ()) -> Estimate:
    """What one run takes at the profile's largest shapes, on the careful side.

    Counted are the weights, the inputs and outputs, and the widest point: a block's residual stream, norm in float32
    and either q, k, v and their mix or both sides of the GELU. TensorRT-RTX makes one kernel of attention in half
    precision, and TensorRT is taken to; in float32 they have none, and all scores are counted on both sides of the
    softmax. Where a layer stays in float32, all activations are counted as float32.

    Args:
        fp32_layers: paths of the layers that stay in float32.
    """
    sizes = {symbol: high for symbol, (_, _, high) in profile.ranges.items()}
    spec, item = tower.spec, PRECISION_DTYPES[precision].itemsize
    rows = sizes[str(tower.inputs()[0].shape[0])]
    tokens = tower.tokens(sizes)
    if fp32_layers:
        item = _FLOAT32
    whole = precision == "fp32" or _keeps_attention_in_float32(tower, fp32_layers)
    scores = 2 * _FLOAT32 * spec.heads * tokens**2 if whole else 0
    widest = max(4 * spec.hidden, 2 * spec.inner)
    block = rows * (tokens * (item * (2 * spec.hidden + widest) + _FLOAT32 * spec.hidden) + scores)
    pixels = 2 * _FLOAT32 * prod(resolve(tower.inputs()[0].shape, sizes))
    ends = _bytes(tower.inputs(), sizes) + _bytes(tower.outputs("float32"), sizes)
    return Estimate(weight_bytes(tower, precision, fp32_layers), max(block, pixels) + ends)


def _keeps_attention_in_float32(tower: Tower, fp32_layers: Sequence[str]) -> bool:
    """Whether a block's q, k and v come from a projection that stays in float32."""
    blocks = [name for name, module in tower.named_modules() if isinstance(module, Attention)]
    return any(is_within(f"{name}.qkv", fp32_layers) for name in blocks)


def gpu_memory_lines(
    tower: Tower, profiles: Iterable[Profile], precision: str, fp32_layers: Sequence[str]
) -> Iterator[str]:
    """What each profile needs, in words."""
    for profile in profiles:
        needed = estimate(tower, profile, precision, fp32_layers)
        yield f"profile {text_from_profile(profile)}: about {needed} on the GPU"


def require_gpu_memory(
    tower: Tower, profiles: Iterable[Profile], precision: str, fp32_layers: Sequence[str], limit: int
) -> None:
    """Refuse a profile that cannot fit.

    Args:
        limit: bytes that the GPU has.

    Raises:
        BuildError: a profile needs more than the limit; with both numbers.
    """
    for profile in profiles:
        needed = estimate(tower, profile, precision, fp32_layers)
        if needed.total > limit:
            raise BuildError(
                f"the profile {text_from_profile(profile)} needs about {needed} on the GPU in {precision}, "
                f"there are {limit / GIB:.1f} GiB: take a smaller one with --profile, lower --max-images or "
                f"--max-pixels, or leave attention, whose scores count in float32, in half precision"
            )


def require_build_memory(weights: int) -> None:
    """Refuse a compilation for which this machine has too little memory.

    Raises:
        BuildError: less is available than a compilation takes; with both numbers.
    """
    needed, available = _COMPILER_BASE + _COMPILER_WEIGHTS * weights, _available()
    if available is not None and needed > available:
        raise BuildError(
            f"compiling needs about {needed / GIB:.1f} GiB of this machine's memory, {available / GIB:.1f} GiB are "
            f"available: end other programs, or build on a larger machine"
        )


def _available() -> int | None:
    """Bytes that programs can still have, as the kernel estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _bytes(specs: Iterable[TensorSpec], sizes: Mapping[str, int]) -> int:
    return sum(prod(resolve(spec.shape, sizes)) * DTYPES[spec.dtype].itemsize for spec in specs)
