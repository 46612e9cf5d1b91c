"""DeepSeek-VL2 as its original code has it, put together from transformers' parts: transformers has no such model.

The vision tower is transformers' SigLIP, the language half its DeepSeek-V2 or V3 (with LLaMA's attention where the
checkpoint has no MLA, as the tiny one); what lies between and the processor follow the original's
``modeling_deepseek_vl_v2.py`` and ``processing_deepseek_vl_v2.py``. It shares no code with the rest of
turbovit, and the tests hold it against what the original itself gave: ids, pixels, features and logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbovit.benchmarks.reference import Reference, spliced

_ROLES = {"user": "<|User|>", "assistant": "<|Assistant|>"}


class DeepseekVL2VisionModel(nn.Module):
    """transformers' SigLIP, the 2x2 patches beside each other, the projector: normalised [views, 3, height, width] to
    [views, tokens, hidden].

    Args:
        config: the checkpoint's ``vision_config``.
        tensors: all of the checkpoint's.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]):
        super().__init__()
        self.vision = _vision(config, _part(tensors, "vision."))
        self.projector = _projector(_part(tensors, "projector.layers."))

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> DeepseekVL2VisionModel:
        """In float32, from a checkpoint folder."""
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        return cls(config["vision_config"], _tensors(checkpoint))

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.vision(pixels).last_hidden_state
        grid = int(hidden.shape[1] ** 0.5)
        x = hidden.reshape(len(pixels), grid, grid, -1)
        x = F.pad(x, (0, 0, 0, grid % 2, 0, grid % 2)).permute(0, 3, 1, 2)
        return self.projector(F.unfold(x, kernel_size=2, stride=2).permute(0, 2, 1))


