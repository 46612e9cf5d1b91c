"""Messages for LMDeploy, images from a seed, and what every request to TurboMind must be."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image

from turbovit.benchmarks.reference import Comparison

Message = dict[str, Any]
LOGITS_BOUND = 1e-4  # float32, largest absolute difference


def noise(width: int, height: int, seed: int, channels: int = 3) -> Image.Image:
    """An image that no other seed gives, in grey (1 channel), RGB or RGBA."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(picture: Any) -> dict[str, Any]:
    return {"type": "image_data", "image_data": {"data": picture}}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def file_bytes(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def user(*parts: Any) -> Message:
    return {"role": "user", "content": list(parts)}


def assistant(content: Any) -> Message:
    return {"role": "assistant", "content": content}


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def assert_equals_reference(comparison: Comparison) -> None:
    assert comparison.ids_equal
    assert comparison.logits_error is not None
    assert comparison.logits_error <= LOGITS_BOUND


def assert_sound(request: Mapping[str, Any], hidden: int) -> None:
    """Ranges are sorted, disjoint and within the prompt, and each has its tensor's length."""
    tensors, ranges = request["input_embeddings"], request["input_embedding_ranges"]
    assert len(tensors) == len(ranges) > 0
    end_before = 0
    for tensor, (begin, end) in zip(tensors, ranges, strict=True):
        assert end_before <= begin < end
        assert tensor.shape == (end - begin, hidden)
        assert torch.isfinite(tensor).all()
        end_before = end
    assert end_before <= len(request["input_ids"])


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two requests have equal ids, ranges and features, bit by bit."""
    return (
        first["input_ids"] == second["input_ids"]
        and first["input_embedding_ranges"] == second["input_embedding_ranges"]
        and all(map(torch.equal, first["input_embeddings"], second["input_embeddings"]))
    )
