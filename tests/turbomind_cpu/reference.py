"""transformers' answers in float32, for the bfloat16 weights that TurboMind reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from turbomind_cpu.rig import Request


class Reference:
    """A checkpoint's language model in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def tokens(self, input_ids: Sequence[int], count: int) -> list[int]:
        """The greedy answer, of `count` tokens whatever they are."""
        prompt = torch.tensor([input_ids])
        ids = self.model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return ids[0, len(input_ids) :].tolist()

    @torch.inference_mode()
    def logits(self, request: Request, answer: Sequence[int]) -> torch.Tensor:
        """Of prompt and answer without its last token, [tokens, vocabulary], with the request's rows at its ranges."""
        embeds = self.model.get_input_embeddings()(torch.tensor([*request.input_ids, *answer[:-1]]))
        pairs = zip(request.input_embeddings or (), request.input_embedding_ranges or (), strict=True)
        for rows, (begin, end) in pairs:
            embeds[begin:end] = rows.float()
        return self.model(inputs_embeds=embeds[None]).logits[0]
