"""A synthetic DeepSeek-VL2 checkpoint in the layout of the released ones, which is the original code's own.

The tokenizer has the construction of DeepSeek's (byte-level BPE in three cuts, BOS, EOS and pad first, the image and
conversation tokens last, no post-processor that adds any), and there is no chat template, as there is none in the
releases; vocabulary, merges and weights are our own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbovit.engines.errors import UnsupportedModelError
from turbovit.export.samples import (
    Shape,
    add_tokens,
    added_tokens_decoder,
    byte_level_bpe,
    random_tensor,
    save_tensors,
    write_json,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BOS, _EOS, _PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"  # noqa: RUF001
_ADDED = ["<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<|User|>", "<|Assistant|>"]
_TURNS = _ADDED[-2:]
_PROCESSOR = "DeepseekVLV2Processor"

_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_WORDS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PIECES = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", f"{_PUNCTUATED}|{_WORDS}")  # noqa: RUF001
_JOINED = [(":", "no"), (":", "yes")]  # so that an answer tokenised with what stands before it gets other ids

_TILE, _PATCH_SIDE, _MERGE = 384, 14, 2
# Width and height in tiles, in the order of the released files.
_TILES = [(1, 1)]
for _long in range(2, 10):
    _TILES += [(1, _long), (_long, 1)]
    _TILES += {4: [(2, 2)], 6: [(2, 3), (3, 2)], 8: [(2, 4), (4, 2)], 9: [(3, 3)]}.get(_long, [])
_CONTEXT = 4096
# Else attention is so flat that the features without positions would pass a bfloat16 certificate.
_QUERY_KEY_GAIN = 1.5
_EXPERT = re.compile(r"\.experts\.\d+\.")
_DIFFERENT = 0.07  # share of a weight's deviation that is an expert's own, where they are alike
_GELU_GAIN = 1.6  # what a GELU leaves of a deviation of 1 is 0.6


@dataclass(frozen=True)
class _Sizes:
    """Of the vision half, then of the language half, whose hidden size is `out`.

    Attributes:
        latent, rope, head: with MLA, of keys and values, of a key's part with rope, and of the other part and values.
        chosen: of the `experts`, for a token.
    """

    hidden: int
    layers: int
    heads: int
    out: int
    text_layers: int
    text_heads: int
    text_inner: int
    mla: bool
    sigmoid: bool = False
    latent: int = 32
    rope: int = 16
    head: int = 32
    experts: int = 4
    chosen: int = 2


_SIZES = {
    "tiny": _Sizes(144, 2, 2, 64, text_layers=2, text_heads=2, text_inner=128, mla=False),
    "small": _Sizes(288, 4, 4, 128, text_layers=2, text_heads=4, text_inner=256, mla=True),
    "full": _Sizes(1152, 27, 16, 2560, text_layers=2, text_heads=4, text_inner=512, mla=True, sigmoid=True),
}
# Language halves that TurboMind has kernels for. They take the place of a size's own, and are tiny in all that may be.
_TURBOMIND = {"out": 256, "text_layers": 2, "text_heads": 2, "text_inner": 256, "latent": 512, "rope": 64, "head": 128}
_LANGUAGES: dict[str, dict[str, Any]] = {
    "mha": {**_TURBOMIND, "mla": False, "sigmoid": False, "experts": 16, "chosen": 6},
    "mla": {**_TURBOMIND, "mla": True, "sigmoid": False, "experts": 16, "chosen": 6},
    "base": {**_TURBOMIND, "mla": True, "sigmoid": True, "experts": 64, "chosen": 4},
}


def write_sample(folder: Path, size: str, seed: int, layers: int | None = None, language: str | None = None) -> None:
    """Write a checkpoint with float32 weights, or with bfloat16 ones where `language` is given.

    Args:
        folder: exists and is empty.
        size: ``tiny``, with attention in the language half as in DeepSeek-VL2-Tiny; ``small``, with MLA as in the other
            two; or ``full`` - the vision side of the largest release, 1.8 GB in several shards, and its experts
            chosen by sigmoid.
        seed: of the weights; nothing else depends on it.
        layers: of the vision tower, where not as many as the size has.
        language: ``mha``, ``mla`` or ``base`` gives a tiny language half that TurboMind takes, made as that of
            DeepSeek-VL2-Tiny, -Small and the largest.

    Raises:
        UnsupportedModelError: unknown `language`.
        OSError, safetensors.SafetensorError: a file cannot be written.
    """
    if language is not None and language not in _LANGUAGES:
        raise UnsupportedModelError(f"unknown language half {language!r}; available: {', '.join(_LANGUAGES)}")
    dtype = torch.float32 if language is None else torch.bfloat16
    changes = ({} if layers is None else {"layers": layers}) | _LANGUAGES.get(language or "", {})
    sizes = replace(_SIZES[size], **changes)
    tokenizer = _tokenizer()
    config = _config(sizes, tokenizer, str(dtype).removeprefix("torch."))
    files = {
        "config.json": config,
        "processor_config.json": _processor_config(),
        "tokenizer_config.json": _tokenizer_config(tokenizer),
        "special_tokens_map.json": {
            "additional_special_tokens": _TURNS,
            "bos_token": _BOS,
            "eos_token": _EOS,
            "pad_token": _PAD,
        },
    }
    for name, data in files.items():
        write_json(folder / name, data)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    shapes = _vision_shapes(config) | _language_shapes(config["language_config"])
    alike = language is not None
    make = partial(_weight, seed=seed, alike=alike)
    save_tensors(folder, shapes, make, sharded=size == "full", dtype=dtype)


def _tokenizer() -> Tokenizer:
    from tokenizers import processors

    tokenizer = byte_level_bpe(*_PIECES, first=(_BOS, _EOS, _PAD), joined=_JOINED)
    add_tokens(tokenizer, [_BOS, _EOS, _PAD, *_ADDED], [_BOS, _EOS, _PAD, *_ADDED])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added_tokens_decoder(tokenizer),
        "additional_special_tokens": _TURNS,
        "bos_token": _BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": _EOS,
        "model_max_length": int(1e30),
        "pad_token": _PAD,
        "processor_class": _PROCESSOR,
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": None,
        "use_default_system_prompt": False,
    }


def _resolutions() -> list[list[int]]:
    return [[_TILE * columns, _TILE * rows] for columns, rows in _TILES]


def _processor_config() -> dict[str, Any]:
    return {
        "add_special_token": False,
        "candidate_resolutions": _resolutions(),
        "downsample_ratio": _MERGE,
        "ignore_id": -100,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_token": _ADDED[0],
        "mask_prompt": False,
        "normalize": True,
        "pad_token": _PAD,
        "patch_size": _PATCH_SIDE,
        "processor_class": _PROCESSOR,
        "sft_format": "deepseek",
    }


def _config(sizes: _Sizes, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """As in the releases, it names no architecture, and is silent about what is the original's default."""
    vision = {
        "layers": sizes.layers,
        "mlp_ratio": 3.7362,
        "model_name": "siglip_so400m_patch14_384",
        "model_type": "vision",
        "patch_size": _PATCH_SIDE,
        "width": sizes.hidden,
    }
    projector: dict[str, Any] = {"model_type": "mlp_projector", "n_embed": sizes.out}
    if sizes.hidden != 1152:
        vision |= {"heads": sizes.heads}
        projector |= {"input_dim": sizes.hidden}
    return {
        "candidate_resolutions": _resolutions(),
        "global_view_pos": "head",
        "language_config": _language_config(sizes, tokenizer, dtype),
        "model_type": "deepseek_vl_v2",
        "projector_config": projector,
        "tile_tag": "2D",
        "torch_dtype": dtype,
        "transformers_version": "4.38.2",
        "vision_config": vision,
    }


