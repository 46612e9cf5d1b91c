"""An engine config of LMDeploy's that takes turbovit along, into whatever process the engine runs in.

LMDeploy's server runs its PyTorch engine in a spawned child, where nothing exists that was put in place here. The
engine config is pickled into it: this one puts turbovit in place where it is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbovit.engines.errors import CheckpointError, UnsupportedBackendError, UnsupportedModelError
from turbovit.engines.families import FamilyRow, family_from_architecture, load
from turbovit.lmdeploy_ext.bundle_choice import COMPILED_VISION_VARIABLE, bundle_folder
from turbovit.lmdeploy_ext.capability import own_language_half
from turbovit.lmdeploy_ext.memory import capabilities
from turbovit.lmdeploy_ext.pytorch_engine import CUSTOM_MODULE_MAP_FILE, has_compiled_vision
from turbovit.lmdeploy_ext.turbomind_models import NEVER_RUN

if TYPE_CHECKING:
    from turbovit.export.checkpoint import Checkpoint

_VARIABLES = "TURBOVIT_"  # what the names of turbovit's environment variables begin with


def prepared_engine_config(model: str, config: Any) -> Any:
    """The config to start LMDeploy's engine with; its PyTorch engine's runs the compiled vision tower of `model`.

    `config` itself for TurboMind, and where the model is none of ours, its vision half is not wanted
    (``language_model_only``), or ``TURBOVIT_COMPILED_VISION=0``.

    Args:
        model: a checkpoint folder.
        config: a `PytorchEngineConfig` or `TurbomindEngineConfig`.

    Raises:
        BundleError: no bundle fits the model; gives the command that builds one.
        UnsupportedBackendError: the config asks for what a compiled tower, or a language half of ours, cannot do.
    """
    from lmdeploy.messages import TurbomindEngineConfig

    if isinstance(config, TurbomindEngineConfig):
        check_turbomind_start(model, config)
        return config
    off = os.environ.get(COMPILED_VISION_VARIABLE) == "0"
    if off or config.language_model_only or isinstance(config, _config_class()) or served_family(model) is None:
        return config
    leave = f"set {COMPILED_VISION_VARIABLE}=0 for LMDeploy's own vision code"
    if config.device_type != "cuda":
        raise UnsupportedBackendError(
            f"the compiled vision tower runs beside LMDeploy's PyTorch engine on cuda, got device_type "
            f"{config.device_type!r}: {leave}"
        )
    if config.custom_module_map is not None and not has_compiled_vision(config):
        raise UnsupportedBackendError(
            f"the engine config has a custom_module_map of its own, {config.custom_module_map}, and the compiled "
            f"vision tower needs that place: leave it out, or {leave}"
        )
    bundle_folder(model)  # here, where its error is seen, and not in a child
    return _config_from_values({**vars(config), "custom_module_map": str(CUSTOM_MODULE_MAP_FILE)})


def check_turbomind_start(model: str, config: Any) -> None:
    """Say what is to know of a language half of ours, where TurboMind is about to start with one.

    Raises:
        UnsupportedBackendError: it has no kernels for its dtype on a GPU here.
    """
    checkpoint = _served_checkpoint(model)
    half = None if checkpoint is None else own_language_half(str(checkpoint.architecture))
    if checkpoint is None or half is None:
        return
    stored = load(f"{half.limits}:stored_dtype")(checkpoint.config)
    for capability in sorted(capabilities(config.devices)):
        dtype = load(f"{half.limits}:dtype_on")(capability, config.dtype, stored)
        problem = load(f"{half.limits}:dtype_problem")(dtype, capability)
        if problem:
            raise UnsupportedBackendError(problem)
    logging.getLogger("turbovit").warning(
        f"TurboMind with turbovit's own language half, which {NEVER_RUN}. The other route is LMDeploy's PyTorch "
        f"engine (--backend pytorch)"
    )


def served_family(model: str | Path) -> FamilyRow | None:
    """The family that serves a checkpoint; None where there is none, or no checkpoint that turbovit can read."""
    checkpoint = _served_checkpoint(model)
    return None if checkpoint is None else family_from_architecture(checkpoint.architecture)


def _served_checkpoint(model: str | Path) -> Checkpoint | None:
    from turbovit.export.checkpoint import open_checkpoint

    with contextlib.suppress(CheckpointError, UnsupportedModelError):
        checkpoint = open_checkpoint(model)
        family_from_architecture(checkpoint.architecture)
        return checkpoint
    return None


def config_from_pickle(values: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    """The config in the process that unpickles it, with turbovit in place there.

    Args:
        values: its attributes.
        variables: turbovit's environment variables where it was pickled.
    """
    from turbovit.lmdeploy_ext.plugin import install

    os.environ.update(variables)  # a child has them already, a worker on another machine has not
    install()
    return _config_from_values(values)


def _config_from_values(values: Mapping[str, Any]) -> Any:
    config: Any = object.__new__(_config_class())
    vars(config).update(values)  # checked when the config was first made
    return config


@functools.cache
def _config_class() -> type:
    from lmdeploy.messages import PytorchEngineConfig

    class CompiledVisionEngineConfig(PytorchEngineConfig):
        """LMDeploy's config; unpickling it puts turbovit in place."""

        def __reduce__(self) -> tuple[Any, ...]:
            variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
            return config_from_pickle, (vars(self), variables)

    return CompiledVisionEngineConfig
