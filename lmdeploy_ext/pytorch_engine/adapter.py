"""Every touch of the private parts of LMDeploy's PyTorch engine, seen in lmdeploy 0.18.0."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import nn

from turbovit.lmdeploy_ext.pytorch_engine import has_compiled_vision

_MODELS = "lmdeploy.pytorch.models"
_beside_compiled_tower = ContextVar("_beside_compiled_tower", default=False)
# As `turbovit.lmdeploy_ext.adapter.PRIVATE_PARTS`: what is used, and the parameters that it must have.
PRIVATE_PARTS: dict[str, tuple[str, ...]] = {
    "lmdeploy.vl.engine:load_vl_model": ("model_path", "backend", "with_llm", "backend_config"),
    "lmdeploy.vl.engine:ImageEncoder.wrap_for_pytorch": ("messages", "chat_template", "tokenizer", "tools"),
    "lmdeploy.vl.model.base:VisionModel.has_input_ids": ("messages",),
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase.__init__": ("model_config", "misc_config"),
    "lmdeploy.pytorch.models.patch:update_custom_module_map": ("module_map_path",),
    f"{_MODELS}.module_map:MODULE_MAP.get": (),
    f"{_MODELS}.gemma3_vl:SiglipVisionModel": ("config", "ctx_mgr", "dtype", "device"),
    f"{_MODELS}.gemma3_vl:Gemma3MultiModalProjector": ("config", "ctx_mgr", "dtype", "device"),
    f"{_MODELS}.gemma3_vl:Gemma3ForConditionalGeneration.prepare_attn_masks": ("input_ids", "positions", "mask_dtype"),
    f"{_MODELS}.gemma:GemmaAttention.naive_attn_with_masks": ("q", "k", "v", "out", "attn_masks", "seq_lens"),
    f"{_MODELS}.llama4:Llama4VisionModel": ("config", "dtype", "device"),
    f"{_MODELS}.llama4:Llama4MultiModalProjector": ("config", "dtype", "device"),
    f"{_MODELS}.qwen3_vl:Qwen3VLVisionModel": ("config", "dtype", "device", "prefix"),
    f"{_MODELS}.qwen3_vl:Qwen3VLVisionModel.forward": ("hidden_states", "cu_seqlens", "rotary_pos_emb", "pos_embeds"),
    f"{_MODELS}.qwen3_vl:Qwen3VLVisionModel.rot_pos_emb": ("grid_thw",),
    f"{_MODELS}.deepseek_vl2:DeepseekVLV2ForCausalLM._init_vision_module": ("dtype",),
    f"{_MODELS}.deepseek_vl2:DeepseekVLV2ForCausalLM.prepare_inputs_embeds": (
        "input_ids",
        "images",
        "images_seq_mask",
        "images_spatial_crop",
    ),
    f"{_MODELS}.deepseek_vl2:MlpProjector": ("cfg", "dtype"),
    f"{_MODELS}.qwen3_vl:Qwen3VLVisionModel.fast_pos_embed_interpolate": ("grid_thw",),
}


def stock_model_class(architecture: str) -> type:
    """LMDeploy's own class for an architecture."""
    from lmdeploy.pytorch.models.module_map import MODULE_MAP

    module, name = MODULE_MAP[architecture].rsplit(".", 1)
    return getattr(import_module(module), name)


def gemma_attentions(model: nn.Module) -> Iterator[Any]:
    """The attention layers of LMDeploy's Gemma."""
    from lmdeploy.pytorch.models.gemma import GemmaAttention

    yield from (module for module in model.modules() if isinstance(module, GemmaAttention))


@contextlib.contextmanager
def constructed_as(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within, LMDeploy's constructors get what `stand_ins` give in place of what they name.

    Args:
        stand_ins: by ``module:class`` or ``module:class.method`` below ``lmdeploy.pytorch.models``.
    """
    with contextlib.ExitStack() as stack:
        for path, stand_in in stand_ins.items():
            module, names = path.split(":")
            *owners, name = names.split(".")
            owner = functools.reduce(getattr, owners, import_module(f"{_MODELS}.{module}"))
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def patch_vision_loading(require_parts: Callable[[], None]) -> None:
    """Let a vision model that is loaded beside an engine with a compiled tower know of it.

    Args:
        require_parts: called before one is loaded; raises where that cannot work.
    """
    from lmdeploy.vl import engine

    load = engine.load_vl_model

    @functools.wraps(load)
    def load_beside_engine(model_path: str, backend: str, *args: Any, backend_config: Any = None, **kwargs: Any) -> Any:
        beside = backend == "pytorch" and has_compiled_vision(backend_config)
        if beside:
            require_parts()
        token = _beside_compiled_tower.set(beside)
        try:
            return load(model_path, backend, *args, backend_config=backend_config, **kwargs)
        finally:
            _beside_compiled_tower.reset(token)

    engine.load_vl_model = load_beside_engine


def is_beside_compiled_tower() -> bool:
    """Whether the vision model that is being loaded stands beside an engine with a compiled tower."""
    return _beside_compiled_tower.get()


def patch_module_map() -> None:
    """Bring ``custom_module_map`` to where the engine's workers read it.

    0.18 puts it into the engine's ``MiscConfig``; what builds the model reads it from the ``ModelConfig``.
    """
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase

    init = ExecutorBase.__init__

    @functools.wraps(init)
    def init_with_map(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.model_config.custom_module_map is None:
            self.model_config.custom_module_map = self.misc_config.custom_module_map

    ExecutorBase.__init__ = init_with_map