def _language_config(sizes: _Sizes, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV2Config",
            "AutoModel": "modeling_deepseek.DeepseekV2Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
        "bos_token_id": tokenizer.token_to_id(_BOS),
        "eos_token_id": tokenizer.token_to_id(_EOS),
        "first_k_dense_replace": 1,
        "hidden_size": sizes.out,
        "intermediate_size": sizes.text_inner,
        "kv_lora_rank": sizes.latent if sizes.mla else None,
        "lm_head": True,
        "max_position_embeddings": _CONTEXT,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": sizes.text_inner // 4,
        "n_group": 1,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": 2,
        "num_attention_heads": sizes.text_heads,
        "num_experts_per_tok": sizes.chosen,
        "num_hidden_layers": sizes.text_layers,
        "num_key_value_heads": sizes.text_heads,
        "q_lora_rank": None,
        "qk_nope_head_dim": sizes.head if sizes.mla else 0,
        "qk_rope_head_dim": sizes.rope if sizes.mla else 0,
        "rm_head": False,
        "topk_group": 1,
        "topk_method": "noaux_tc" if sizes.sigmoid else "greedy",
        "torch_dtype": dtype,
        "use_mla": sizes.mla,
        "v_head_dim": sizes.head if sizes.mla else 0,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
    }
    if sizes.sigmoid:
        config |= {"norm_topk_prob": True, "routed_scaling_factor": 2.0, "scoring_func": "sigmoid"}
    return config


