"""TensorRT and TensorRT-RTX on torch's memory, streams and devices.

Nothing here has run on a GPU yet: it is tested on a fake of `turbovit.engines.trt_library`'s interface.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor

from turbovit.engines.bundle import Bundle, Engine, Manifest
from turbovit.engines.commands import build_command
from turbovit.engines.cuda_graphs import Graphs, ShapeGraph, SideStream, graphs_wanted
from turbovit.engines.errors import BundleError, EngineRunError, RuntimeUnavailableError
from turbovit.engines.profiles import profile_for, rows_per_run
from turbovit.engines.runner import DTYPES, PRECISION_DTYPES, Runner, capability_of
from turbovit.engines.shapes import bind, resolve
from turbovit.engines.trt_library import (
    DATA_TYPES,
    ConfigurableEngine,
    ExecutionContext,
    LoadedEngine,
    RTXLibrary,
    library_from_name,
)

_ALIGNMENT = 256  # bytes, of every address that TensorRT gets
Shapes = Mapping[str, tuple[int, ...]]


class TensorRTRunner(Runner):
    """A TensorRT engine. Nothing passes through the host: inputs and outputs are torch tensors of the device.

    One execution context, guarded by a lock, runs on a stream of its own that takes its turn in the caller's current
    stream; its activation memory is torch's. A call returns before the GPU is done, as torch's own do.
    """

    runtime = "tensorrt"
    module: ClassVar[str] = "tensorrt"
    extra: ClassVar[str] = "gpu"

    def __init__(self, manifest: Manifest, engine: Engine, loaded: LoadedEngine, stream: SideStream, graphs: int = 0):
        """
        Args:
            loaded: the engine file, deserialised on the stream's device.
            graphs: how many shapes may have a CUDA graph at a time.

        Raises:
            BundleError: its inputs, outputs or profiles are not what the manifest says.
        """
        super().__init__(manifest, engine, stream.device)
        self._dtype = PRECISION_DTYPES[engine.precision]
        self._batch = str(manifest.inputs[0].shape[0])
        self._version = loaded.library.__version__
        self._check_engine(loaded)
        self._loaded: LoadedEngine | None = loaded
        self._stream = stream
        self._graphs = Graphs(graphs, stream)
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._context: ExecutionContext | None = self._new_context(loaded)
        self._profile: int | None = None  # of the context

    @classmethod
    def open(cls, bundle: Bundle, engine: Engine, device: torch.device) -> TensorRTRunner:
        reason = cls.unavailable(device)
        if reason:
            raise RuntimeUnavailableError(f"{cls.runtime} cannot run on {device} here: {reason}")
        library = library_from_name(cls.module)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        try:
            misfit = cls.misfit(engine, device)
            if misfit:
                raise BundleError(f"{engine.file} {misfit}")
            with torch.cuda.device(device):
                loaded = LoadedEngine(library, bundle.file(engine.file).read_bytes(), engine.file)
                return cls(bundle.manifest, engine, loaded, SideStream(device), graphs_wanted())
        except BundleError as error:
            found = f"{library.__version__} and {torch.cuda.get_device_name(device)} with {capability_of(device)}"
            remedy = build_command(bundle.manifest.source.name, bundle.path, cls.runtime, engine.precision)
            raise BundleError(
                f"{error}. It was built for {engine.runtime} {engine.version} and compute capability "
                f"{', '.join(engine.architectures) or 'any'}; found {found}. Build it again: {remedy}"
            ) from None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return "it runs on CUDA devices, and torch sees none"
        if device.type != "cuda":
            return "it runs on CUDA devices alone"
        if device.index is not None and device.index >= torch.cuda.device_count():
            return f"torch sees {torch.cuda.device_count()} CUDA devices"
        if importlib.util.find_spec(cls.module) is None:
            return f"it is not installed: pip install 'turbovit[{cls.extra}]'"
        try:
            library_from_name(cls.module)
        except Exception as error:  # whatever loading its shared libraries raises
            return f"{cls.module} does not import: {error}"
        return None

    @classmethod
    def misfit(cls, engine: Engine, device: torch.device) -> str | None:
        version = library_from_name(cls.module).__version__
        if engine.version.split(".")[0] != version.split(".")[0]:
            return f"was compiled by {engine.runtime} {engine.version}, here is another major version: {version}"
        return super().misfit(engine, device)

    @property
    def description(self) -> str:
        return f"{self.runtime} {self._version} on {self.device}"

    def close(self) -> None:
        with self._lock:
            if self._loaded is not None:
                self._stream.synchronize()
                self._graphs.clear()
                self._context = self._loaded = None
                self._memory = torch.empty(0)

    def _infer(self, inputs: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        symbols = self._symbols(inputs)
        rows = rows_per_run(self.engine.profiles, symbols, self._batch)
        if rows == symbols[self._batch]:
            return self._run_once(inputs, shapes, profile_for(self.engine.profiles, symbols) or 0)
        parts = [self._part(inputs, start, rows) for start in range(0, symbols[self._batch], rows)]
        outputs = [self._infer(part, self._output_shapes(part)) for part in parts]
        return {name: torch.cat([part[name] for part in outputs]) for name in shapes}

    def _run_once(self, inputs: dict[str, Tensor], shapes: Shapes, profile: int) -> dict[str, Tensor]:
        inputs = {name: _aligned(tensor) for name, tensor in inputs.items()}
        # Made on the caller's stream: freed there too, after what the turn adds to it.
        outputs = {name: torch.empty(shape, dtype=self._dtype, device=self.device) for name, shape in shapes.items()}
        with self._lock, self._stream.turn():
            if self._loaded is None or self._context is None:
                raise EngineRunError(f"{self.description} was closed")
            self._loaded.messages.clear()
            graph = self._graphs.get(inputs, lambda: self._graph(inputs, outputs, profile))
            if graph is not None:
                graph.run(inputs, outputs)
            else:
                self._enqueue(self._context, inputs, outputs, None if profile == self._profile else profile)
                self._profile = profile
        return outputs

    def _enqueue(
        self,
        context: ExecutionContext,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        profile: int | None,
    ) -> None:
        """Queue a run on a context, which `profile` switches to another profile where it is not None."""
        if profile is not None:
            switched = context.set_optimization_profile_async(profile, self._stream.handle)
            self._require(switched, f"does not take profile {profile}")
        for name, tensor in inputs.items():
            shape = tuple(tensor.shape)
            self._require(context.set_input_shape(name, shape), f"does not take {name} of shape {shape}")
        for name, tensor in {**inputs, **outputs}.items():
            self._require(context.set_tensor_address(name, tensor.data_ptr()), f"does not take the address of {name}")
        missing = context.infer_shapes()
        self._require(not missing, f"lacks {missing}")
        for name, tensor in outputs.items():  # it would write beyond a buffer that is too small
            shape = tuple(context.get_tensor_shape(name))
            self._require(shape == tuple(tensor.shape), f"gives {name} {shape}, expected {tuple(tensor.shape)}")
        memory = self._memory_of(context.update_device_memory_size_for_shapes())
        context.set_device_memory(memory.data_ptr(), memory.numel())
        self._execute(context)

    def _execute(self, context: ExecutionContext) -> None:
        self._require(context.execute_async_v3(self._stream.handle), "failed")

    def _graph(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], profile: int) -> ShapeGraph:
        """A graph with its own context, as TensorRT wants it: a captured context must not be changed afterwards."""
        assert self._loaded is not None
        context = self._new_graph_context(self._loaded)
        own_inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        own_outputs = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
        self._enqueue(context, own_inputs, own_outputs, profile)  # flushes what a capture must not hold
        replay = self._stream.captured(lambda: self._execute(context))
        return ShapeGraph(own_inputs, own_outputs, replay, keep=(context, self._memory))

    def _memory_of(self, size: int) -> Tensor:
        """At least `size` bytes for activations. All contexts share them: they run on one stream."""
        if self._memory.numel() < max(size, 1):
            self._memory = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
        return self._memory

    def _new_context(self, loaded: LoadedEngine) -> ExecutionContext:
        strategy = loaded.library.ExecutionContextAllocationStrategy.USER_MANAGED
        return self._created(loaded, loaded.engine.create_execution_context(strategy))

    def _new_graph_context(self, loaded: LoadedEngine) -> ExecutionContext:
        return self._new_context(loaded)

    def _created(self, loaded: LoadedEngine, context: ExecutionContext | None) -> ExecutionContext:
        if context is None:
            raise BundleError(f"{self.engine.file} loads, but gives no execution context: {loaded.last_error}")
        return context

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            reason = self._loaded.last_error if self._loaded is not None else "it was closed"
            raise EngineRunError(f"{self.engine.file} on {self.description} {what}: {reason}")

    def _symbols(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        symbols: dict[str, int] = {}
        for spec in self.manifest.inputs:
            bind(spec.shape, inputs[spec.name].shape, symbols)
        return symbols

    def _output_shapes(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        symbols = self._symbols(inputs)
        return {spec.name: resolve(spec.shape, symbols) for spec in self.manifest.outputs}

    def _part(self, inputs: Mapping[str, Tensor], start: int, rows: int) -> dict[str, Tensor]:
        """Rows of the batch from `start` on; inputs that are the same for all rows as they are."""
        batched = {spec.name for spec in self.manifest.inputs if spec.shape[0] == self._batch}
        return {name: t[start : start + rows] if name in batched else t for name, t in inputs.items()}

    def _check_engine(self, loaded: LoadedEngine) -> None:
        engine = loaded.engine
        expected = {spec.name: DTYPES[spec.dtype] for spec in self.manifest.inputs}
        expected |= {spec.name: self._dtype for spec in self.manifest.outputs}
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        if sorted(names) != sorted(expected):
            raise BundleError(f"{self.engine.file} has inputs and outputs {sorted(names)}, expected {sorted(expected)}")
        for name, dtype in expected.items():
            found = engine.get_tensor_dtype(name).name
            if DATA_TYPES.get(found) != dtype:
                raise BundleError(f"{self.engine.file} has {name} as {found}, expected {dtype}")
        profiles = len(self.engine.profiles) or 1
        if engine.num_optimization_profiles != profiles:
            raise BundleError(
                f"{self.engine.file} has {engine.num_optimization_profiles} optimisation profiles, expected {profiles}"
            )


class TensorRTRTXRunner(TensorRTRunner):
    """A TensorRT-RTX engine."""

    runtime = "tensorrt_rtx"
    module = "tensorrt_rtx"
    extra = "rtx"

    def _new_graph_context(self, loaded: LoadedEngine) -> ExecutionContext:
        """Kernels are made for the shape at once: a graph would keep those that stand in until they are there."""
        engine, library = cast(ConfigurableEngine, loaded.engine), cast(RTXLibrary, loaded.library)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(library.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = library.DynamicShapesKernelSpecializationStrategy.EAGER
        return self._created(loaded, engine.create_execution_context(config))


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
