"""What stands where LMDeploy's PyTorch engine stands in the process that LMDeploy spawns for it: it builds the model as
the engine does, but on the CPU, and says what it found there."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any


class SwappedEngine:
    """Unpickled in the child, it puts `ReportingEngine` where LMDeploy takes its engine from."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _swap_engine, ()


def _swap_engine() -> None:
    import lmdeploy.pytorch.engine

    lmdeploy.pytorch.engine.Engine = ReportingEngine


@dataclass
class Report:
    """What was found in the child."""

    process: int
    config_class: str
    enable_mp_engine: bool
    vision_class: str
    workers_get_the_map: bool
    model_class: str
    vision_parameters: list[str]
    features: Any
    max_batch_size: int = 1


@dataclass
class Failure:
    """Why there is no report."""

    trace: str
    max_batch_size: int = 1


class ReportingEngine:
    """As much of LMDeploy's `Engine` as its worker asks of it."""

    @classmethod
    def from_pretrained(cls, model_path: str, engine_config: Any, **_: Any) -> ReportingEngine:
        engine = cls()
        try:
            engine.engine_config = report(model_path, engine_config)
        except Exception:  # LMDeploy's client never ends where its server has died
            engine.engine_config = Failure(traceback.format_exc())
        return engine

    engine_config: Report | Failure

    def start_loop(self) -> None:
        pass

    def get_engine_config(self) -> Report | Failure:
        return self.engine_config

    def close(self) -> None:
        pass

    async def wait_tasks(self) -> None:
        pass


def report(model_path: str, engine_config: Any) -> Report:
    import torch
    from lmdeploy.archs import get_model_arch
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase
    from lmdeploy.pytorch.models.patch import update_custom_module_map
    from lmdeploy.vl.model.base import VISION_MODELS

    config = get_model_arch(model_path)[1]
    vision = next(module for module in VISION_MODELS.module_dict.values() if module.match(config))
    update_custom_module_map(engine_config.custom_module_map)
    model = model_on_cpu(model_path)
    pixels = torch.arange(3 * 896 * 896).remainder(251).to(torch.uint8).view(1, 3, 896, 896)
    return Report(
        process=os.getpid(),
        config_class=type(engine_config).__name__,
        enable_mp_engine=engine_config.enable_mp_engine,
        vision_class=vision.__module__,
        workers_get_the_map=hasattr(ExecutorBase.__init__, "__wrapped__"),
        model_class=f"{type(model).__module__}.{type(model).__name__}",
        vision_parameters=[name for name, _ in model.named_parameters() if "vision" in name],
        features=model.vision_tower(pixels).numpy(),
    )


def model_on_cpu(model_path: str) -> Any:
    """The model that LMDeploy's PyTorch engine would build, with nothing loaded into its language half."""
    import torch
    from lmdeploy.pytorch.config import ModelConfig
    from lmdeploy.pytorch.model_inputs import BuildModelContext
    from lmdeploy.pytorch.models.patch import build_model_from_hf_config

    config = ModelConfig.from_pretrained(model_path).hf_config
    # The sample has the default rope; the gemma of 0.18 reads a factor that only the larger ones have.
    config.text_config.rope_parameters["full_attention"].setdefault("factor", 1.0)
    with torch.inference_mode():
        return build_model_from_hf_config(
            config, dtype=torch.float32, device=torch.device("cpu"), build_model_ctx=BuildModelContext()
        )