class DeepseekVL2Reference(Reference):
    """The original's processor and model over a checkpoint in its format, in float32."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoTokenizer

        self.config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.settings = json.loads((checkpoint / "processor_config.json").read_text(encoding="utf-8"))
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.image_id = self.tokenizer.convert_tokens_to_ids("<image>")
        tensors = _tensors(checkpoint)
        self.newline, self.separator = tensors["image_newline"], tensors["view_seperator"]
        self.model = DeepseekVL2VisionModel(self.config["vision_config"], tensors)
        self.language = _language(self.config["language_config"], _part(tensors, "language."))

    def inputs_from_messages(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Mapping[str, Tensor]:
        images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        ids: list[int] = [self.tokenizer.bos_token_id]
        crops: list[list[int]] = []
        tiles: list[Tensor] = []
        remaining = iter(images)
        for message in messages:
            parts = (part["text"] if part["type"] == "text" else "<image>" for part in message["content"])
            text = "".join(parts).strip()
            if message["role"] == "user":
                question = f": {text}\n\n" if text else ":"
                text = f"{_ROLES['user']}{question}{_ROLES['assistant']}:"
            own = [next(remaining) for _ in range(text.count("<image>"))]
            tokenized = self._tokenized(text, own, cropping=len(images) <= 2)
            ids, crops, tiles = ids + tokenized[0], crops + tokenized[1], tiles + tokenized[2]
            if message["role"] == "assistant":
                ids = [*ids, self.tokenizer.eos_token_id]
        if messages[-1]["role"] == "assistant":  # in inference the last answer is left open
            ids = ids[:-1]
        return _inputs(ids, crops, tiles, self.image_id)

    def inputs_from_prompt(self, prompt: str, images: Sequence[Any], **options: Any) -> Mapping[str, Tensor]:
        ids, crops, tiles = self._tokenized(prompt, images, cropping=len(images) <= 2)
        return _inputs([self.tokenizer.bos_token_id, *ids], crops, tiles, self.image_id)

    def features(self, views: Tensor) -> Tensor:
        """Of uint8 pixels [views, 3, height, width]: [views, tokens, hidden]."""
        mean, std = (torch.tensor(self.settings[name])[:, None, None] for name in ("image_mean", "image_std"))
        pixels = (views.float() / 255 - mean.to(views.device)) / std.to(views.device)
        return self.model(pixels.to(next(self.model.parameters()).dtype))

    def tower_outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            return {"features": self.features(inputs["pixels"])}

    def image_embeddings(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """One tensor [tokens, hidden] an image."""
        embeddings, begin = [], 0
        for columns, rows in inputs["images_spatial_crop"].tolist():
            end = begin + 1 + rows * columns
            views = torch.cat([self.features(view[None]) for view in inputs["pixels"][begin:end]])
            side = int(views.shape[1] ** 0.5)
            lines = [torch.cat([row, self.newline[None]]) for row in views[0].unflatten(0, (side, side))]
            local = []
            for number in range(rows):
                beside = views[1 + number * columns : 1 + (number + 1) * columns].unflatten(1, (side, side))
                local += [torch.cat([*beside[:, line], self.newline[None]]) for line in range(side)]
            order = [*lines, self.separator[None], *local]
            if self.config.get("global_view_pos", "head") != "head":
                order = [*local, self.separator[None], *lines]
            embeddings.append(torch.cat(order))
            begin = end
        return embeddings

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            embeddings = self.language.get_input_embeddings()(inputs["input_ids"][0])
            if len(inputs["pixels"]):
                embeddings[inputs["images_seq_mask"]] = torch.cat(self.image_embeddings(inputs))
            return self.language(inputs_embeds=embeddings[None]).logits[0]

    def spliced_logits(self, request: Mapping[str, Any]) -> Tensor:
        with torch.inference_mode():
            embeddings = self.language.get_input_embeddings()(torch.tensor(request["input_ids"]))
            return self.language(inputs_embeds=spliced(embeddings, request)[None]).logits[0]

    def _tokenized(
        self, text: str, images: Sequence[Any], cropping: bool
    ) -> tuple[list[int], list[list[int]], list[Tensor]]:
        """``tokenize_with_images``: ids, tiles of each image, and their pixels."""
        pieces = text.split("<image>")
        assert len(pieces) - 1 == len(images), f"{len(pieces) - 1} x <image> for {len(images)} images"
        ids: list[int] = []
        crops: list[list[int]] = []
        tiles: list[Tensor] = []
        for piece, image in zip(pieces, images, strict=False):
            columns, rows, views = self._views(image, cropping)
            side = -(-(self.settings["candidate_resolutions"][0][0] // self.settings["patch_size"]) // 2)
            count = side * (side + 1) + 1 + rows * side * (columns * side + 1)
            ids += [*self.tokenizer.encode(piece, add_special_tokens=False), *[self.image_id] * count]
            crops.append([columns, rows])
            tiles += views
        ids += self.tokenizer.encode(pieces[-1], add_special_tokens=False)
        return ids, crops, tiles

    def _views(self, image: Any, cropping: bool) -> tuple[int, int, list[Tensor]]:
        from PIL import ImageOps
        from torchvision.transforms.functional import pil_to_tensor

        side = self.settings["candidate_resolutions"][0][0]
        width, height = self._best_resolution(*image.size) if cropping else (side, side)
        colour = tuple(int(value * 255) for value in self.settings["image_mean"])
        views = [ImageOps.pad(image.convert("RGB"), (side, side), color=colour)]
        local = ImageOps.pad(image.convert("RGB"), (width, height), color=colour)
        for top in range(0, height, side):
            for left in range(0, width, side):
                views.append(local.crop((left, top, left + side, top + side)))
        return width // side, height // side, [pil_to_tensor(view) for view in views]

    def _best_resolution(self, image_width: int, image_height: int) -> tuple[int, int]:
        best, most, least_wasted = None, 0, float("inf")
        for width, height in self.settings["candidate_resolutions"]:
            scale = min(width / image_width, height / image_height)
            effective = min(int(image_width * scale) * int(image_height * scale), image_width * image_height)
            wasted = width * height - effective
            if effective > most or (effective == most and wasted < least_wasted):
                best, most, least_wasted = (width, height), effective, wasted
        assert best is not None
        return best


def _inputs(ids: list[int], crops: list[list[int]], tiles: list[Tensor], image_id: int) -> dict[str, Tensor]:
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "images_seq_mask": tokens[0] == image_id,
        "images_spatial_crop": torch.tensor(crops).reshape(-1, 2),
        "pixels": torch.stack(tiles) if tiles else torch.empty(0, dtype=torch.uint8),
    }


def _tensors(checkpoint: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return tensors


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _vision(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """transformers' SigLIP with the weights of timm's: other names, and q, k and v apart."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    model = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=config["width"],
            intermediate_size=int(config["width"] * config["mlp_ratio"]),
            num_hidden_layers=config["layers"],
            num_attention_heads=config.get("heads", 16),
            image_size=config.get("image_size", 384),
            patch_size=config["patch_size"],
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            vision_use_head=False,
        )
    )
    names = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj"}
    names |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    state = {"embeddings.position_embedding.weight": tensors["pos_embed"][0]}
    for kind in ("weight", "bias"):
        state[f"embeddings.patch_embedding.{kind}"] = tensors[f"patch_embed.proj.{kind}"]
        state[f"post_layernorm.{kind}"] = tensors[f"norm.{kind}"]
        for layer in range(config["layers"]):
            ours, theirs = f"blocks.{layer}.", f"encoder.layers.{layer}."
            state |= {f"{theirs}{new}.{kind}": tensors[f"{ours}{old}.{kind}"] for old, new in names.items()}
            parts = zip("qkv", tensors[f"{ours}attn.qkv.{kind}"].chunk(3), strict=True)
            state |= {f"{theirs}self_attn.{part}_proj.{kind}": tensor for part, tensor in parts}
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def _projector(tensors: Mapping[str, Tensor]) -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(0, len(tensors), 2):
        layer = nn.Linear(*tensors[f"{number}.weight"].shape[::-1])
        layer.load_state_dict({kind: tensors[f"{number}.{kind}"] for kind in ("weight", "bias")})
        layers += [*([nn.GELU()] if layers else []), layer]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def _language(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """transformers' DeepSeek-V2, or V3 where sigmoid and a correction bias choose the experts, as in the largest
    release; with LLaMA's attention in it where the checkpoint has no MLA.

    Raises:
        NotImplementedError: the experts are chosen in a way that none of these has.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    routing = config.get("topk_method", "greedy"), config.get("scoring_func", "softmax")
    classes = {
        ("greedy", "softmax"): (DeepseekV2Config, DeepseekV2ForCausalLM),
        ("noaux_tc", "sigmoid"): (DeepseekV3Config, DeepseekV3ForCausalLM),
    }
    if routing not in classes:
        raise NotImplementedError(f"{' with '.join(routing)}: transformers' DeepSeek-V2 and V3 choose no experts so")
    config_class, model_class = classes[routing]
    mla = config.get("use_mla", True)
    sizes = {name: value for name, value in config.items() if name in config_class.__annotations__}
    if not mla:  # its attention is replaced: only the sizes must be possible
        sizes |= {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    settings = config_class(**sizes)
    settings._attn_implementation = "sdpa"
    model = model_class(settings)
    if not mla:
        _use_llama_attention(model, config)
    state = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(settings.first_k_dense_replace, settings.num_hidden_layers):
        experts = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack(
                [tensors[f"{experts}{number}.{part}_proj.weight"] for number in range(settings.n_routed_experts)]
            )
            for part in ("gate", "up", "down")
        )
        state |= {f"{experts}gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}down_proj": down}
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def _use_llama_attention(model: Any, config: Mapping[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    llama = LlamaConfig(**{name: config[name] for name in names})
    llama._attn_implementation = "sdpa"
    model.model.rotary_emb = LlamaRotaryEmbedding(llama)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn = LlamaAttention(llama, number)
