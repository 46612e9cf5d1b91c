"""DeepSeek-VL2's two sides, and images whose tiles are known by their size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbomind_requests import Message, assert_equals_reference, assert_sound, noise

if TYPE_CHECKING:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
    from turbovit.engines.bundle import Bundle

IMAGE, USER, ASSISTANT = "<image>", "<|User|>", "<|Assistant|>"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"  # noqa: RUF001
SMALL, WIDE, TALL, SQUARE = noise(120, 90, 0), noise(700, 300, 1), noise(300, 700, 2), noise(640, 600, 3)
# Tokens of each where images are cut, which is where there are at most two; else 421.
TOKENS = {"SMALL": 421, "WIDE": 617, "TALL": 631, "SQUARE": 1023}


@dataclass(frozen=True)
class Pair:
    """LMDeploy's request path and the reference over one checkpoint."""

    side: LMDeploySide
    reference: DeepseekVL2Reference

    @classmethod
    def of(cls, checkpoint: Path, bundle: Bundle) -> Pair:
        from turbovit.benchmarks.lmdeploy_side import LMDeploySide
        from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference

        return cls(LMDeploySide(checkpoint, bundle.path), DeepseekVL2Reference(checkpoint))

    def assert_proved(self, chat: list[Message], **options: Any) -> dict[str, Any]:
        """The request of `chat` has the reference's ids and logits, and one range an image."""
        from turbovit.benchmarks.reference import chat_from_lmdeploy

        request = self.side.request(chat, **options)
        inputs = self.reference.inputs_from_messages(chat_from_lmdeploy(chat))
        assert_equals_reference(self.reference.compare(request, inputs))
        assert len(request.get("input_embeddings", [])) == len(inputs["images_spatial_crop"])
        if "input_embeddings" in request:
            assert_sound(request, self.side.encoder.model.encoder.manifest.facts["hidden"])
        return request
