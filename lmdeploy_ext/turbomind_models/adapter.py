"""Every touch of TurboMind's Python side that needs its CUDA extension; what is touched is listed in `parts.py`."""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from turbovit.engines.errors import UnsupportedBackendError
from turbovit.engines.families import load
from turbovit.lmdeploy_ext.turbomind_models.kernels import Kernels, kernels
from turbovit.lmdeploy_ext.turbomind_models.models import LANGUAGE_HALVES, LanguageHalf
from turbovit.lmdeploy_ext.turbomind_models.parts import part_problems

# What is set of the extension's own structs, which name no signatures.
_FIELDS: dict[str, tuple[str, ...]] = {
    "AttentionConfig": ("head_dim", "rope", "q_lora_rank", "kv_lora_rank", "softmax_scale", "clone"),
    "FfnConfig": ("hidden_dim", "act_type", "inter_size", "is_expert"),
    "MoeConfig": ("expert_num", "experts_per_token", "norm_topk_prob", "topk_method", "scoring_func", "routed_scale"),
    "WeightQuery": ("data_type", "weight_format", "input_dtype", "grouped"),
}
_PARTS = {
    "builders": (
        *("AttentionBuilder", "DecoderLayerBuilder", "DecoderLayerConfig", "FfnBuilder", "MLABuilder", "MoeBuilder"),
        *("ModuleListBuilder", "ModuleListConfig", "SplitSide", "TextModelBuilder", "_act_type_id"),
    ),
    "builders.linear": ("Linear",),
    "builders.mla": ("fold_kv_b", "pad_wo_input"),
    "models.utils": (
        *("make_attention_config", "make_ffn_config", "make_mla_config", "make_model_weight_config"),
        *("make_moe_config", "reorder_rotary_emb"),
    ),
}


def register() -> None:
    """Put the language halves into TurboMind's registries, where its extension is there to run them.

    An architecture that LMDeploy has a model of keeps that, and a TurboMind that is not as it was in 0.18.0 gets none.
    """
    if import_module("lmdeploy.turbomind")._tm is None or part_problems(_folder()):
        return
    from lmdeploy.turbomind.models.base import INPUT_MODELS
    from lmdeploy.turbomind.supported_models import SUPPORTED_ARCHS

    for architecture, half in LANGUAGE_HALVES.items():
        if half.key not in SUPPORTED_ARCHS:
            INPUT_MODELS.register_module(name=half.name, module=source_model(half), force=True)
            SUPPORTED_ARCHS[half.key] = half.name
            SUPPORTED_ARCHS.setdefault(architecture, half.name)  # LMDeploy's key where a config names it
            _keep_fallback(half)


@functools.cache
def source_model(half: LanguageHalf) -> type:
    """The half's class over TurboMind's `TextModel`; its extension must be there."""
    ours, stock = load(half.source_model), import_module("lmdeploy.turbomind.text_model").TextModel
    return type(ours.__name__, (ours, stock), {"__module__": ours.__module__, "__doc__": ours.__doc__})


@functools.cache
def turbomind_parts() -> SimpleNamespace:
    """TurboMind's builders and what goes with them; its extension must be there."""
    return SimpleNamespace(
        **{
            name: getattr(import_module(f"lmdeploy.turbomind.{module}"), name)
            for module, names in _PARTS.items()
            for name in names
        }
    )


def installed_kernels() -> Kernels | None:
    """What the extension was compiled for."""
    return kernels(_folder())


def field_problems() -> list[str]:
    """What the extension's structs lack, one line each."""
    extension = import_module("lmdeploy.turbomind")._tm
    return [
        f"this TurboMind's {struct} has no {field}"
        for struct, fields in _FIELDS.items()
        for field in fields
        if not hasattr(getattr(extension, struct, None), field)
    ]


def format_problems(resolver: Any) -> list[str]:
    """Why the weights cannot be read as `resolver` would: quantised formats, which an engine config can ask for."""
    names = [one.name for one in resolver._formats if one.name != "trivial"]
    return [f"its weights would be read as {', '.join(names)}; this half takes plain ones"] if names else []


def require_expert_kernels(ctx: Any) -> None:
    """Ask the extension for a plan of experts in the dtype of a builders' context.

    Raises:
        UnsupportedBackendError: it has none for this GPU.
    """
    from lmdeploy.turbomind.weight_format import TrivialFormat

    query = import_module("lmdeploy.turbomind")._tm.WeightQuery()
    query.data_type, query.grouped = ctx.data_type, True
    query.weight_format = TrivialFormat(weight_dtype=ctx.data_type).make_data_format()
    query.input_dtype = ctx.gemm_input_dtype
    with ctx.devices[0]:
        plan = ctx.gemm.get_weight_plan(query)
    if plan is None:
        dtype = str(ctx.dtype).removeprefix("torch.")
        raise UnsupportedBackendError(
            f"TurboMind has no kernels for experts in {dtype} on this GPU: give the engine another dtype, or use "
            f"LMDeploy's PyTorch engine"
        )


def _folder() -> Path:
    return Path(str(import_module("lmdeploy.turbomind").__file__)).parent


def _keep_fallback(half: LanguageHalf) -> None:
    """Text models of the same name still fall back to the PyTorch engine, as before their key was taken."""
    from lmdeploy.archs import get_model_arch
    from lmdeploy.turbomind import supported_models

    supported = supported_models.is_supported

    @functools.wraps(supported)
    def supported_if_ours(model_path: str, trust_remote_code: bool = False) -> bool:
        key, config = get_model_arch(model_path, trust_remote_code=trust_remote_code)
        if key == half.key and config.model_type != half.model_type:
            return False
        return supported(model_path, trust_remote_code=trust_remote_code)

    supported_models.is_supported = supported_if_ours
