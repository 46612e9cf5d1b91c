"""What is used of TensorRT and TensorRT-RTX, as types, and loading an engine with either.

Neither library ships stubs. The protocols are the whole of what is called; tests hold them against the real classes.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from turbovit.engines.errors import BundleError

logger = logging.getLogger("turbovit")

# The libraries' names of the types of an engine's inputs and outputs.
DATA_TYPES = {
    "UINT8": torch.uint8,
    "INT32": torch.int32,
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
}
_ERRORS = ("INTERNAL_ERROR", "ERROR")
_KEPT_MESSAGES = 3


class ExecutionContext(Protocol):
    """An execution context whose activation memory is the caller's."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...
    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def infer_shapes(self) -> list[str]: ...
    def get_tensor_shape(self, name: str) -> Sequence[int]: ...
    def update_device_memory_size_for_shapes(self) -> int: ...
    def set_device_memory(self, memory: int, size: int) -> None: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...


class DataType(Protocol):
    """An entry of the library's enumeration of types."""

    @property
    def name(self) -> str: ...


class RuntimeConfig(Protocol):
    """How an execution context of TensorRT-RTX shall behave."""

    dynamic_shapes_kernel_specialization_strategy: Any

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None: ...


class CudaEngine(Protocol):
    """A deserialised engine."""

    @property
    def num_io_tensors(self) -> int: ...
    @property
    def num_optimization_profiles(self) -> int: ...
    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_dtype(self, name: str) -> DataType: ...
    def create_execution_context(self, strategy: Any) -> ExecutionContext: ...


class ConfigurableEngine(CudaEngine, Protocol):
    """An engine of TensorRT-RTX, which makes its contexts by a configuration too."""

    def create_runtime_config(self) -> RuntimeConfig: ...


class Runtime(Protocol):
    """What deserialises engines. Must outlive them."""

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> CudaEngine | None: ...


class Library(Protocol):
    """The module ``tensorrt`` or ``tensorrt_rtx``."""

    __version__: str
    ILogger: Any
    ExecutionContextAllocationStrategy: Any

    def Runtime(self, logger: Any) -> Runtime: ...  # noqa: N802 (the library's name)


class RTXLibrary(Library, Protocol):
    """The module ``tensorrt_rtx``, which has a choice of its own."""

    DynamicShapesKernelSpecializationStrategy: Any


def library_from_name(module: str) -> Library:
    """The imported module; whatever its import raises where it or its shared libraries are missing."""
    return cast(Library, importlib.import_module(module))


class LoadedEngine:
    """A deserialised engine with what must live as long as it does.

    Attributes:
        library: that it was loaded with.
        engine: the library's own object.
        messages: the last errors that the library reported.
    """

    def __init__(self, library: Library, data: bytes, name: str):
        """Deserialise.

        Args:
            data: the engine file's bytes.
            name: of the file, for errors.

        Raises:
            BundleError: the library does not take it; with the library's own words.
        """
        self.library = library
        self.messages: deque[str] = deque(maxlen=_KEPT_MESSAGES)
        self._logger = _logger(library, self.messages)
        self._runtime = library.Runtime(self._logger)
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise BundleError(f"{name} does not load: {self.last_error}")
        self.engine = engine

    @property
    def last_error(self) -> str:
        """The library's own words on what failed."""
        return "; ".join(self.messages) or "the library gives no reason"


def _logger(library: Library, messages: deque[str]) -> Any:
    """The library's logger interface: errors are kept for whoever raises, everything goes to the debug log."""

    class KeepErrors(library.ILogger):  # type: ignore[name-defined]  # its class is known at run time alone
        def __init__(self) -> None:
            library.ILogger.__init__(self)  # pybind11 wants it by name

        def log(self, severity: Any, msg: str) -> None:
            if severity.name in _ERRORS:
                messages.append(msg)
            logger.debug("%s: %s", severity.name, msg)

    return KeepErrors()