def _vision_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    from turbovit.export.deepseek_vl2 import DeepseekVL2Tower

    return DeepseekVL2Tower.tensor_shapes(DeepseekVL2Tower.spec_from_config(config, _processor_config()))


def _language_shapes(text: dict[str, Any]) -> dict[str, Shape]:
    hidden, heads, model = text["hidden_size"], text["num_attention_heads"], "language.model."
    shapes: dict[str, Shape] = {
        f"{model}embed_tokens.weight": (text["vocab_size"], hidden),
        f"{model}norm.weight": (hidden,),
        "language.lm_head.weight": (text["vocab_size"], hidden),
    }
    attention: dict[str, Shape] = {f"{part}_proj": (hidden, hidden) for part in "qkvo"}
    if text["use_mla"]:
        rank, nope, rope, value = (
            text[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        attention = {
            "q_proj": (heads * (nope + rope), hidden),
            "kv_a_proj_with_mqa": (rank + rope, hidden),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (nope + value), rank),
            "o_proj": (hidden, heads * value),
        }
    for layer in range(text["num_hidden_layers"]):
        prefix = f"{model}layers.{layer}."
        own = {f"self_attn.{name}": shape for name, shape in attention.items()}
        own |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        if layer < text["first_k_dense_replace"]:
            own |= _mlp_shapes("mlp.", hidden, text["intermediate_size"])
        else:
            own |= _expert_shapes(text)
            if text["topk_method"] == "noaux_tc":
                shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (text["n_routed_experts"],)
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in own.items()}
    return shapes


def _expert_shapes(text: dict[str, Any]) -> dict[str, Shape]:
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    shapes: dict[str, Shape] = {"mlp.gate": (text["n_routed_experts"], hidden)}
    for expert in range(text["n_routed_experts"]):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}.", hidden, inner)
    return shapes | _mlp_shapes("mlp.shared_experts.", hidden, inner * text["n_shared_experts"])


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    up = {f"{prefix}{part}_proj": (inner, hidden) for part in ("gate", "up")}
    return {**up, f"{prefix}down_proj": (hidden, inner)}


def _weight(name: str, shape: Shape, seed: int, alike: bool = False) -> Tensor:
    """Scales that keep activations near 1, so that every weight has a say in the features and the logits.

    Args:
        alike: whether experts differ little, so that a near tie among them, which other arithmetic decides otherwise,
            moves logits little too.
    """
    std, mean = None, 0.0
    if name in ("image_newline", "view_seperator") or name.endswith(("pos_embed", "embed_tokens.weight")):
        std = 0.5  # beside patches and features of about that size
    elif name == "projector.layers.2.weight":
        std = _GELU_GAIN * shape[1] ** -0.5
    elif len(shape) == 1 and name.endswith(".weight"):
        mean = 1.0  # a LayerNorm's or RMSNorm's
    weight = random_tensor(name, shape, seed, mean, std)
    if alike and ".experts." in name:
        common = random_tensor(_EXPERT.sub(".experts.", name), shape, seed, mean, std)
        weight = common.mul_((1 - _DIFFERENT**2) ** 0.5).add_(weight.mul_(_DIFFERENT))
    if name.endswith("attn.qkv.weight"):
        weight[: 2 * shape[1]] *= _QUERY_KEY_GAIN
    return weight
