"""Llama 4 as transformers has it: its own forward fails in 5.24, so its parts are put together here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbovit.benchmarks.reference import Reference, float32_model, spliced


class Llama4Reference(Reference):
    """`Llama4Processor`, and the parts of `Llama4ForConditionalGeneration`."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoProcessor, Llama4ForConditionalGeneration

        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = float32_model(Llama4ForConditionalGeneration, checkpoint)

    def inputs_from_messages(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Mapping[str, Tensor]:
        continues = messages[-1]["role"] == "assistant"
        return self.processor.apply_chat_template(
            messages,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=options,
        )

    def inputs_from_prompt(self, prompt: str, images: Sequence[Any], **options: Any) -> Mapping[str, Tensor]:
        return self.processor(text=prompt, images=list(images) or None, return_tensors="pt", **options)

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            embeddings = self.model.get_input_embeddings()(inputs["input_ids"])
            if "pixel_values" in inputs:
                pixels = inputs["pixel_values"].float()  # the processor gives bfloat16
                features = self.model.get_image_features(pixels, return_dict=True).last_hidden_state
                projected = self.model.multi_modal_projector(features.flatten(0, 1))
                mask = (inputs["input_ids"] == self.model.config.image_token_id)[..., None]
                embeddings = embeddings.masked_scatter(mask, projected)
            return self.model.language_model(inputs_embeds=embeddings).logits[0]

    def tower_outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Its processor rescales and normalises in bfloat16.
        pixels = ((inputs["pixels"].bfloat16() * (1 / 255) - 0.5) / 0.5).to(self.model.dtype)
        with torch.inference_mode():
            features = self.model.get_image_features(pixels, return_dict=True).last_hidden_state
            return {"features": self.model.multi_modal_projector(features)}

    def spliced_logits(self, request: Mapping[str, Any]) -> Tensor:
        with torch.inference_mode():
            embeddings = self.model.get_input_embeddings()(torch.tensor(request["input_ids"]))
            return self.model.language_model(inputs_embeds=spliced(embeddings, request)[None]).logits[0]
