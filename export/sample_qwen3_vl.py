"""Synthetic Qwen3-VL checkpoints, dense and mixture of experts, in the layout of the released ones.

The tokenizer has the construction of Qwen's (byte-level BPE, its special tokens past the vocabulary) and the
chat template its behaviour; vocabulary, merges, template text and weights are our own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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

_END_OF_TEXT = "<|endoftext|>"
_TURNS = ("<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_BOXES = [f"<|{kind}_{side}|>" for kind in ("object_ref", "box", "quad") for side in ("start", "end")]
_SPECIAL = [*_TURNS, *_BOXES, *_VISION]
_CODE = [f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")]
_PLAIN = ["<tool_call>", "</tool_call>", *_CODE, "<tool_response>", "</tool_response>", "<think>", "</think>"]
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PROCESSOR = "Qwen3VLProcessor"
_PATCH, _TEMPORAL, _MERGE, _POSITIONS = 16, 2, 2, 48**2
_IMAGE_PIXELS = (65536, 16777216)
_VIDEO_PIXELS = (4096, 25165824)
_CONTEXT = 262144
_TEXT_LAYERS = 4
# Else attention is so flat that the features with wrong 2D rope would pass a bfloat16 certificate.
_QUERY_KEY_GAIN = 1.5

CHAT_TEMPLATE = """\
{%- set seen = namespace(images=0, videos=0) -%}
{%- macro numbered(kind, count) -%}
    {%- if add_vision_id -%}{{- kind ~ ' ' ~ count ~ ': ' -}}{%- endif -%}
{%- endmacro -%}
{%- macro body(content, media) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if media and (part.type == 'image' or 'image' in part or 'image_url' in part) -%}
                {%- set seen.images = seen.images + 1 -%}
                {{- numbered('Picture', seen.images) + '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif media and (part.type == 'video' or 'video' in part) -%}
                {%- set seen.videos = seen.videos + 1 -%}
                {{- numbered('Video', seen.videos) + '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set system = messages[0].role == 'system' -%}
{%- if system or tools -%}
    {{- '<|im_start|>system\\n' -}}
    {{- body(messages[0].content, false) if system else '' -}}
    {%- if tools -%}
        {{- '\\n\\n' if system else '' -}}
        {{- '# Tools\\n\\nThese functions may be called:\\n<tools>\\n' -}}
        {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
        {{- '</tools>\\n\\nA call is written as\\n<tool_call>\\n' -}}
        {{- '{"name": <its name>, "arguments": <a JSON object>}\\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for turn in messages -%}
    {%- if turn.role == 'user' -%}
        {{- '<|im_start|>user\\n' + body(turn.content, true) + '<|im_end|>\\n' -}}
    {%- elif turn.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' + body(turn.content, false) -}}
        {%- for call in turn.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
            {{- '\\n' if turn.content or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ arguments ~ '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif turn.role == 'tool' -%}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
        {{- '\\n<tool_response>\\n' + body(turn.content, true) + '\\n</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""


@dataclass(frozen=True)
class _Sizes:
    """Of the vision half, then of the text half, whose hidden size is `out`."""

    hidden: int
    layers: int
    heads: int
    inner: int
    levels: tuple[int, ...]
    out: int
    text_inner: int
    expert_inner: int  # neither `out` nor half of it: transformers tells the experts' layout by their shape
    head_dim: int


_SIZES = {
    "tiny": _Sizes(64, 4, 4, 128, (0, 1, 2), 64, text_inner=128, expert_inner=48, head_dim=16),
    "small": _Sizes(256, 6, 4, 1024, (1, 2, 3), 128, text_inner=256, expert_inner=96, head_dim=32),
    "full": _Sizes(1152, 27, 16, 4304, (8, 16, 24), 4096, text_inner=512, expert_inner=192, head_dim=128),
}
_MOE_SIZES = _SIZES | {"full": replace(_SIZES["full"], out=2048)}


def write_sample(folder: Path, size: str, seed: int, layers: int | None = None) -> None:
    """Write a `Qwen3VLForConditionalGeneration` checkpoint with float32 weights.

    Args:
        folder: exists and is empty.
        size: ``tiny``, ``small``, or ``full`` - the vision side of the 8B model, 2.5 GB in several shards.
        seed: of the weights; nothing else depends on it.
        layers: of the vision tower, where not as many as the size has; deepstack levels keep their share of the depth.

    Raises:
        OSError, safetensors.SafetensorError: a file cannot be written.
    """
    tokenizer = _tokenizer()
    _write(folder, size, seed, tokenizer, _config(_sizes(_SIZES[size], layers), tokenizer))


def write_moe_sample(folder: Path, size: str, seed: int, layers: int | None = None) -> None:
    """Write a `Qwen3VLMoeForConditionalGeneration` checkpoint with float32 weights.

    As `write_sample`, but for the text side, and that ``full`` has the vision side of the 30B-A3B model.
    """
    tokenizer = _tokenizer()
    _write(folder, size, seed, tokenizer, _moe_config(_sizes(_MOE_SIZES[size], layers), tokenizer))


def _sizes(sizes: _Sizes, layers: int | None) -> _Sizes:
    if layers is None:
        return sizes
    levels = sorted({level * layers // sizes.layers for level in sizes.levels})
    return replace(sizes, layers=layers, levels=tuple(levels))


def _write(folder: Path, size: str, seed: int, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    end_of_text, end_of_turn = config["text_config"]["bos_token_id"], config["text_config"]["eos_token_id"]
    files = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": end_of_text,
            "eos_token_id": [end_of_turn, end_of_text],
            "pad_token_id": end_of_text,
        },
        "preprocessor_config.json": _preprocessor_config(_IMAGE_PIXELS)
        | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": _preprocessor_config(_VIDEO_PIXELS)
        | {"video_processor_type": "Qwen3VLVideoProcessor"},
        "tokenizer_config.json": _tokenizer_config(tokenizer),
        "chat_template.json": {"chat_template": CHAT_TEMPLATE},
    }
    for name, data in files.items():
        write_json(folder / name, data)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    save_tensors(folder, _shapes(config), lambda name, shape: _weight(name, shape, seed), sharded=size == "full")


def _tokenizer() -> Tokenizer:
    from tokenizers import normalizers, processors

    tokenizer = byte_level_bpe(_PIECES)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    special = [_END_OF_TEXT, *_SPECIAL]
    tokens = [*special, *_PLAIN]
    add_tokens(tokenizer, tokens, special)
    return tokenizer


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added_tokens_decoder(tokenizer),
        "additional_special_tokens": _SPECIAL,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": _TURNS[1],
        "errors": "replace",
        "model_max_length": _CONTEXT,
        "pad_token": _END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _preprocessor_config(pixels: tuple[int, int]) -> dict[str, Any]:
    return {
        "size": {"longest_edge": pixels[1], "shortest_edge": pixels[0]},
        "patch_size": _PATCH,
        "temporal_patch_size": _TEMPORAL,
        "merge_size": _MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": _PROCESSOR,
    }


def _config(sizes: _Sizes, tokenizer: Tokenizer) -> dict[str, Any]:
    height = width = sizes.head_dim * 20 // 128  # the released shares; every third frequency has to suffice
    text = {
        "attention_bias": False,
        "bos_token_id": tokenizer.token_to_id(_END_OF_TEXT),
        "dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(_TURNS[1]),
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.out,
        "intermediate_size": sizes.text_inner,
        "max_position_embeddings": _CONTEXT,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 4,
        "num_hidden_layers": _TEXT_LAYERS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [sizes.head_dim // 2 - height - width, height, width],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
    }
    vision = {
        "deepstack_visual_indexes": list(sizes.levels),
        "depth": sizes.layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": sizes.hidden,
        "in_channels": 3,
        "intermediate_size": sizes.inner,
        "model_type": "qwen3_vl",
        "num_heads": sizes.heads,
        "num_position_embeddings": _POSITIONS,
        "out_hidden_size": sizes.out,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": _TEMPORAL,
    }
    ids = {token.strip("<|>"): tokenizer.token_to_id(token) for token in _VISION}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": ids["image_pad"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": ids["video_pad"],
        "vision_config": vision,
        "vision_end_token_id": ids["vision_end"],
        "vision_start_token_id": ids["vision_start"],
    }


def _moe_config(sizes: _Sizes, tokenizer: Tokenizer) -> dict[str, Any]:
    config = _config(sizes, tokenizer)
    for part in (config, config["text_config"], config["vision_config"]):
        part["model_type"] = part["model_type"].replace("qwen3_vl", "qwen3_vl_moe")
    config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    config["text_config"] |= {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": sizes.expert_inner,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    return config


def _shapes(config: dict[str, Any]) -> dict[str, Shape]:
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):  # transformers changes the config that it is given
        model = model_class(model_class.config_class.from_dict(copy.deepcopy(config)))
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    # The released experts stand to the right of their input; transformers turns them round as it loads them.
    return {n: (s[0], s[2], s[1]) if ".experts." in n else s for n, s in shapes.items()}


def _weight(name: str, shape: Shape, seed: int) -> Tensor:
    """Scales that keep activations near 1, so that every weight has a say in the features and the logits."""
    std, mean = None, 0.0
    if name.endswith(("pos_embed.weight", "embed_tokens.weight")):
        std = 0.5  # beside patches and features of about that size
    elif ".experts." in name:
        std = shape[1] ** -0.5
    elif len(shape) == 1 and name.endswith(".weight"):
        mean = 1.0  # a LayerNorm's or RMSNorm's
    weight = random_tensor(name, shape, seed, mean, std)
    if name.endswith("attn.qkv.weight"):
        weight[: 2 * shape[1]] *= _QUERY_KEY_GAIN
    return weight
