"""Which weights are in half precision, which layers stay in float32, and when float16 is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from tower_checks import tower_of

from turbovit.engines.bundle import precision_label
from turbovit.engines.errors import BuildError
from turbovit.export.layers import LayerNorm, RMSNorm
from turbovit.export.precision import (
    FLOAT16_LIMIT,
    MARGIN,
    Choice,
    Ranges,
    choice_from_ranges,
    fp32_layers,
    in_precision,
    recorded_ranges,
)
from turbovit.export.tower import Tower

FAMILIES = ("gemma3", "llama4", "qwen3_vl", "deepseek_vl2")
LARGE = 9e4


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture
def tower(folder: Path) -> Tower:
    return tower_of(folder)


def smallest(tower: Tower) -> dict[str, Tensor]:
    return min((sample.inputs for sample in tower.samples(0)), key=lambda inputs: inputs["pixels"].numel())


def ranges_of(tower: Tower) -> Ranges:
    with recorded_ranges(tower) as ranges:
        tower.run(smallest(tower))
    return ranges


def choice(
    tower: Tower, ranges: Ranges, precision: str = "auto", raised: tuple[str, ...] = (), **options: bool
) -> Choice:
    with torch.device("meta"):
        described = type(tower)(tower.spec)
    return choice_from_ranges(ranges, described, precision, raised, **options)


def dtypes(module: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters()}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_norms_and_raised_layers_keep_their_float32_weights(tower: Tower, precision: str) -> None:
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    in_precision(tower, precision, ("blocks.1.mlp", "blocks.0.attention.qkv"))
    raised = {tower.get_submodule("blocks.1.mlp"), tower.get_submodule("blocks.0.attention.qkv")}
    for module in tower.modules():
        if isinstance(module, (LayerNorm, RMSNorm)) or module in raised:
            assert dtypes(module) == {torch.float32}
    assert dtypes(tower.get_submodule("blocks.0.mlp")) == {half}
    assert dtypes(tower.get_submodule("blocks.0.attention.out")) == {half}
    assert {output.dtype for output in tower.run(smallest(tower)).values()} == {half}


def test_a_raised_layer_computes_as_in_float32(tiny_gemma3: Path) -> None:
    raised = in_precision(tower_of(tiny_gemma3), "bf16", ("blocks.1.mlp",)).get_submodule("blocks.1.mlp")
    reference = tower_of(tiny_gemma3).get_submodule("blocks.1.mlp")
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(raised(x), reference(x.float()))


def test_with_every_layer_raised_nothing_but_the_outputs_is_rounded(tower: Tower, folder: Path) -> None:
    inputs = smallest(tower)
    raised = [name for name, _ in tower.named_children()] + [name for name, _ in tower.named_parameters(recurse=False)]
    got = in_precision(tower_of(folder), "bf16", raised).run(inputs)
    for name, expected in tower.run(inputs).items():
        assert torch.equal(got[name], expected.bfloat16())


def test_patterns_name_layers_by_path_and_each_once(tiny_gemma3: Path) -> None:
    tower = tower_of(tiny_gemma3)
    assert fp32_layers(tower, ["blocks.?.mlp", "blocks.1", "proj*"]) == ("blocks.0.mlp", "blocks.1", "projector")
    assert fp32_layers(tower, ["position"]) == ("position",)
    assert fp32_layers(tower, []) == ()


def test_layers_are_in_the_order_of_their_numbers(tiny_qwen3_vl: Path) -> None:
    tower = tower_of(tiny_qwen3_vl)
    tower.blocks = nn.ModuleList(copy.deepcopy(tower.get_submodule("blocks.0")) for _ in range(12))
    assert fp32_layers(tower, ["blocks.*"])[1:3] == ("blocks.1", "blocks.2")


def test_an_unknown_layer_is_an_error_that_lists_what_there_is(tiny_gemma3: Path) -> None:
    with pytest.raises(
        BuildError, match=r"no layer is called 'blocks.9.mlp'; available: embedding, blocks, .*"
    ) as error:
        fp32_layers(tower_of(tiny_gemma3), ["blocks.0", "blocks.9.mlp"])
    for name in ("blocks.{0..1}.attention.qkv", "blocks.{0..1}.mlp", "projector", "position"):
        assert name in str(error.value)
    assert "norm" not in str(error.value)  # they are in float32 anyway


def test_the_whole_tower_in_float32_is_refused(tower: Tower) -> None:
    with pytest.raises(BuildError, match="these layers are all of the tower: take fp32 instead"):
        fp32_layers(tower, ["*"])


def test_other_layers_in_float32_have_other_files() -> None:
    labels = {precision_label("fp16", raised) for raised in ((), ("blocks.0",), ("blocks.0", "blocks.1"))}
    assert "fp16" in labels
    assert len(labels) == 3


def test_ranges_are_the_largest_magnitudes_of_all_runs(tiny_gemma3: Path) -> None:
    """Against values computed by hand from what goes into one layer."""
    tower = tower_of(tiny_gemma3)
    up = tower.get_submodule("blocks.1.mlp.up")
    scores = tower.get_submodule("blocks.1.attention.scores")
    seen: list[Tensor] = []
    products: list[float] = []
    up.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0], output)))
    scores.register_forward_hook(lambda module, qkv, out: products.append(float((qkv[0] @ qkv[1].mT).abs().max())))
    with recorded_ranges(tower) as ranges:
        for sample in tower.samples(0):
            tower.run(sample.inputs)
    assert len(seen) == 4
    assert ranges["blocks.1.mlp.up input"] == max(float(value.abs().max()) for value in seen[::2])
    assert ranges["blocks.1.mlp.up output"] == max(float(value.abs().max()) for value in seen[1::2])
    assert max(products) <= ranges["blocks.1.attention.scores q.k"] <= FLOAT16_LIMIT / MARGIN
    assert len(up._forward_hooks) == 1  # ours are gone


def test_scores_near_the_limit_are_computed_exactly(tiny_gemma3: Path) -> None:
    tower = tower_of(tiny_gemma3)
    qkv = tower.get_submodule("blocks.0.attention.qkv")
    qkv.weight.data[:128] *= 100  # type: ignore[union-attr,operator]
    products: list[float] = []
    tower.get_submodule("blocks.0.attention.scores").register_forward_hook(
        lambda module, inputs, out: products.append(float((inputs[0] @ inputs[1].mT).abs().max()))
    )
    ranges = ranges_of(tower)
    assert products[0] > FLOAT16_LIMIT / MARGIN
    assert ranges["blocks.0.attention.scores q.k"] == pytest.approx(products[0], rel=1e-5)


def test_every_value_that_float16_computes_has_a_range(tower: Tower) -> None:
    ranges = ranges_of(tower)
    chosen = choice(tower, ranges)
    assert chosen.precision == "fp16"
    assert max(ranges.values()) < FLOAT16_LIMIT / MARGIN
    assert f"reaches {max(ranges.values()):.4g}, allowed are 8188 (float16 ends at 65504" in chosen.reason


def raised_by(tower: Tower, ranges: Ranges) -> Iterator[str]:
    """The values that refuse float16 where they alone are large."""
    for key in ranges:
        if choice(tower, {**ranges, key: LARGE}).precision == "bf16":
            yield key


def test_every_layer_is_looked_at(tower: Tower) -> None:
    """Inputs and outputs of everything that has weights, scores, and what the engine gives."""
    refusing = set(raised_by(tower, ranges_of(tower)))
    linears = [name for name, module in tower.named_modules() if isinstance(module, nn.Linear)]
    assert {f"{name} output" for name in linears} <= refusing
    # Pixels are float32 until the cast in front of the first product, where they are near 1.
    assert {f"{name} input" for name in linears} <= refusing
    blocks = {f"blocks.{layer}" for layer in range(tower.spec.layers)}
    assert {f"{block}.norm2 input" for block in blocks} <= refusing  # the sum behind attention
    assert {f"{block} output" for block in blocks} <= refusing
    assert {f"{block}.attention.scores q.k" for block in blocks} <= refusing
    assert set(tower.output_names) <= refusing


def test_the_reason_names_the_layer_where_it_starts_and_the_number(tower: Tower) -> None:
    ranges = ranges_of(tower) | {"blocks.0.mlp.down output": LARGE, "blocks.1 output": 2 * LARGE}
    chosen = choice(tower, ranges)
    assert chosen.precision == "bf16"
    why = "float16 cannot hold the tower: blocks.0.mlp.down output reaches 9e+04, blocks.1 output reaches 1.8e+05, "
    assert chosen.reason.startswith(f"{why}allowed are 8188")


def test_float16_that_was_asked_for_is_refused(tower: Tower) -> None:
    ranges = ranges_of(tower) | {"blocks.1.attention.out output": 1e4}
    message = r"blocks.1.attention.out output reaches 1e\+04, allowed are 8188 .*; take bf16 or keep .* --fp32-layers"
    with pytest.raises(BuildError, match=message):
        choice(tower, ranges, "fp16")
    assert choice(tower, ranges, "bf16") == Choice("bf16", "asked for")
    assert choice(tower, ranges, "fp16", ("blocks.1.attention",)).reason.startswith("asked for; float16 holds")


def test_a_value_that_a_half_layer_takes_from_a_raised_one_counts(tiny_gemma3: Path) -> None:
    """The layer in float32 has no limit; the cast behind it has."""
    tower = tower_of(tiny_gemma3)
    ranges = ranges_of(tower) | {"blocks.1.mlp.up output": LARGE, "blocks.1.mlp.down input": LARGE}
    with pytest.raises(BuildError, match=r"tower: blocks.1.mlp.down input reaches 9e\+04, allowed"):
        choice(tower, ranges, "fp16", ("blocks.1.mlp.up",))
    assert choice(tower, ranges, "fp16", ("blocks.1.mlp",)).precision == "fp16"


def test_what_a_raised_layer_adds_to_the_residual_stream_stays_in_float32(tower: Tower) -> None:
    stream = {"blocks.0.mlp.down output": LARGE, "blocks.0.mlp output": LARGE, "blocks.0 output": LARGE}
    stream |= {"blocks.1.norm1 input": LARGE, "blocks.1 input": LARGE, "blocks.1 output": LARGE}
    assert choice(tower, ranges_of(tower) | stream, "fp16", ("blocks.0.mlp",)).precision == "fp16"


def test_gpus_without_bfloat16(tower: Tower) -> None:
    ranges = ranges_of(tower)
    assert choice(tower, ranges, bfloat16=False).precision == "fp16"
    with pytest.raises(BuildError, match=r"no bfloat16: take fp16"):
        choice(tower, ranges, "bf16", bfloat16=False)
    with pytest.raises(BuildError, match=r"reaches 9e\+04.*leave out compute capability 7.5, which has no bfloat16"):
        choice(tower, ranges | {"blocks.0.mlp.up output": LARGE}, bfloat16=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_within_range(tiny_gemma3: Path, value: float) -> None:
    tower = tower_of(tiny_gemma3)
    tower.get_submodule("blocks.0.mlp.down").bias.data[3] = value  # type: ignore[union-attr,operator]
    ranges = ranges_of(tower)
    assert ranges["blocks.0.mlp.down output"] == torch.finfo(torch.float32).max
    assert choice(tower, ranges).precision == "bf16"


def test_a_bundle_without_ranges_says_what_to_do(tower: Tower) -> None:
    with pytest.raises(BuildError, match=r"no magnitude of .*another version of turbovit built it; delete it"):
        choice(tower, {}, "fp16")
    assert choice(tower, {}, "bf16").precision == "bf16"
