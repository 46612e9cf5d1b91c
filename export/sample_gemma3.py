"""A synthetic Gemma 3 checkpoint in the layout of the released ones.

The tokenizer has the construction of Gemma's (byte-fallback BPE, runs of newlines as added tokens) and the
chat template its behaviour; vocabulary, merges, template text and weights are our own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbovit.export.gemma3 import Gemma3Tower
from turbovit.export.samples import (
    LONGEST_RUN,
    SPACE,
    Shape,
    add_tokens,
    added_tokens_decoder,
    byte_fallback_bpe,
    random_tensor,
    save_tensors,
    write_json,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAMED = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
_IMAGE = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_TURNS = ("<start_of_turn>", "<end_of_turn>")
_MASK = "<mask>"  # GemmaTokenizer appends it to a vocabulary that lacks it
_RUNS = ["\n" * length for length in range(1, LONGEST_RUN + 1)]
_RUNS += [SPACE * length for length in range(2, LONGEST_RUN + 1)]
_PROCESSOR = "Gemma3Processor"
_TOKENS_PER_IMAGE = 256
_SIDE = 896

CHAT_TEMPLATE = """\
{%- macro body(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{- part.text | trim -}}{%- endif -%}
            {%- if part.type == 'image' -%}{{- '<start_of_image>' -}}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- raise_exception('a message content is neither a string nor a list of parts') -}}
    {%- endif -%}
{%- endmacro -%}
{%- set turns, preamble = messages, '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}
    {%- set preamble = (system if system is string else system[0].text) + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if (turn.role == 'user') == (loop.index is even) -%}
        {{- raise_exception('user and assistant messages must take turns, the user first') -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\\n' -}}
    {{- (preamble if loop.first else '') + body(turn.content) + '<end_of_turn>\\n' -}}
{%- endfor -%}
{{- '<start_of_turn>model\\n' if add_generation_prompt else '' -}}
"""


@dataclass(frozen=True)
class _Sizes:
    """Of the vision half, then of the text half, whose hidden size is `out`."""

    hidden: int
    layers: int
    heads: int
    inner: int
    out: int
    text_inner: int
    head_dim: int


_SIZES = {
    "tiny": _Sizes(hidden=64, layers=2, heads=4, inner=128, out=64, text_inner=128, head_dim=16),
    "small": _Sizes(hidden=256, layers=4, heads=4, inner=1024, out=128, text_inner=256, head_dim=32),
    "full": _Sizes(hidden=1152, layers=27, heads=16, inner=4304, out=2560, text_inner=512, head_dim=64),
}


def write_sample(folder: Path, size: str, seed: int, layers: int | None = None) -> None:
    """Write a `Gemma3ForConditionalGeneration` checkpoint with float32 weights.

    Args:
        folder: exists and is empty.
        size: ``tiny``, ``small``, or ``full`` - the vision side of the 4B model, 1.7 GB in several shards.
        seed: of the weights; nothing else depends on it.
        layers: of the vision tower, where not as many as the size has.

    Raises:
        OSError, safetensors.SafetensorError: a file cannot be written.
    """
    sizes = _SIZES[size] if layers is None else replace(_SIZES[size], layers=layers)
    tokenizer = _tokenizer()
    config = _config(sizes, tokenizer)
    preprocessor = _preprocessor_config()
    files = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": tokenizer.token_to_id(_NAMED["bos_token"]),
            "eos_token_id": config["eos_token_id"],
            "pad_token_id": tokenizer.token_to_id(_NAMED["pad_token"]),
        },
        "preprocessor_config.json": preprocessor,
        "processor_config.json": {"image_seq_length": _TOKENS_PER_IMAGE, "processor_class": _PROCESSOR},
        "tokenizer_config.json": _tokenizer_config(tokenizer),
        "special_tokens_map.json": _NAMED | _IMAGE,
        "added_tokens.json": {_IMAGE["image_token"]: config["image_token_index"]},
        "chat_template.json": {"chat_template": CHAT_TEMPLATE},
    }
    for name, data in files.items():
        write_json(folder / name, data)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    spec = Gemma3Tower.spec_from_config(config, preprocessor)
    shapes = Gemma3Tower.tensor_shapes(spec) | _text_shapes(config["text_config"])
    save_tensors(folder, shapes, lambda name, shape: _weight(name, shape, seed), sharded=size == "full")


def _tokenizer() -> Tokenizer:
    from tokenizers.processors import TemplateProcessing

    first = [*_NAMED.values(), _MASK, *_TURNS, *_RUNS]
    # The third image token gets its id from add_tokens, past the model's vocabulary: so it is in the release.
    last = [_IMAGE["boi_token"], _IMAGE["eoi_token"]]
    tokenizer = byte_fallback_bpe(first, last, unknown=_NAMED["unk_token"])
    added = [*first, *_IMAGE.values()]
    special = set(added) - {_MASK, *_RUNS}
    add_tokens(tokenizer, added, special)
    bos = _NAMED["bos_token"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added_tokens_decoder(tokenizer),
        **_NAMED,
        **_IMAGE,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": _IMAGE,
        "model_max_length": int(1e30),
        "processor_class": _PROCESSOR,
        "spaces_between_special_tokens": False,
        "tokenizer_class": "GemmaTokenizer",
        "use_default_system_prompt": False,
    }


def _preprocessor_config() -> dict[str, Any]:
    """The nulls are the released file's: Gemma3Processor holds the values."""
    crops = ("max_num_crops", "min_crop_size", "min_ratio_to_activate")
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": _PROCESSOR,
        "image_seq_length": _TOKENS_PER_IMAGE,
        **dict.fromkeys(["do_resize", "do_rescale", "do_normalize"], True),
        "size": {"height": _SIDE, "width": _SIDE},
        "resample": 2,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **dict.fromkeys(["do_convert_rgb", "do_pan_and_scan", *(f"pan_and_scan_{name}" for name in crops)]),
    }


def _config(sizes: _Sizes, tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {name: tokenizer.token_to_id(token) for name, token in (_NAMED | _IMAGE).items()}
    text = {
        "head_dim": sizes.head_dim,
        "hidden_size": sizes.out,
        "intermediate_size": sizes.text_inner,
        "layer_types": ["sliding_attention", "full_attention"],  # else every sixth layer is full
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": sizes.head_dim,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 512,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
    }
    vision = {
        "hidden_size": sizes.hidden,
        "image_size": _SIDE,
        "intermediate_size": sizes.inner,
        "model_type": "siglip_vision_model",
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": ids["boi_token"],
        "dtype": "float32",
        "eoi_token_index": ids["eoi_token"],
        "eos_token_id": [ids["eos_token"], tokenizer.token_to_id(_TURNS[1])],
        "image_token_index": ids["image_token"],
        "initializer_range": 0.02,
        "mm_tokens_per_image": _TOKENS_PER_IMAGE,
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision,
    }


def _text_shapes(text: dict[str, Any]) -> dict[str, Shape]:
    from transformers import Gemma3TextConfig, Gemma3TextModel

    with torch.device("meta"):
        model = Gemma3TextModel(Gemma3TextConfig.from_dict(text))
    return {f"language_model.model.{name}": tuple(weight.shape) for name, weight in model.named_parameters()}


def _weight(name: str, shape: Shape, seed: int) -> Tensor:
    """Scales that keep activations near 1, so that every weight has a say in the features and the logits."""
    std, mean = None, 0.0
    if name.endswith("position_embedding.weight"):
        std = 0.5  # beside patches of about that size
    elif name.endswith("mm_input_projection_weight"):
        std = shape[0] ** -0.5  # it stands to the right: its input is the first axis
    elif name.startswith("vision_tower.") and len(shape) == 1 and name.endswith(".weight"):
        mean = 1.0  # a LayerNorm's; the RMSNorms elsewhere store w for 1 + w
    return random_tensor(name, shape, seed, mean, std)
