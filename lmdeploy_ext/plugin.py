"""Putting the compiled vision models into LMDeploy, and loading one without a language engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbovit.engines.errors import RuntimeUnavailableError
from turbovit.engines.families import family_from_architecture

_installed = False


def install() -> None:
    """Make LMDeploy of this process use the compiled vision models. A second call does nothing.

    Replaces the families' classes in LMDeploy's registry, its image loading and the steps around its prompts, and
    gives TurboMind the language halves that it lacks and we have. Where TurboMind cannot run the model, a pipeline
    then refuses instead of falling back in silence; one with a `PytorchEngineConfig` runs the compiled vision tower
    (``TURBOVIT_COMPILED_VISION=0`` leaves it as LMDeploy has it).

    Raises:
        RuntimeUnavailableError: LMDeploy is not installed, or not built as it was in 0.18.
    """
    global _installed
    if _installed:
        return
    from turbovit.lmdeploy_ext import adapter, deepseek_vl2_config, media_adapter
    from turbovit.lmdeploy_ext.chat_template import template_refusal
    from turbovit.lmdeploy_ext.engine_config import prepared_engine_config
    from turbovit.lmdeploy_ext.pytorch_engine import adapter as engine_adapter
    from turbovit.lmdeploy_ext.turbomind_models import adapter as turbomind_adapter

    problems = adapter.check(adapter.PRIVATE_PARTS | media_adapter.PRIVATE_PARTS)
    if problems:
        raise RuntimeUnavailableError(
            f"turbovit needs lmdeploy 0.18 (pip install 'turbovit[lmdeploy]'); in the one here {'; '.join(problems)}"
        )
    deepseek_vl2_config.register()
    adapter.register_vision_models()
    media_adapter.patch_media_loading()
    adapter.patch_prompt_inputs(compiled_model)
    adapter.patch_encoder_options(compiled_model)
    adapter.patch_chat_template(template_refusal)
    adapter.quiet_refusals()
    adapter.patch_bare_ids(compiled_model)
    adapter.patch_backend_choice(turbomind_start_refusal)
    adapter.patch_pipeline_config(prepared_engine_config)
    engine_adapter.patch_vision_loading(require_engine_parts)
    engine_adapter.patch_module_map()
    turbomind_adapter.register()
    _installed = True


def compiled_model(image_encoder: Any) -> Any:
    """The vision model of LMDeploy's `ImageEncoder`, if it is one that encodes with an engine; else None."""
    from turbovit.lmdeploy_ext.base import CompiledVisionModel

    model = getattr(image_encoder, "model", None)
    return model if isinstance(model, CompiledVisionModel) and model.compiled else None


def turbomind_start_refusal(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Why TurboMind cannot start with a model of ours on this machine; None where it can, or it is none of ours."""
    from turbovit.lmdeploy_ext import adapter
    from turbovit.lmdeploy_ext.capability import own_language_half, turbomind_refusal

    refusal = turbomind_refusal(architecture, config)
    problem = adapter.turbomind_problem() if refusal is None and own_language_half(architecture) else None
    if problem is None:
        return refusal
    return (
        f"LMDeploy's TurboMind cannot be loaded here: {problem}. The other route is LMDeploy's PyTorch engine: "
        f"pipeline(..., backend_config=PytorchEngineConfig()) or turbovit serve ... --backend pytorch"
    )


def require_engine_parts() -> None:
    """Make sure that compiled towers fit into the PyTorch engine of the LMDeploy that is here.

    Raises:
        RuntimeUnavailableError: it is not built as it was in 0.18.
    """
    from turbovit.lmdeploy_ext import adapter
    from turbovit.lmdeploy_ext.pytorch_engine import adapter as engine_adapter

    problems = adapter.check(engine_adapter.PRIVATE_PARTS)
    if problems:
        raise RuntimeUnavailableError(f"turbovit needs lmdeploy 0.18; in the one here {'; '.join(problems)}")


def load_vision_model(model_path: str | Path, bundle: str | Path | None = None, device: str = "auto") -> Any:
    """A vision model as LMDeploy would load it for TurboMind, without a GPU and without a language engine.

    Args:
        model_path: a checkpoint folder.
        bundle: the bundle's folder; None looks in ``$TURBOVIT_BUNDLE``, then in the store.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        BundleError: there is no bundle, or it does not fit the checkpoint.
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used.
    """
    install()
    from lmdeploy.archs import get_model_arch

    from turbovit.export.checkpoint import open_checkpoint
    from turbovit.lmdeploy_ext import adapter

    family = family_from_architecture(open_checkpoint(model_path).architecture)
    _, config = get_model_arch(str(model_path))
    model = adapter.vision_model_class(family)(model_path=str(model_path), hf_config=config, backend="turbomind")
    model.bundle, model.device = bundle, device
    model.build_preprocessor()
    model.build_model()
    return model
