"""Tiny random checkpoints of models that stock TurboMind supports, and what transformers answers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)


def write_model(folder: Path, model_class: Any, config: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model_class(config).bfloat16().save_pretrained(folder)
    write_tokenizer(folder)


def qwen3(folder: Path, **changes: Any) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    write_model(folder, Qwen3ForCausalLM, Qwen3Config(**options))
    return folder


def qwen3_moe(folder: Path, **changes: Any) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    write_model(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig(**options))
    return folder
