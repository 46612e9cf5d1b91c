"""Gemma 3 as transformers runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbovit.benchmarks.reference import Reference, float32_model, spliced


class Gemma3Reference(Reference):
    """`Gemma3Processor` and `Gemma3ForConditionalGeneration`."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoProcessor, Gemma3ForConditionalGeneration

        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = float32_model(Gemma3ForConditionalGeneration, checkpoint)

    def inputs_from_messages(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Mapping[str, Tensor]:
        continues = messages[-1]["role"] == "assistant"  # LMDeploy lets the model continue such an answer
        return self.processor.apply_chat_template(
            messages,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"return_tensors": "pt", **options},
        )

    def inputs_from_prompt(self, prompt: str, images: Sequence[Any], **options: Any) -> Mapping[str, Tensor]:
        return self.processor(text=prompt, images=list(images) or None, return_tensors="pt", **options)

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            return self.model(**inputs).logits[0]

    def tower_outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pixels = ((inputs["pixels"].float() / 255 - 0.5) / 0.5).to(self.model.dtype)
        with torch.inference_mode():
            return {"features": self.model.get_image_features(pixels, return_dict=True).pooler_output}

    def spliced_logits(self, request: Mapping[str, Any]) -> Tensor:
        ids = torch.tensor(request["input_ids"])
        kinds = torch.zeros_like(ids)  # 1 where attention goes in both directions: an image's tokens
        for begin, end in request.get("input_embedding_ranges", []):
            kinds[begin:end] = 1
        with torch.inference_mode():
            embeddings = spliced(self.model.get_input_embeddings()(ids), request)
            return self.model(inputs_embeds=embeddings[None], token_type_ids=kinds[None]).logits[0]
