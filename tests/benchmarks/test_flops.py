"""Floating-point operations are those that the sizes of the towers say; the machine's rate is a real one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turbovit.benchmarks.bench_encoder import PRODUCTS, exponent, machine_rate, rate_spreads
from turbovit.benchmarks.flops import Product, Work, product_contenders, work_of_tower
from turbovit.benchmarks.subjects import Subject
from turbovit.benchmarks.timing import Spread


def blocks_flops(layers: int, rows: int, tokens: int, hidden: int, inner: int) -> int:
    """By hand: q, k, v and out are 4 hidden**2 a token, the feed-forward part 2 hidden inner; attention 2 tokens**2
    hidden for the scores, and as much for the values."""
    linear = 2 * tokens * (4 * hidden**2 + 2 * hidden * inner)
    return layers * rows * (linear + 4 * tokens**2 * hidden)


@pytest.mark.parametrize(
    ("family", "rows", "tokens", "shapes"),
    [
        ("gemma3", 2, 4096, {"pixels": (2, 3, 896, 896)}),
        ("llama4", 3, 577, {"pixels": (3, 3, 336, 336)}),
        ("qwen3_vl", 2, 240, {}),
        ("deepseek_vl2", 3, 729, {"pixels": (3, 3, 384, 384)}),
    ],
)
def test_the_count_is_the_one_by_hand(
    family: str, rows: int, tokens: int, shapes: dict[str, tuple[int, ...]], subjects: dict[str, Subject]
) -> None:
    tower = subjects[family].described()
    inputs = {name: torch.empty(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    inputs = inputs or tower.samples(0)[0].inputs  # 2 frames of 12x20 patches
    work = work_of_tower(tower, inputs)
    spec = tower.spec
    outside = sum(p.flops * count for p, count in work.products.items()) - spec.layers * (
        rows * 2 * tokens * (4 * spec.hidden**2 + 2 * spec.hidden * spec.inner)
    )
    assert work.flops == blocks_flops(spec.layers, rows, tokens, spec.hidden, spec.inner) + outside
    embedded = Product(rows * (tokens - (family == "llama4")), tower.embedding.in_features, spec.hidden)
    assert work.products[embedded] == 1


@pytest.mark.parametrize("library", ["numpy", "torch", "onnxruntime"])
def test_a_timed_product_is_really_computed(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *args, **kwargs: outs.append(empty(*args, **kwargs)) or outs[-1])
    product_contenders(Product(7, 5, 3))[library]()
    generator = np.random.default_rng(0)
    x, weight = (generator.standard_normal(shape, dtype=np.float32) for shape in ((7, 5), (5, 3)))
    (out,) = (array for array in outs if array.shape == (7, 3))
    np.testing.assert_allclose(out, x @ weight, rtol=1e-5, atol=1e-6)


def test_the_machines_rate_takes_the_fastest_library_at_each_shape() -> None:
    small, large = Product(10, 10, 10), Product(100, 100, 100)
    work = Work(flops=0, products={small: 50, large: 1})
    spreads = {
        f"{PRODUCTS} {small}, a": Spread((1.0,)),
        f"{PRODUCTS} {small}, b": Spread((2.0,)),
        f"{PRODUCTS} {large}, a": Spread((9.0, 12.0)),
        f"{PRODUCTS} {large}, b": Spread((5.0, 8.0)),
    }
    assert machine_rate(work, spreads) == pytest.approx((50 * small.flops + large.flops) / (50 * 1.0 + 5.0))
    assert rate_spreads(work, spreads)[f"{PRODUCTS} {small}, b"].samples == (small.flops / 2.0,)


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    assert exponent([256, 1024, 4096], [3 * n**1.5 for n in (256, 1024, 4096)]) == pytest.approx(1.5)
