"""The base class of everything that runs a tower: it checks what goes in and out; subclasses compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType

import torch

from turbovit.engines.bundle import Bundle, Engine, Manifest
from turbovit.engines.errors import EngineInputError
from turbovit.engines.shapes import bind, resolve

Tensors = Mapping[str, torch.Tensor]

DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
PRECISION_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, contiguous, on `device`.

    From the host to a CUDA device through pinned memory, so that the copy is queued and nobody waits for it; torch
    keeps that memory until the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device).contiguous()


def capability_of(device: torch.device) -> str:
    """Compute capability of a GPU, such as ``8.9``."""
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


class Runner(ABC):
    """Runs one engine of a bundle. Safe to call from several threads.

    Outputs are owned by the caller: a later call never changes them.

    Attributes:
        runtime: the name of the runtime, as on the command line.
        device: where inputs are taken from and outputs are left.
    """

    runtime: str

    def __init__(self, manifest: Manifest, engine: Engine, device: torch.device):
        self.manifest = manifest
        self.engine = engine
        self.device = device

    @classmethod
    @abstractmethod
    def open(cls, bundle: Bundle, engine: Engine, device: torch.device) -> Runner:
        """Load `engine`.

        Raises:
            RuntimeUnavailableError: the runtime or device is not on this machine.
            BundleError: the engine's file does not load.
        """

    @classmethod
    @abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Why this runtime cannot run on `device` here; None where it can."""

    @classmethod
    def misfit(cls, engine: Engine, device: torch.device) -> str | None:
        """Why `engine` cannot load on `device`, as far as its manifest tells; None where it can.

        Args:
            device: one that `unavailable` has nothing against.
        """
        if device.type != "cuda" or not engine.architectures:
            return None
        here = capability_of(device)
        if here in engine.architectures:
            return None
        return f"was compiled for compute capability {', '.join(engine.architectures)}, this GPU has {here}"

    @property
    @abstractmethod
    def description(self) -> str:
        """Runtime, version and device, for logs and certificates."""

    def run(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run the tower once.

        Args:
            inputs: one tensor for every input of the manifest, on any device.

        Returns:
            One tensor for every output of the manifest, on `device`, in the engine's precision.

        Raises:
            EngineInputError: a name, dtype or shape is wrong, or a limit is exceeded.
        """
        symbols = self._check(inputs)
        placed = {name: on_device(tensor, self.device) for name, tensor in inputs.items()}
        shapes = {spec.name: resolve(spec.shape, symbols) for spec in self.manifest.outputs}
        outputs = self._infer(placed, shapes)
        for name, shape in shapes.items():
            if tuple(outputs[name].shape) != shape:
                raise AssertionError(f"{self.description} gave {name} {tuple(outputs[name].shape)}, expected {shape}")
        return outputs

    def close(self) -> None:  # noqa: B027 (most runners are freed with their last reference)
        """Free what the engine holds. The runner cannot be used afterwards."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _infer(self, inputs: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Compute. `inputs` are checked, contiguous and on `device`; `shapes` are the outputs'."""

    def _check(self, inputs: Tensors) -> dict[str, int]:
        names = [spec.name for spec in self.manifest.inputs]
        if sorted(inputs) != sorted(names):
            raise EngineInputError(f"inputs are {sorted(inputs)}, expected {sorted(names)}")
        symbols: dict[str, int] = {}
        for spec in self.manifest.inputs:
            tensor = inputs[spec.name]
            if tensor.dtype != DTYPES[spec.dtype]:
                raise EngineInputError(f"input {spec.name} is {tensor.dtype}, expected {spec.dtype}")
            reason = bind(spec.shape, tensor.shape, symbols)
            if reason:
                raise EngineInputError(f"input {spec.name} has shape {tuple(tensor.shape)}: {reason}")
        for symbol, limit in self.manifest.limits.items():
            if symbols[symbol] > limit:
                raise EngineInputError(
                    f"{symbols[symbol]} {symbol} in one run, this bundle was built for at most {limit}: "
                    f"send fewer, or build it with a larger limit"
                )
        return symbols
