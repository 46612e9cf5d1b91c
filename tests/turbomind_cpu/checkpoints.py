"""Tiny random checkpoints in bfloat16 of models that stock TurboMind supports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # with less, attention and logits are nearly flat
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}
CORRECTION = 0.5  # of half of the experts' scores, which lie between 0 and 1
CLASSES, LEVEL, GAIN, REST = 16, 0.1, 8.0, 0.02  # of `route_clearly`


def qwen3(**changes: Any) -> Any:
    """Attention with grouped heads and norms of queries and keys, dense layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON | HEADS | {"intermediate_size": 256} | changes))


def llama(**changes: Any) -> Any:
    """Attention without norms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON | HEADS | {"intermediate_size": 256} | changes))


def qwen2() -> Any:
    """Attention whose queries, keys and values have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(**COMMON | HEADS | {"intermediate_size": 256}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=COMMON["initializer_range"])
    return model


def qwen3_moe() -> Any:
    """Experts chosen by a softmax."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON | HEADS | EXPERTS | {"num_experts": 8}))
    return route_clearly(model, 8)


def glm4_moe_lite() -> Any:
    """MLA, and from the second layer on a shared expert beside those that corrected sigmoids choose."""
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    options: dict[str, Any] = {
        "intermediate_size": EXPERTS["moe_intermediate_size"],  # stock TurboMind gives a shared expert this size
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**COMMON | EXPERTS | options))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.data.copy_(CORRECTION * (torch.randperm(8) < 4))
    return route_clearly(model, 8)


def route_clearly(model: Any, experts: int) -> Any:
    """Let a token's own embedding choose its experts, by far.

    Two experts that nearly tie are chosen otherwise at the least difference of rounding, and then a row is another one:
    that says nothing about an engine. Here the first values of the residual stream are the token's alone, levels in
    one of `CLASSES` orders, and routers see little else.
    """
    orders = torch.stack([torch.randperm(experts) for _ in range(CLASSES)])
    embedding = model.get_input_embeddings().weight.data
    embedding[:, :experts] = (orders[torch.arange(len(embedding)) % CLASSES] - (experts - 1) / 2) * LEVEL
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data[..., :experts, :] = 0  # [.., hidden, inner]
        elif name.endswith("mlp.gate.weight"):  # [experts, hidden]
            parameter.data.mul_(REST)
            parameter.data[:, :experts] = GAIN * torch.eye(experts)[torch.randperm(experts)]
    return model


MODELS: dict[str, Callable[[], Any]] = {"qwen3": qwen3, "qwen3_moe": qwen3_moe, "glm4_moe_lite": glm4_moe_lite}


def prompt(length: int, seed: int) -> list[int]:
    """Random ids, none of them special."""
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def write(make: Callable[[], Any], folder: Path, seed: int = 0) -> Path:
    """Save a model of these weights, with a tokenizer whose words are `w0`, `w1` and so on."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model = make().bfloat16()
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if hasattr(gate, "e_score_correction_bias"):
            gate.e_score_correction_bias = gate.e_score_correction_bias.float()  # as released; TurboMind ends without
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder
