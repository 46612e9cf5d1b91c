"""ONNX Runtime, on a CPU or a CUDA device."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from turbovit.engines.bundle import Bundle, Engine, Manifest
from turbovit.engines.errors import BundleError, RuntimeUnavailableError
from turbovit.engines.runner import PRECISION_DTYPES, Runner

if TYPE_CHECKING:
    import onnxruntime

# ONNX's TensorProto element types, which IO binding takes so that bfloat16 needs no numpy dtype.
_ONNX_TYPES = {torch.uint8: 2, torch.int32: 6, torch.float32: 1, torch.float16: 10, torch.bfloat16: 16}
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True)
class _PathOnDisk(os.PathLike[bytes]):
    """A path as the file system has it: onnxruntime writes a str as UTF-8, which not every locale's paths are."""

    path: Path

    def __fspath__(self) -> bytes:
        return os.fsencode(self.path)


class OnnxRuntimeRunner(Runner):
    """An ONNX graph of the bundle in an ONNX Runtime session, with IO binding on torch's memory.

    On CUDA nothing passes through the host: inputs and outputs are torch tensors of that device.
    """

    runtime = "onnxruntime"

    def __init__(self, manifest: Manifest, engine: Engine, device: torch.device, session: onnxruntime.InferenceSession):
        super().__init__(manifest, engine, device)
        self._session = session
        self._dtype = PRECISION_DTYPES[engine.precision]

    @classmethod
    def open(cls, bundle: Bundle, engine: Engine, device: torch.device) -> OnnxRuntimeRunner:
        reason = cls.unavailable(device)
        if reason:
            raise RuntimeUnavailableError(f"onnxruntime cannot run on {device} here: {reason}")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only: its warnings are about graph optimisations
        # Threads that spin after a run keep their cores from what comes next: torch's, and those of other sessions.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        provider: str | tuple[str, dict[str, str]] = _PROVIDERS[device.type]
        if device.type == "cuda":
            # TF32, its default, has 10 bits of mantissa: float32 would miss its certificate's bound.
            provider = (_PROVIDERS["cuda"], {"device_id": str(device.index or 0), "use_tf32": "0"})
        path = bundle.file(engine.file)
        try:
            session = onnxruntime.InferenceSession(_PathOnDisk(path), options, providers=[provider])
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            reason = str(error).replace(str(path), path.name)  # while a bundle is built it lies elsewhere
            raise BundleError(f"onnxruntime {onnxruntime.__version__} cannot load {path.name}: {reason}") from error
        if session.get_providers()[0] != _PROVIDERS[device.type]:
            raise RuntimeUnavailableError(
                f"onnxruntime fell back to {session.get_providers()[0]}: {_PROVIDERS[device.type]} did not start, "
                f"check that CUDA and cuDNN fit onnxruntime-gpu {onnxruntime.__version__}"
            )
        return cls(bundle.manifest, engine, device, session)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if importlib.util.find_spec("onnxruntime") is None:
            return "it is not installed: pip install 'turbovit[cpu]' or 'turbovit[gpu]'"
        import onnxruntime

        if device.type == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if _PROVIDERS.get(device.type) not in onnxruntime.get_available_providers():
            return f"this onnxruntime has {onnxruntime.get_available_providers()}: pip install 'turbovit[gpu]'"
        return None

    @property
    def description(self) -> str:
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__} on {self.device}"

    def _infer(self, inputs: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        outputs = {name: torch.empty(shape, dtype=self._dtype, device=self.device) for name, shape in shapes.items()}
        binding = self._session.io_binding()
        index = self.device.index or 0
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                bind(name, self.device.type, index, _ONNX_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        if self.device.type == "cuda":
            # The session has its own stream: what torch has queued for these tensors must be there first.
            torch.cuda.current_stream(self.device).synchronize()
        binding.synchronize_inputs()
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return outputs
