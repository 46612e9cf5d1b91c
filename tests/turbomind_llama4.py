"""Llama 4's two sides, and images whose tiles are known by their size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbomind_requests import Message, assert_equals_reference, assert_sound, noise

if TYPE_CHECKING:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.benchmarks.reference_llama4 import Llama4Reference
    from turbovit.engines.bundle import Bundle

TOKENS = 144  # of a tile
START, END, IMAGE, PATCH = "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"
NEXT_COLUMN, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
RESERVED = (START, END, IMAGE, PATCH, NEXT_COLUMN, NEXT_ROW)

SINGLE, SMALL = noise(336, 336, 0), noise(120, 90, 1)  # one tile and no global view
WIDE, TALL = noise(600, 200, 2), noise(200, 600, 3)  # two tiles in a row, two in a column
SQUARE = noise(672, 672, 4)  # two rows of two


@dataclass(frozen=True)
class Pair:
    """LMDeploy's request path and transformers over one checkpoint."""

    side: LMDeploySide
    reference: Llama4Reference

    @classmethod
    def of(cls, checkpoint: Path, bundle: Bundle) -> Pair:
        from turbovit.benchmarks.lmdeploy_side import LMDeploySide
        from turbovit.benchmarks.reference_llama4 import Llama4Reference

        return cls(LMDeploySide(checkpoint, bundle.path), Llama4Reference(checkpoint))

    def assert_proved(self, chat: list[Message], **options: Any) -> dict[str, Any]:
        """The request of `chat` has the reference's ids and logits."""
        from turbovit.benchmarks.reference import chat_from_lmdeploy

        request = self.side.request(chat, **options)
        inputs = self.reference.inputs_from_messages(chat_from_lmdeploy(chat))
        assert_equals_reference(self.reference.compare(request, inputs))
        assert len(request.get("input_embeddings", [])) == len(inputs.get("pixel_values", []))
        if "input_embeddings" in request:
            assert_sound(request, self.side.encoder.model.encoder.manifest.facts["hidden"])
        return request
