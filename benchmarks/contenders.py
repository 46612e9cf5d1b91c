"""What is timed side by side on one tower: transformers, our tower in torch's ways of running it, and the engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from turbovit.engines.bundle import Bundle, Engine
from turbovit.engines.cuda_graphs import GRAPHS_VARIABLE
from turbovit.engines.encoder import RUNNERS, TORCH_ENGINE
from turbovit.engines.families import family_from_name, load
from turbovit.engines.runner import PRECISION_DTYPES, Runner, Tensors
from turbovit.export.targets import COMPILED
from turbovit.export.torch_runner import TorchRunner
from turbovit.export.tower import Tower

Ours = Callable[[str], TorchRunner]  # by precision
Call = Callable[[Tensors], Mapping[str, Tensor]]
_GRAPHS = "8"  # shapes that a TensorRT runner keeps CUDA graphs of


@dataclass(frozen=True)
class Contender:
    """One way to run a tower.

    Attributes:
        open: loads it; what comes back runs inputs on the device. Raises whatever stands in its way.
        slow: whether opening takes tens of seconds.
    """

    name: str
    precision: str
    open: Callable[[], Call]
    slow: bool = False


def contenders(bundle: Bundle, device: torch.device, precisions: Sequence[str]) -> Iterator[Contender]:
    """All ways to run a bundle's tower on a device, in these precisions and in those of its engines."""
    ours = cache(partial(torch_runner, bundle, device))  # one copy of the weights a precision
    for precision in precisions:
        yield Contender("transformers", precision, partial(_transformers, bundle, device, precision))
        yield Contender("torch eager", precision, partial(_eager, ours, precision))
        if device.type == "cuda":
            yield Contender("CUDA graph", precision, partial(_graph, ours, precision))
        if precision == precisions[0]:  # each takes a while
            yield Contender("torch.compile", precision, partial(_compiled, ours, precision), slow=True)
    for engine in bundle.manifest.engines:
        yield Contender(engine.runtime, engine.precision, partial(_engine, bundle, engine, device))
        if engine.runtime in COMPILED:
            name = f"{engine.runtime} with CUDA graphs"
            yield Contender(name, engine.precision, partial(_engine_with_graphs, bundle, engine, device))


def torch_runner(bundle: Bundle, device: torch.device, precision: str) -> TorchRunner:
    """Our tower in a precision, eager."""
    return TorchRunner.open(bundle, replace(TORCH_ENGINE, precision=precision), device)


def open_engine(bundle: Bundle, engine: Engine, device: torch.device) -> Runner:
    """A runner of a bundle's engine."""
    runner_class: type[Runner] = load(RUNNERS[engine.runtime])
    return runner_class.open(bundle, engine, device)


def _eager(ours: Ours, precision: str) -> Call:
    return ours(precision).run


def _transformers(bundle: Bundle, device: torch.device, precision: str) -> Call:
    reference = load(family_from_name(bundle.manifest.family).reference)(Path(bundle.manifest.source.name))
    model = reference.model.to(device)
    for parameter in model.parameters():  # not buffers: rope tables stay in float32, and some are complex
        parameter.data = parameter.data.to(PRECISION_DTYPES[precision])
    return reference.tower_outputs


def _compiled(ours: Ours, precision: str) -> Call:
    tower = ours(precision).tower
    compiled = torch.compile(tower, dynamic=False)

    def call(inputs: Tensors) -> Mapping[str, Tensor]:
        with torch.no_grad():
            results = compiled(*(inputs[name] for name in tower.input_names))
        return dict(zip(tower.output_names, results if isinstance(results, tuple) else (results,), strict=True))

    return call


def _graph(ours: Ours, precision: str) -> Call:
    """The tower as one `torch.cuda.CUDAGraph` for each shape; inputs are copied in and outputs out."""
    tower = ours(precision).tower
    graphs: dict[Any, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], dict[str, Tensor]]] = {}

    def call(inputs: Tensors) -> Mapping[str, Tensor]:
        key = tuple((name, tuple(inputs[name].shape)) for name in tower.input_names)
        if key not in graphs:
            graphs[key] = _captured(tower, inputs)
        graph, own_inputs, own_outputs = graphs[key]
        for name, own in own_inputs.items():
            own.copy_(inputs[name])
        graph.replay()
        return {name: tensor.clone() for name, tensor in own_outputs.items()}

    return call


def _captured(tower: Tower, inputs: Tensors) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], dict[str, Tensor]]:
    own = {name: inputs[name].clone() for name in tower.input_names}
    graph = torch.cuda.CUDAGraph()
    with _ConstantsOnce():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                tower.run(own)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            outputs = tower.run(own)
    return graph, own, outputs


class _ConstantsOnce(TorchFunctionMode):
    """What a tower takes from the host is taken once, numbers and tensors: a capture cannot copy them."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, tuple[Tensor, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moved = func is torch.Tensor.to and args[1:] and isinstance(args[1], torch.device) and args[0].device != args[1]
        if func is not torch.tensor and not moved:
            return func(*args, **(kwargs or {}))
        key = f"{id(args[0])} {args[1]}" if moved else repr((args, kwargs))
        if key not in self._made:
            self._made[key] = func(*args, **(kwargs or {})), args[0]  # kept, so that its id stays its own
        return self._made[key][0]


def _engine(bundle: Bundle, engine: Engine, device: torch.device) -> Call:
    return open_engine(bundle, engine, device).run


def _engine_with_graphs(bundle: Bundle, engine: Engine, device: torch.device) -> Call:
    before = os.environ.get(GRAPHS_VARIABLE)
    os.environ[GRAPHS_VARIABLE] = _GRAPHS  # read when an engine is opened
    try:
        return open_engine(bundle, engine, device).run
    finally:
        os.environ.pop(GRAPHS_VARIABLE)
        if before is not None:
            os.environ[GRAPHS_VARIABLE] = before
