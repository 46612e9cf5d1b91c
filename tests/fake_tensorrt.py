"""A stand-in for the module ``tensorrt`` that has the narrow interface that turbovit uses, and nothing else.

An "engine" computes with a Python function on host memory, which it reaches as the real one reaches the GPU's: by
address alone. It is as strict as the real one: what must be set before a run must be set, buffers must be aligned,
activations need memory, and one context in two runs at once is an error.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from turbovit.engines.bundle import Engine, Manifest
from turbovit.engines.cuda_graphs import SideStream
from turbovit.engines.runner import DTYPES, PRECISION_DTYPES
from turbovit.engines.shapes import bind, resolve
from turbovit.engines.trt_library import DATA_TYPES, LoadedEngine
from turbovit.engines.trt_runner import TensorRTRunner

Compute = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
NAMES = {dtype: name for name, dtype in DATA_TYPES.items()}
ALIGNMENT = 64  # what torch gives on the host; on a GPU it gives 512, and TensorRT wants 256
WORKSPACE = 1000  # bytes that a row needs


@dataclass(frozen=True)
class Named:
    """An entry of an enumeration."""

    name: str


class Strategies:
    STATIC = Named("STATIC")
    USER_MANAGED = Named("USER_MANAGED")
    EAGER = Named("EAGER")


class FakeLogger:
    """As the library's ILogger: subclasses override `log`."""

    def __init__(self) -> None:
        pass

    def log(self, severity: Named, msg: str) -> None:
        raise NotImplementedError


@dataclass
class FakeTensorRT:
    """The module: its engines are `engine`, or do not load where that is None."""

    engine: FakeEngine | None
    error: str = ""
    __version__: str = "10.14.1"
    ILogger: type = FakeLogger
    ExecutionContextAllocationStrategy: type = Strategies
    DynamicShapesKernelSpecializationStrategy: type = Strategies
    data: bytes = b""

    def Runtime(self, logger: Any) -> FakeTensorRT:  # noqa: N802 (the library's name)
        assert isinstance(logger, FakeLogger)
        self.logger = logger
        if self.engine is not None:
            self.engine.logger = logger
        return self

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> FakeEngine | None:
        self.data = serialized_engine
        self.logger.log(Named("INFO"), "Loaded engine size: 1 MiB")
        if self.engine is None:
            self.logger.log(Named("ERROR"), self.error)
        return self.engine


@dataclass
class FakeEngine:
    """An engine of `manifest` that computes with `compute`."""

    manifest: Manifest
    entry: Engine
    compute: Compute
    contexts: list[FakeContext] = field(default_factory=list)
    logger: Any = None

    def __post_init__(self) -> None:
        self.dtypes = {spec.name: DTYPES[spec.dtype] for spec in self.manifest.inputs}
        self.dtypes |= {spec.name: PRECISION_DTYPES[self.entry.precision] for spec in self.manifest.outputs}
        self.num_io_tensors = len(self.dtypes)
        self.num_optimization_profiles = len(self.entry.profiles) or 1

    def get_tensor_name(self, index: int) -> str:
        return list(self.dtypes)[index]

    def get_tensor_dtype(self, name: str) -> Named:
        return Named(NAMES[self.dtypes[name]])

    def create_execution_context(self, strategy: Any) -> FakeContext:
        config = strategy if isinstance(strategy, FakeConfig) else FakeConfig(strategy)
        assert config.strategy is Strategies.USER_MANAGED
        self.contexts.append(FakeContext(self, config))
        return self.contexts[-1]

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig()


@dataclass
class FakeConfig:
    """As TensorRT-RTX's IRuntimeConfig."""

    strategy: Named = Strategies.STATIC
    dynamic_shapes_kernel_specialization_strategy: Named | None = None

    def set_execution_context_allocation_strategy(self, strategy: Named) -> None:
        self.strategy = strategy


