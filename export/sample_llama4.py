"""A synthetic Llama 4 checkpoint in the layout of the released ones.

The tokenizer has the construction of Llama 4's (byte-level BPE, BOS by its post-processor, the first special tokens
past the vocabulary) and the chat template its behaviour; vocabulary, merges, template text and weights are our own.
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

_BOS, _END_OF_TEXT, _EOM, _EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eom|>", "<|eot|>"
_PAD = "<|finetune_right_pad|>"
_IMAGE_START, _IMAGE_END, _IMAGE, _PATCH = "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"


def _reserved(kind: str, first: int, last: int) -> list[str]:
    return [f"<|{kind}_reserved_special_token_{index}|>" for index in range(first, last + 1)]


# Reserved ones too: so every id is as far from BOS as in the release.
_SPECIAL = [_BOS, _END_OF_TEXT, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
_SPECIAL += ["<|header_start|>", "<|header_end|>", _EOM, _EOT, "<|step|>", *_reserved("text_post_train", 0, 5)]
_SPECIAL += ["<|python_start|>", "<|python_end|>", _PAD, *_reserved("text_post_train", 8, 68)]
_SPECIAL += [_IMAGE_START, _IMAGE_END, *_reserved("vision", 0, 1), "<|tile_x_separator|>", "<|tile_y_separator|>"]
_SPECIAL += [*_reserved("vision", 2, 5), _IMAGE, *_reserved("vision", 6, 6), _PATCH]

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}"
_PIECES = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_PROCESSOR = "Llama4Processor"
_TILE, _PATCH_SIDE, _TILES = 336, 14, 16
_CONTEXT = 10485760
_CHUNK = 512  # shorter than the prompt of an image of four tiles
# Else attention is so flat that the features with wrong 2D rope would pass a bfloat16 certificate.
_QUERY_KEY_GAIN = 1.5
_GELU_GAIN = 1.6  # what a GELU leaves of a deviation of 1 is 0.6

CHAT_TEMPLATE = """\
{%- macro body(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {{- '<|image|>' if part.type == 'image' else part.text if part.type == 'text' else '' -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro turn(role, text) -%}
    {{- '<|header_start|>' ~ role ~ '<|header_end|>\\n\\n' ~ text ~ '<|eot|>' -}}
{%- endmacro -%}
{%- set turns = messages -%}
{{- bos_token -}}
{%- if turns[0].role == 'system' -%}
    {%- set system = turns[0].content -%}
    {%- set system = (system if system is string else system[0].text) | trim -%}
    {{- turn('system', ('Environment: ipython\\n' if tools else '') + system) -}}
    {%- set turns = turns[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- if not turns -%}
        {{- raise_exception('tools are listed in the first user message, and there is none') -}}
    {%- endif -%}
    {%- set listed -%}
        {{- 'These functions may be called, each by a JSON object with its "name" and "parameters".\\n\\n' -}}
        {%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
    {%- endset -%}
    {{- turn('user', listed + body(turns[0].content) | trim) -}}
    {%- set turns = turns[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if message.tool_calls -%}
        {%- set calls -%}
            {%- for call in message.tool_calls -%}
                {{- '{"name": "' ~ call.function.name ~ '", "parameters": ' -}}
                {{- call.function.arguments | tojson ~ '}' -}}
            {%- endfor -%}
        {%- endset -%}
        {{- turn('assistant', '<|python_start|>' + body(message.content) + '<|python_end|>' + calls) -}}
    {%- elif message.role in ('tool', 'ipython') -%}
        {{- turn('ipython', message.content | tojson if message.content is iterable else message.content) -}}
    {%- elif 'tool_calls' not in message -%}
        {{- turn(message.role, body(message.content)) -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|header_start|>assistant<|header_end|>\\n\\n' if add_generation_prompt else '' -}}
"""


@dataclass(frozen=True)
class _Sizes:
    """Of the vision half, then of the text half, whose hidden size is `out`."""

    hidden: int
    layers: int
    heads: int
    inner: int
    adapter: int
    out: int
    text_layers: int
    text_inner: int
    head_dim: int


_SIZES = {
    "tiny": _Sizes(64, 2, 4, 256, adapter=96, out=64, text_layers=4, text_inner=96, head_dim=16),
    "small": _Sizes(256, 4, 4, 1024, adapter=384, out=128, text_layers=4, text_inner=192, head_dim=32),
    "full": _Sizes(1408, 34, 16, 5632, adapter=4096, out=5120, text_layers=2, text_inner=256, head_dim=128),
}


def write_sample(folder: Path, size: str, seed: int, layers: int | None = None) -> None:
    """Write a `Llama4ForConditionalGeneration` checkpoint with float32 weights.

    Args:
        folder: exists and is empty.
        size: ``tiny``, ``small``, or ``full`` - the vision side of the released models, 3.8 GB in several shards.
        seed: of the weights; nothing else depends on it.
        layers: of the vision tower, where not as many as the size has.

    Raises:
        OSError, safetensors.SafetensorError: a file cannot be written.
    """
    sizes = _SIZES[size] if layers is None else replace(_SIZES[size], layers=layers)
    tokenizer = _tokenizer()
    config = _config(sizes, tokenizer)
    text = config["text_config"]
    files = {
        "config.json": config,
        "generation_config.json": {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "preprocessor_config.json": _preprocessor_config(),
        "processor_config.json": {
            "fake_image_token": _IMAGE,
            "image_token": _IMAGE,
            "patch_size": _PATCH_SIDE,
            "processor_class": _PROCESSOR,
        },
        "tokenizer_config.json": _tokenizer_config(tokenizer),
        "special_tokens_map.json": {"bos_token": _BOS, "eos_token": _EOT, "pad_token": _PAD},
    }
    for name, data in files.items():
        write_json(folder / name, data)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    save_tensors(folder, _shapes(config), lambda name, shape: _weight(name, shape, seed), sharded=size == "full")


def _tokenizer() -> Tokenizer:
    from tokenizers import processors

    tokenizer = byte_level_bpe(_PIECES)
    add_tokens(tokenizer, _SPECIAL, _SPECIAL)
    bos = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A {_BOS}:1 $B:1", special_tokens=[(_BOS, tokenizer.token_to_id(_BOS))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return tokenizer


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "added_tokens_decoder": added_tokens_decoder(tokenizer),
        "bos_token": _BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": _EOT,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": _CONTEXT,
        "pad_token": _PAD,
        "processor_class": _PROCESSOR,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        **dict.fromkeys(["do_convert_rgb", "do_normalize", "do_rescale", "do_resize"], True),
        "image_mean": [0.5] * 3,
        "image_processor_type": "Llama4ImageProcessorFast",
        "image_std": [0.5] * 3,
        "max_patches": _TILES,
        "processor_class": _PROCESSOR,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "resize_to_max_canvas": False,
        "size": {"height": _TILE, "width": _TILE},
    }


def _config(sizes: _Sizes, tokenizer: Tokenizer) -> dict[str, Any]:
    text = {
        "attention_bias": False,
        "attention_chunk_size": _CHUNK,
        "bos_token_id": tokenizer.token_to_id(_BOS),
        "eos_token_id": [tokenizer.token_to_id(token) for token in (_END_OF_TEXT, _EOM, _EOT)],
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.out,
        "interleave_moe_layer_step": 1,
        "intermediate_size": sizes.text_inner,
        "intermediate_size_mlp": 2 * sizes.text_inner,
        "max_position_embeddings": _CONTEXT,
        "model_type": "llama4_text",
        "no_rope_layers": [1] * (sizes.text_layers - 1) + [0],  # the default, every fourth, has none in two layers
        "num_attention_heads": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": sizes.text_layers,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "pad_token_id": tokenizer.token_to_id(_PAD),
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,  # the released 1.0 makes transformers warn at every load
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "float32",
        "use_qk_norm": True,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
    }
    vision = {
        "hidden_act": "gelu",
        "hidden_size": sizes.hidden,
        "image_size": _TILE,
        "intermediate_size": sizes.inner,
        "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False,
        "norm_eps": 1e-5,
        "num_attention_heads": sizes.heads,
        "num_channels": 3,
        "num_hidden_layers": sizes.layers,
        "patch_size": _PATCH_SIDE,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": sizes.adapter,
        "projector_output_dim": sizes.adapter,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": sizes.adapter,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": tokenizer.token_to_id(_IMAGE_START),
        "eoi_token_index": tokenizer.token_to_id(_IMAGE_END),
        "image_token_index": tokenizer.token_to_id(_PATCH),
        "model_type": "llama4",
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vision_config": vision,
    }


def _shapes(config: dict[str, Any]) -> dict[str, Shape]:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    with torch.device("meta"):  # transformers changes the config that it is given
        model = Llama4ForConditionalGeneration(Llama4Config.from_dict(copy.deepcopy(config)))
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def _weight(name: str, shape: Shape, seed: int) -> Tensor:
    """Scales that keep activations near 1, so that every weight has a say in the features and the logits."""
    std, mean = None, 0.0
    if name.endswith(("class_embedding", "positional_embedding_vlm", "embed_tokens.weight")):
        std = 0.5  # beside patches and features of about that size
    elif ".experts." in name:
        std = shape[1] ** -0.5  # they stand to the right of their input
    elif name.endswith(("vision_adapter.mlp.fc2.weight", "multi_modal_projector.linear_1.weight")):
        std = _GELU_GAIN * shape[1] ** -0.5
    elif len(shape) == 1 and name.endswith(".weight"):
        mean = 1.0  # a LayerNorm's or RMSNorm's
    weight = random_tensor(name, shape, seed, mean, std)
    if name.startswith("vision_model.") and name.endswith(("q_proj.weight", "k_proj.weight")):
        weight *= _QUERY_KEY_GAIN
    return weight
