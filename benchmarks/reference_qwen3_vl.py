"""Qwen3-VL, dense and MoE, as transformers runs it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbovit.benchmarks.reference import Reference, float32_model, spliced

_TEMPLATE_OPTIONS = ("add_vision_id", "tools")
_VIDEO_OPTIONS = {"do_sample_frames": False, "cap_pixels_per_frame": False}


class Qwen3VLReference(Reference):
    """`Qwen3VLProcessor` and `Qwen3VLForConditionalGeneration`, or its MoE twin."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = float32_model(AutoModelForImageTextToText, checkpoint)

    def inputs_from_messages(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Mapping[str, Tensor]:
        """As the base class; `videos` among the options are (frames, metadata) pairs in prompt order."""
        continues = messages[-1]["role"] == "assistant"  # LMDeploy lets the model continue such an answer
        template = {name: options.pop(name) for name in _TEMPLATE_OPTIONS if name in options}
        prompt = self.processor.apply_chat_template(
            messages, add_generation_prompt=not continues, continue_final_message=continues, **template
        )
        images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        return self.inputs_from_prompt(prompt, images, **options)

    def inputs_from_prompt(
        self, prompt: str, images: Sequence[Any], videos: Sequence[tuple[Any, Mapping[str, Any]]] = (), **options: Any
    ) -> Mapping[str, Tensor]:
        if videos:
            metadata = [copy.deepcopy(metadata) for _, metadata in videos]  # the processor changes it
            given = options.get("videos_kwargs", {})
            options["videos_kwargs"] = {**_VIDEO_OPTIONS, "video_metadata": metadata, **given}
        frames = [frames for frames, _ in videos]
        return self.processor(
            text=[prompt], images=list(images) or None, videos=frames or None, return_tensors="pt", **options
        )

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            return self.model(**inputs).logits[0]

    def tower_outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        frames = len(inputs["pixels"])
        height, width = (int(size) + 1 for size in inputs["patch_position"].amax(0))
        pixels = (inputs["pixels"].flatten(0, 1).float() / 255 - 0.5) / 0.5  # the model casts them
        grid = torch.tensor([[1, height, width]] * frames, device=pixels.device)
        with torch.inference_mode():
            found = self.model.get_image_features(pixels, grid, return_dict=True)
        outputs = {"features": found.pooler_output}
        outputs |= {f"deepstack_{level}": rows for level, rows in enumerate(found.deepstack_features)}
        return {name: torch.stack(rows) for name, rows in outputs.items()}

    def spliced_logits(self, request: Mapping[str, Any]) -> Tensor:
        meta = request["input_meta"]
        ids = torch.tensor(request["input_ids"])
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for begin, end in request.get("input_embedding_ranges", []):
            mask[begin:end] = True
        with torch.inference_mode():
            embeddings = spliced(self.model.get_input_embeddings()(ids), request)
            hidden = self.model.model.language_model(
                inputs_embeds=embeddings[None],
                position_ids=meta["mrope_position_ids"][:, None],
                visual_pos_masks=mask[None] if mask.any() else None,
                deepstack_visual_embeds=meta["deepstack_embeds"] or None,
            ).last_hidden_state
            return self.model.lm_head(hidden)[0]