class FakeContext:
    """An execution context; `captures` turns a run into a recording, as a stream under capture does."""

    def __init__(self, engine: FakeEngine, config: FakeConfig):
        self.engine = engine
        self.config = config
        self.profile: int | None = None
        self.profiles_set: list[int] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)
        self.runs = 0
        self.fails_with = ""
        self._running = threading.Lock()

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == FakeStream.HANDLE
        self.profiles_set.append(profile_index)
        self.shapes = {}
        self.profile = profile_index
        return profile_index < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        self.shapes[name] = shape
        profiles = self.engine.entry.profiles
        if not profiles:
            return True
        spec = next(spec for spec in self.engine.manifest.inputs if spec.name == name)
        symbols: dict[str, int] = {}
        assert bind(spec.shape, shape, symbols) is None
        ranges = profiles[self.profile].ranges
        fits = all(ranges[symbol][0] <= value <= ranges[symbol][2] for symbol, value in symbols.items())
        if not fits:
            self.engine.logger.log(Named("ERROR"), f"{name} {shape} is outside profile {self.profile}")
        return fits

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % ALIGNMENT == 0, f"{name} is not aligned"
        self.addresses[name] = memory
        return name in self.engine.dtypes

    def infer_shapes(self) -> list[str]:
        return [spec.name for spec in self.engine.manifest.inputs if spec.name not in self.shapes]

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        spec = next(spec for spec in self.engine.manifest.outputs if spec.name == name)
        return resolve(spec.shape, self._symbols())

    def update_device_memory_size_for_shapes(self) -> int:
        return WORKSPACE * prod(self._symbols().values())

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory
        self.memory = (memory, size)

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == FakeStream.HANDLE
        if self.fails_with:
            self.engine.logger.log(Named("ERROR"), self.fails_with)
            return False
        if FakeStream.recording is not None:
            FakeStream.recording.append(self._work(dict(self.shapes), dict(self.addresses)))
        else:
            self._work(self.shapes, self.addresses)()
        return True

    def _work(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> Callable[[], None]:
        needed = self.update_device_memory_size_for_shapes()
        memory, size = self.memory
        assert size >= needed, f"{size} bytes for activations, {needed} are needed"

        def run() -> None:
            assert self._running.acquire(blocking=False), "one context in two runs at once"
            self.runs += 1
            ctypes.memset(memory, self.runs % 256, size)  # activations
            given = {name: self._tensor(name, shapes[name], addresses[name]).clone() for name in shapes}
            time.sleep(0.001)
            for name, value in self.engine.compute(given).items():
                self._tensor(name, tuple(value.shape), addresses[name]).copy_(value)
            self._running.release()

        return run

    def _tensor(self, name: str, shape: tuple[int, ...], address: int) -> Tensor:
        dtype = self.engine.dtypes[name]
        buffer = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(address)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def _symbols(self) -> dict[str, int]:
        symbols: dict[str, int] = {}
        for spec in self.engine.manifest.inputs:
            assert bind(spec.shape, self.shapes[spec.name], symbols) is None
        return symbols


class FakeStream(SideStream):
    """A stream that runs at once, on the host; `events` says in which order it was used."""

    HANDLE = 4711
    recording: list[Callable[[], None]] | None = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.events: list[str] = []

    @property
    def handle(self) -> int:
        return self.HANDLE

    @contextmanager
    def turn(self) -> Iterator[None]:
        assert self.events[-1:] != ["turn"], "a turn in a turn"
        self.events.append("turn")
        try:
            yield
        finally:
            self.events.append("end of turn")

    def synchronize(self) -> None:
        self.events.append("synchronise")

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        recorded: list[Callable[[], None]] = []
        FakeStream.recording = recorded
        try:
            work()
        finally:
            FakeStream.recording = None
        self.events.append("capture")
        return lambda: [step() for step in recorded] and None


def fake_runner(
    manifest: Manifest,
    entry: Engine,
    compute: Compute,
    runner_class: type[TensorRTRunner] = TensorRTRunner,
    graphs: int = 0,
) -> tuple[TensorRTRunner, FakeEngine]:
    """A runner over an engine that computes with `compute`, and that engine."""
    engine = FakeEngine(manifest, entry, compute)
    loaded = LoadedEngine(FakeTensorRT(engine), b"engine", entry.file)  # type: ignore[arg-type]
    return runner_class(manifest, entry, loaded, FakeStream(), graphs), engine
