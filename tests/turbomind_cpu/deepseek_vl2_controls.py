"""Mistakes in our language half for TurboMind, made on purpose: each patches a part of it while an engine is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from turbovit.lmdeploy_ext.turbomind_models.adapter import turbomind_parts


@contextmanager
def _instead(name: str, mistaken: Callable[..., Any]) -> Iterator[None]:
    """`mistaken` gets the part called `name`, and its arguments."""
    parts = turbomind_parts()
    right = getattr(parts, name)
    with patch.object(parts, name, lambda *args, **options: mistaken(right, *args, **options)):
        yield


def no_rope_reordering() -> Any:
    """Queries and keys keep the order of their halves, where TurboMind turns neighbours."""
    return _instead("reorder_rotary_emb", lambda right, weights, *_, **__: weights)


def rope_of_latents_reordered() -> Any:
    """The rope's part of MLA's queries is reordered as MHA's, though it has TurboMind's order."""

    def folded_reordered(fold: Any, q: Any, kv_b: Any, o: Any, *, cfg: Any) -> Any:
        heads = q.tensors["weight"].unflatten(1, (cfg.head_num, -1))
        plain, rope = heads.split([cfg.qk_nope_dim, cfg.qk_rope_dim], dim=-1)
        rope = rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        q.tensors["weight"] = torch.cat([plain, rope], dim=-1).flatten(1)
        return fold(q, kv_b, o, cfg=cfg)

    return _instead("fold_kv_b", folded_reordered)


def wrong_softmax_scale() -> Any:
    """That of the latents' own size, 576, where a head's is meant."""

    def with_default_scale(make: Any, config: Any) -> Any:
        made = make(config)
        made.softmax_scale = 0.0
        return made

    return _instead("make_mla_config", with_default_scale)


def output_projection_padded_behind() -> Any:
    """The rows for the rope's part of a head come last, where attention puts that part first."""

    def behind(pad: Any, o: Any, *, cfg: Any) -> Any:
        padded = pad(o, cfg=cfg)
        heads = padded.tensors["weight"].unflatten(0, (cfg.head_num, cfg.head_dim))
        padded.tensors["weight"] = heads.roll(-cfg.qk_rope_dim, dims=1).flatten(0, 1).contiguous()
        return padded

    return _instead("pad_wo_input", behind)


def _moe_builder(**methods: Callable[..., Any]) -> Any:
    from lmdeploy.turbomind.builders import MoeBuilder

    return patch.object(turbomind_parts(), "MoeBuilder", type("Mistaken", (MoeBuilder,), methods))


def no_shared_expert() -> Any:
    from lmdeploy.turbomind.builders import MoeBuilder

    def without_shared(self: Any, name: str, value: Any) -> None:
        if name != "shared":
            MoeBuilder.__setattr__(self, name, value)

    return _moe_builder(__setattr__=without_shared)


def no_correction_bias() -> Any:
    from lmdeploy.turbomind.builders import MoeBuilder

    def zeros(self: Any, name: str, tensor: torch.Tensor) -> None:
        MoeBuilder.add_param(self, name, torch.zeros_like(tensor))

    return _moe_builder(add_param=zeros)


def experts_reversed() -> Any:
    """The router's last expert comes first."""
    from lmdeploy.turbomind.builders import MoeBuilder

    def reversed_gate(self: Any, name: str, linear: Any) -> None:
        linear.tensors["weight"] = linear.tensors["weight"].flip(1).contiguous()
        MoeBuilder.add_gate(self, name, linear)

    return _moe_builder(add_gate=reversed_gate)


def gate_and_up_swapped() -> Any:
    from lmdeploy.turbomind.builders import FfnBuilder

    def swapped(self: Any, gate: Any, down: Any, up: Any) -> None:
        FfnBuilder.add_ffn(self, up, down, gate)

    return patch.object(turbomind_parts(), "FfnBuilder", type("Mistaken", (FfnBuilder,), {"add_ffn": swapped}))
