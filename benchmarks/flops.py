"""The floating-point work of a tower's matrix products, and the rate at which this machine does such products.

A multiplication and an addition count as two operations. Norms, softmax and activations count nothing, as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from turbovit.export.tower import Tower

# Shapes with less of a tower's products than this are left out of the rate: they change it by nothing.
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class Product:
    """[rows, inner] times [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.inner}x{self.columns}"


@dataclass(frozen=True)
class Work:
    """What a tower computes for one input.

    Attributes:
        flops: of all matrix products, attention's included.
        products: those with weights, and how often each is done.
    """

    flops: int
    products: Mapping[Product, int]

    @property
    def main_products(self) -> dict[Product, int]:
        """The products that have more than a small share of the work."""
        total = sum(product.flops * count for product, count in self.products.items())
        return {p: count for p, count in self.products.items() if p.flops * count >= _LEAST_SHARE * total}


def work_of_tower(tower: Tower, inputs: Mapping[str, Tensor]) -> Work:
    """Count on the meta device: nothing is computed, and no weights are needed.

    Args:
        tower: on the meta device.
        inputs: of any device; only their shapes matter.
    """
    products: Counter[Product] = Counter()

    def count(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        columns, inner = weight.shape
        products[Product(result.numel() // columns, inner, columns)] += 1

    hooks = [module.register_forward_hook(count) for module in tower.modules() if isinstance(module, nn.Linear)]
    try:
        with FlopCounterMode(display=False) as counter:
            tower.run({name: tensor.to("meta") for name, tensor in inputs.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return Work(counter.get_total_flops(), dict(products))


def product_contenders(product: Product) -> dict[str, Callable[[], object]]:
    """The product by every library that is here, in float32: with its weights constant and its output preallocated.

    Of a library that compiles or packs weights ahead that is part of its rate, as an engine profits from it too.
    """
    generator = np.random.default_rng(0)
    x = generator.standard_normal((product.rows, product.inner), dtype=np.float32)
    weight = generator.standard_normal((product.inner, product.columns), dtype=np.float32)
    out = np.empty((product.rows, product.columns), dtype=np.float32)
    first, second, third = torch.from_numpy(x), torch.from_numpy(weight), torch.from_numpy(out)
    contenders: dict[str, Callable[[], object]] = {
        "numpy": lambda: np.matmul(x, weight, out=out),
        "torch": lambda: torch.mm(first, second, out=third),
    }
    with suppress(ImportError):
        contenders["onnxruntime"] = _onnxruntime_product(x, weight, out)
    return contenders


def _onnxruntime_product(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> Callable[[], object]:
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["out"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, out.shape)],
        initializer=[onnx.numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    # Several sessions in a process would take each other's cores while their threads wait.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()  # allocated at each call, the output's pages would all be new
    for bind, name, array in ((binding.bind_input, "x", x), (binding.bind_output, "out", out)):
        bind(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def run(keep: tuple[np.ndarray, ...] = (x, out)) -> None:
        session.run_with_iobinding(binding)

    return run
