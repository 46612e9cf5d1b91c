"""Mistakes in handing a model to TurboMind, each made on purpose by a patch of LMDeploy; one is mended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def no_rope_reordering() -> Iterator[None]:
    """Queries and keys keep the order of their halves, where TurboMind turns neighbours."""
    with patch("lmdeploy.turbomind.models.qwen3.reorder_rotary_emb", lambda weights, *_, **__: weights):
        yield


@contextmanager
def no_shared_expert() -> Iterator[None]:
    from lmdeploy.turbomind.builders import MoeBuilder

    assign = MoeBuilder.__setattr__

    def without_shared(builder: Any, name: str, value: Any) -> None:
        if name != "shared":
            assign(builder, name, value)

    with patch.object(MoeBuilder, "__setattr__", without_shared):
        yield


@contextmanager
def wrong_softmax_scale() -> Iterator[None]:
    """That of the latents' own size, 576, where a head's is meant."""
    from lmdeploy.turbomind.models import glm4_moe_lite

    make = glm4_moe_lite.make_mla_config

    def with_default_scale(*arguments: Any, **options: Any) -> Any:
        config = make(*arguments, **options)
        config.softmax_scale = 0.0
        return config

    with patch.object(glm4_moe_lite, "make_mla_config", with_default_scale):
        yield


@contextmanager
def output_projection_padded_behind() -> Iterator[None]:
    """The rows for the rotated part of a head come last, where attention puts that part first."""
    from lmdeploy.turbomind.builders import mla

    pad = mla.pad_wo_input

    def behind(projection: Any, *, cfg: Any) -> Any:
        padded = pad(projection, cfg=cfg)
        heads = padded.tensors["weight"].unflatten(0, (cfg.head_num, cfg.head_dim))
        padded.tensors["weight"] = heads.roll(-cfg.qk_rope_dim, dims=1).flatten(0, 1).contiguous()
        return padded

    with patch.object(mla, "pad_wo_input", behind):
        yield


@contextmanager
def no_correction_bias() -> Iterator[None]:
    from lmdeploy.turbomind.builders import MoeBuilder

    add = MoeBuilder.add_param

    def zeros(builder: Any, name: str, tensor: torch.Tensor, *rest: Any) -> None:
        add(builder, name, torch.zeros_like(tensor), *rest)

    with patch.object(MoeBuilder, "add_param", zeros):
        yield


@contextmanager
def yarn_by_trained_positions() -> Iterator[None]:
    """Stock LMDeploy names the extended context where the engine computes yarn's ramp from the trained one."""
    from lmdeploy.turbomind.models import utils

    copy = utils.copy_rope_config

    def copy_trained(config: Any, rope: Any, positions: int) -> None:
        copy(config, rope, rope.original_max_position_embeddings or rope.max_position_embeddings or positions)

    with patch.object(utils, "copy_rope_config", copy_trained):
        yield
