"""Qwen3-VL's two sides, videos from a seed, and what every request of the family must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from turbomind_requests import Message, assert_equals_reference, assert_sound

if TYPE_CHECKING:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.benchmarks.reference_qwen3_vl import Qwen3VLReference
    from turbovit.engines.bundle import Bundle


@dataclass(frozen=True)
class Pair:
    """LMDeploy's request path and transformers over one checkpoint."""

    side: LMDeploySide
    reference: Qwen3VLReference

    @classmethod
    def of(cls, checkpoint: Path, bundle: Bundle) -> Pair:
        from turbovit.benchmarks.lmdeploy_side import LMDeploySide
        from turbovit.benchmarks.reference_qwen3_vl import Qwen3VLReference

        return cls(LMDeploySide(checkpoint, bundle.path), Qwen3VLReference(checkpoint))

    def assert_proved(self, chat: list[Message], **options: Any) -> dict[str, Any]:
        """The request of `chat` is the reference's; `options` as `expected_inputs` takes them."""
        request = self.side.request(chat, **options)
        self.assert_equal(request, expected_inputs(self.reference, chat, **options))
        return request

    def assert_equal(self, request: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> None:
        """Ids, logits, positions, and as many deepstack rows as there are features."""
        assert_equals_reference(self.reference.compare(request, inputs))
        meta, facts = request["input_meta"], self.side.encoder.model.encoder.manifest.facts
        positions, delta = rope_index(self.reference, inputs)
        assert torch.equal(meta["mrope_position_ids"], positions)
        assert meta["mrope_position_delta"] == delta
        assert request.keys() <= {"prompt", "input_ids", "input_embeddings", "input_embedding_ranges", "input_meta"}
        if "input_embeddings" not in request:
            assert meta["deepstack_embeds"] == []
            return
        assert_sound(request, facts["hidden"])
        rows = sum(map(len, request["input_embeddings"]))
        shapes = [level.shape for level in meta["deepstack_embeds"]]
        assert shapes == [(rows, facts["hidden"])] * facts["deepstack_levels"]


def rope_index(reference: Qwen3VLReference, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """transformers' positions [3, tokens] and delta."""
    positions, delta = reference.model.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
    )
    return positions[:, 0], int(delta)


def expected_inputs(
    reference: Qwen3VLReference,
    chat: list[Message],
    media_io_kwargs: Mapping[str, Any] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Any = None,
) -> Mapping[str, torch.Tensor]:
    """The processor's output for a chat in LMDeploy's form, and for LMDeploy's own options."""
    from turbovit.benchmarks.reference import chat_from_lmdeploy

    options: dict[str, Any] = {**(chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
    for kind, limits in (mm_processor_kwargs or {}).items():
        size = dict(getattr(reference.processor, f"{kind}_processor").size)
        size["shortest_edge"] = limits.get("min_pixels", size["shortest_edge"])
        size["longest_edge"] = limits.get("max_pixels", size["longest_edge"])
        options[f"{kind}s_kwargs"] = {"size": size}
    frames = [loaded(url, (media_io_kwargs or {}).get("video", {})) for url in video_urls(chat)]
    return reference.inputs_from_messages(chat_from_lmdeploy(chat), videos=frames, **options)


def video_urls(chat: list[Message]) -> list[str]:
    parts = [part for message in chat if isinstance(message.get("content"), list) for part in message["content"]]
    return [part["video_url"]["url"] for part in parts if part["type"] == "video_url"]


def loaded(url: str, options: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames and metadata as LMDeploy's own loader gives them."""
    from lmdeploy.vl.media.connection import load_from_url
    from lmdeploy.vl.media.image import ImageMediaIO
    from lmdeploy.vl.media.video import VideoMediaIO

    return load_from_url(url, VideoMediaIO(image_io=ImageMediaIO(), **options))


def video(url: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": str(url)}}


def frames_from_seed(width: int, height: int, frames: int, seed: int) -> np.ndarray:
    """uint8 [frames, height, width, 3], every frame another; coarse, so that a video codec keeps them apart."""
    blocks = np.random.default_rng(seed).integers(0, 256, (frames, -(-height // 16), -(-width // 16), 3), np.uint8)
    return blocks.repeat(16, axis=1).repeat(16, axis=2)[:, :height, :width]


def write_video(path: Path, width: int, height: int, frames: int, fps: float, seed: int) -> Path:
    """An MP4 file."""
    import cv2

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, (width, height))
    assert writer.isOpened()
    for frame in frames_from_seed(width, height, frames, seed):
        writer.write(frame)
    writer.release()
    return path
